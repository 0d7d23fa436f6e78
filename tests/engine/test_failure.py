"""What goes wrong in a run is an error that says so, on every rank, soon; never a silent hang."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.links.null import NullLink

from tests.support import gloo, launched
from tests.support.loops import attached, flat, refusal, sgd

AT = 5
"""The step at which something goes wrong: odd, so that rounds of period 2 come right after."""
RANKS = 3
SLOW = pytest.mark.slow

RECIPES: dict[str, tuple[la.Recipe, str]] = {
    "ddp": (la.ddp(), "gradient round"),
    "delayed": (la.local_sgd(2, delay=1), "Average round"),
    "slowmo": (la.slowmo(None, 2, momentum=0.5), "SlowMomentum round"),
    "sgp": (la.sgp(delay=1), "PushSum round"),
}
"""Recipes, and how a message calls the round that was lost."""


class BrokenLoopError(Exception):
    """What a user's loop may raise."""


def trouble(*_: object) -> None:
    raise BrokenLoopError("the user's own trouble")


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()


# -- a process that ends or hangs ----


def live(pipe: Connection, name: str, culprit: int, timeout: float) -> None:
    """Train until something is wrong, which the culprit brings about at step AT."""
    la.init()
    rank = int(os.environ["RANK"])
    model, optimizer, sync = attached(rank, RECIPES[name][0], timeout=timeout)
    with sync:
        for t in range(1, AT + 20):
            backward(model, optimizer)
            if t == AT and rank == culprit:
                pipe.send("acts")
                time.sleep(300)  # until the test stops or kills this process
            optimizer.step()


def check_lost(name: str, lost: int, number: int, timeout: float) -> list[str]:
    """The rank, the round and the advice, on every other rank."""
    with launched.running(launched.of_torchrun(RANKS), live, name, lost, timeout) as ranks:
        culprit, others = ranks[lost], [*ranks[:lost], *ranks[lost + 1 :]]
        assert culprit.next() == "acts"
        os.kill(culprit.process.pid, number)
        said = [rank.next() for rank in others]
        assert [rank.ended() for rank in others] == [0, 0]
    steps = range(AT - (name in ("delayed", "sgp")), AT + 2)
    for text in said:
        assert "LinkError: " in text and f"rank {lost}" in text and "checkpoint" in text, text
        assert RECIPES[name][1] in text, f"the round is not named: {text}"
        assert any(re.search(rf"\b{step}\b", text) for step in steps), f"no step: {text}"
    return said


@pytest.mark.parametrize(("name", "culprit"), [("ddp", 0), pytest.param("sgp", 1, marks=SLOW)])
def test_a_rank_that_is_killed(name: str, culprit: int) -> None:
    check_lost(name, culprit, signal.SIGKILL, 60.0)


def test_a_rank_that_hangs() -> None:
    said = check_lost("slowmo", 1, signal.SIGSTOP, 5.0)
    assert any("does not answer" in text for text in said)


def end(pipe: Connection) -> str:
    """Train for two steps, the second of which takes rank 0 long."""
    la.init()
    rank = int(os.environ["RANK"])
    model, optimizer, _ = attached(rank, la.ddp())
    step(model, optimizer)
    backward(model, optimizer)
    if rank == 0:
        pipe.send("computes")
        pipe.recv()
    optimizer.step()
    return "complete"


@pytest.mark.fault("a rank's last step raised since another one's program had ended before")
def test_where_all_ranks_have_the_same_model_any_may_end_first() -> None:
    """`finish` has nothing to do there."""
    with launched.running(launched.of_torchrun(2), end) as (slow, fast):
        assert (slow.next(), fast.next(), fast.ended()) == ("computes", "complete", 0)
        time.sleep(1.0)  # longer than between two checks
        slow.pipe.send("go on")
        assert (slow.next(), slow.ended()) == ("complete", 0)


# -- a rank that lives on, elsewhere ----


def tell(rank: int, name: str, deed: str) -> str:
    """What this rank is told, where rank 1 does something else at step AT."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 3))
    if deed == "raises in backward":  # with its second bucket unsent
        model.extend([nn.Linear(3, 100_000), nn.Linear(100_000, 2)])
    optimizer = sgd(model.double())
    try:
        with la.attach(model, optimizer, RECIPES[name][0], timeout=60) as sync:
            for t in range(1, AT + 20):
                if (rank, t) == (1, AT):
                    act(deed, model, optimizer, sync)
                else:
                    step(model, optimizer)
    except (la.LinkError, BrokenLoopError) as error:
        return str(error)
    return "nothing"


def act(deed: str, model: Any, optimizer: Any, sync: la.Synchronizer) -> None:
    if deed == "raises":
        trouble()
    if deed == "raises in backward":
        model[0].weight.register_hook(trouble)
    backward(model, optimizer)
    if deed == "finishes":
        sync.finish()
    if deed == "asks for a mean":
        sync.mean(1.0)
    if deed == "asks for the consensus":
        sync.consensus_state_dict()
    if deed not in ("finishes", "skips a step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "deed", "words"),
    [
        ("delayed", "raises", "has left.*Average round|Average round.*has left"),
        ("ddp", "raises in backward", f"rank 1: gradients after [{AT - 2}{AT - 1}] steps"),
    ],
)
def test_a_rank_that_has_left_but_lives(pool: gloo.Pool, name: str, deed: str, words: str) -> None:
    """No connection closes, and it would be waited for in vain, or for the rest of its messages."""
    said = pool.run(tell, name, deed, ranks=4)
    for rank in (0, 2, 3):
        assert re.search(words, said[rank]), said[rank]


PLACES = [
    *(("ddp", "finishes"), ("delayed", "skips a step"), ("sgp", "asks for the consensus")),
    *(("slowmo", "asks for a mean"), ("slowmo", "skips a step")),
]


@pytest.mark.parametrize(("name", "deed"), PLACES)
def test_ranks_that_are_at_different_places(pool: gloo.Pool, name: str, deed: str) -> None:
    """They meet, and find that they do not belong together: an error on all, and never an average
    of what is not alike. A batch that was skipped shows at the next gradient round; where there
    is none, at the end, in `finish()`."""
    for text in la.simulate(partial(tell, name=name, deed=deed), workers=RANKS):
        assert "rank" in text and "1" in text and ("disagree" in text or "in vain" in text), text
    if (name, deed) in (("ddp", "finishes"), ("slowmo", "skips a step")):
        for text in pool.run(tell, name, deed, ranks=4):
            assert "rank 1" in text or "ranks [1]" in text, text
            assert "same optimizer steps" in text and "finish()" in text


@pytest.mark.parametrize("raises", [False, True])
def test_simulated_ranks_that_end_or_raise(raises: bool) -> None:
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        model, optimizer, sync = attached(rank, la.local_sgd(2))
        try:
            with sync if raises else nullcontext():
                for t in range(1, 9):
                    if (rank, t) == (1, 4):
                        return trouble() if raises else None
                    step(model, optimizer)
        except la.LinkError as error:
            told[rank] = str(error)
            if raises:
                raise
            # whoever goes on gets it again, at once
            for call in (sync.finish, partial(sync.mean, 1.0), sync.consensus_state_dict):
                refusal(call, la.LinkError)

    with pytest.raises(BrokenLoopError) if raises else nullcontext():
        la.simulate(run, workers=3)
    assert told.keys() == {0, 2}
    for text in told.values():
        assert "Average round after" in text
        assert ("failed: BrokenLoopError" if raises else "ranks [1] have ended") in text


# -- leaving on an exception ----


@pytest.mark.parametrize("name", ["ddp", "delayed"])
def test_an_exception_sends_nothing_and_propagates(name: str) -> None:
    """And steps after `detach` are none of laconic's business."""

    def run(rank: int) -> None:
        model, optimizer, sync = attached(rank, RECIPES[name][0])
        with pytest.raises(BrokenLoopError), sync:
            for _ in range(AT):
                step(model, optimizer)
            sent, weights = sync.stats().bytes_sent, flat(model)
            trouble()
        assert torch.equal(weights, flat(model))
        for _ in range(rank):
            step(model, optimizer)
        assert sync.stats().bytes_sent == sent and not sync.attached and sync.step == AT

    la.simulate(run, workers=2)


def leave_first(rank: int, left: Path) -> str:
    """Rank 1 raises while its message is on its way, which the others answer once it has left."""
    model, optimizer, sync = attached(rank, RECIPES["delayed"][0], timeout=300)
    said = "nothing"
    try:
        with sync:
            for t in range(1, 5):
                while t == 2 and rank != 1 and not left.exists():
                    time.sleep(0.01)
                step(model, optimizer)
                if t == 2 and rank == 1:
                    trouble()
    except (la.LinkError, BrokenLoopError) as error:
        said = str(error)
    if rank == 1:
        left.touch()
    return said


def test_an_exception_waits_for_no_message(pool: gloo.Pool, tmp_path: Path) -> None:
    found = pool.run(leave_first, tmp_path / "left", ranks=4, timeout=100)
    assert found[1] == "the user's own trouble" and all("rank 1" in found[r] for r in (0, 2, 3))


@pytest.mark.fault("errors said 'after 0 steps' where no step was taken, or others had been")
@pytest.mark.parametrize("steps", [3, 0])
def test_an_error_names_no_step_that_was_not_taken(steps: int) -> None:
    said: list[str] = []

    def run(rank: int) -> None:
        model, optimizer, sync = attached(rank, la.local_sgd(1))
        load = partial(sync.load_state_dict, sync.state_dict())
        for _ in range(steps + rank):  # one rank takes one more
            step(model, optimizer)
        said.append(refusal(load if steps else sync.consensus_state_dict, la.LinkError))

    with pytest.raises(la.LinkError):
        la.simulate(run, 2)
    assert said and not re.search("after 0 steps|after step 0", said[0]), said


class Ringing(la.links.Throttled):
    """As if a signal handler raised when a step was counted, and its rounds have not begun."""

    rings = False

    def check_peers(self) -> None:
        if self.rings:
            trouble()


@pytest.mark.fault("a round was folded a step late after an exception, and nothing said so")
def test_an_exception_between_a_step_and_its_rounds_is_told_next() -> None:
    link = Ringing(NullLink())
    model, optimizer, sync = attached(0, RECIPES["delayed"][0], link=link)
    link.rings = True
    refusal(partial(step, model, optimizer), BrokenLoopError)
    link.rings = False
    for call in (partial(step, model, optimizer), sync.finish):
        assert "the rounds after step 1 were interrupted" in refusal(call, la.LinkError)
