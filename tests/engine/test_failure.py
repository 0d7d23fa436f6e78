"""What goes wrong in a run is an error that says so, on every rank, soon; never a silent hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.updates import Average

from tests.support import gloo

TIMEOUT = 20.0
"""Seconds given to `laconic.attach`."""
SECONDS = 200.0
"""After so many a process hangs."""
AT = 5
"""The step at which something goes wrong: odd, so that rounds of period 2 come right after."""
RANKS = 3

RECIPES: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "local_sgd": la.local_sgd(2),
    "delayed": la.local_sgd(2, delay=1),
    "slowmo": la.slowmo(None, 2, momentum=0.5),
    "sgp": la.sgp(delay=1),
    "lsgd": la.lsgd(2, local_period=0),
}
ROUNDS = {
    "ddp": "gradient round",
    "local_sgd": "Average round",
    "delayed": "Average round",
    "slowmo": "SlowMomentum round",
    "sgp": "PushSum round",
    "lsgd": "LeaderPull round",
}
"""How a message calls the round that was lost."""


def job(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()


# -- over processes ----


@dataclass(frozen=True)
class Story:
    """At step AT the culprit does something that the others do not."""

    recipe: str
    act: str
    culprit: int = 1
    timeout: float = TIMEOUT


LIVES_ON = ("raises and lives on", "raises in backward", "breaks in a message")


class BrokenLoopError(Exception):
    """What a user's loop may raise."""


def act(story: Story, sync: la.Synchronizer, connection: Connection) -> bool:
    """The culprit's own step AT; whether it takes the ordinary step as well."""
    connection.send(("acts", ""))
    if story.act == "is silent":
        time.sleep(300)  # until the test stops or kills this process
    if story.act == "raises in backward":
        raise_in_backward(sync)
    if story.act == "breaks in a message":
        break_in_a_message(sync)
    if story.act.startswith("raises"):
        raise BrokenLoopError("the user's own trouble")
    if story.act == "finishes":
        sync.finish()
    return story.act not in ("finishes", "skips a step")


def raise_in_backward(sync: la.Synchronizer) -> None:
    """Send the first of two buckets, and no more."""

    def trouble(_: Tensor) -> None:
        raise BrokenLoopError("the user's own trouble")

    model = sync.driver.session.model
    model[0].weight.register_hook(trouble)  # type: ignore[operator, index, union-attr]
    model(torch.randn(5, 4)).square().mean().backward()


def break_in_a_message(sync: la.Synchronizer) -> None:
    """Have this process's next round fail while the others are in it."""

    def trouble(*_: object) -> None:
        raise BrokenLoopError("the user's own trouble")

    for kind in {type(r.exchange) for r in sync.recipe}:
        kind.run = trouble  # type: ignore[method-assign, assignment]


def live(rank: int, story: Story, port: int, connection: Connection) -> None:
    """One rank's process: train until something is wrong, and say what."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=limit)
    model, optimizer = job(rank)
    if story.act == "raises in backward":  # with its second bucket unsent
        model = nn.Sequential(model, nn.Linear(3, 100_000), nn.Linear(100_000, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with la.attach(model, optimizer, RECIPES[story.recipe], timeout=story.timeout) as sync:
            for t in range(1, AT + 20):
                acts = rank == story.culprit and t == AT
                backward(model, optimizer)
                if not acts or act(story, sync, connection):
                    optimizer.step()
        connection.send(("nothing", f"{AT + 20} steps"))
    except Exception as error:
        connection.send((type(error).__name__, str(error)))
    if story.act in LIVES_ON and rank == story.culprit:
        time.sleep(300)  # until the test kills this process


@dataclass
class Run:
    """The processes of one story."""

    processes: list[ForkServerProcess]
    connections: list[Connection]

    def hear(self, rank: int) -> tuple[str, str]:
        assert self.connections[rank].poll(SECONDS), f"rank {rank} is silent"
        kind, text = self.connections[rank].recv()
        return str(kind), str(text)

    def errors(self, ranks: list[int]) -> dict[int, tuple[str, str]]:
        """What each of ``ranks`` says."""
        return {rank: self.hear(rank) for rank in ranks}


@contextmanager
def running(context: Any, story: Story) -> Iterator[Run]:
    """The story under way; afterward none of its processes is left, by force if need be."""
    run, port = Run([], []), gloo.free_port()
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=live, args=(rank, story, port, theirs), daemon=True)
        process.start()
        theirs.close()
        run.processes.append(process)
        run.connections.append(ours)
    try:
        yield run
    finally:
        for process in run.processes:
            if process.is_alive():
                process.kill()
            process.join()


def ended(run: Run, ranks: list[int]) -> bool:
    """Whether the processes of ``ranks`` end by themselves, and well."""
    for rank in ranks:
        run.processes[rank].join(SECONDS)
    return all(run.processes[rank].exitcode == 0 for rank in ranks)


def tell(run: Run, story: Story, signal_number: int | None) -> dict[int, tuple[str, str]]:
    """Let the story happen; what the others say, each having ended well afterward."""
    assert run.hear(story.culprit) == ("acts", "")
    if signal_number is not None:
        pid = run.processes[story.culprit].pid
        assert pid is not None
        os.kill(pid, signal_number)
    others = [rank for rank in range(RANKS) if rank != story.culprit]
    said = run.errors(others)
    assert ended(run, others)
    return said


def check_lost(said: dict[int, tuple[str, str]], story: Story) -> None:
    """The rank, the round and the advice, on every other rank."""
    for kind, text in said.values():
        assert kind == "LinkError", text
        assert f"rank {story.culprit}" in text
        assert "checkpoint" in text, "no advice"
    for _, text in said.values():
        assert ROUNDS[story.recipe] in text, f"the round is not named: {text}"
        steps = range(AT - (story.recipe in ("delayed", "sgp")), AT + 2)
        named = any(re.search(rf"\b{step}\b", text) for step in steps)
        assert named, f"the step is not named: {text}"


@pytest.mark.parametrize(
    ("recipe", "culprit"),
    [("ddp", 0), ("local_sgd", 2), ("delayed", 0), ("slowmo", 2), ("sgp", 1), ("lsgd", 0)],
)
def test_a_rank_that_is_killed(context: Any, recipe: str, culprit: int) -> None:
    story = Story(recipe, "is silent", culprit)
    with running(context, story) as run:
        check_lost(tell(run, story, signal.SIGKILL), story)


def test_a_rank_that_hangs(context: Any) -> None:
    def hang(recipe: str) -> bool:
        story = Story(recipe, "is silent", timeout=5.0)  # which passes
        with running(context, story) as run:
            said = tell(run, story, signal.SIGSTOP)
            check_lost(said, story)
        return any("does not answer" in text for _, text in said.values())

    with ThreadPoolExecutor(2) as both:  # at once: it is waiting that takes long
        assert list(both.map(hang, ["ddp", "slowmo"])) == [True, True]


@pytest.mark.parametrize("recipe", ["ddp", "slowmo"])
def test_a_rank_that_raises_in_its_loop(context: Any, recipe: str) -> None:
    story = Story(recipe, "raises")
    with running(context, story) as run:
        check_lost(tell(run, story, None), story)
        assert run.hear(story.culprit) == ("BrokenLoopError", "the user's own trouble")
        assert ended(run, [story.culprit])


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd", "delayed"])
def test_a_rank_that_has_left_but_lives(context: Any, recipe: str) -> None:
    """No connection closes, and it would be waited for in vain."""
    story = Story(recipe, "raises and lives on")
    with running(context, story) as run:
        said = tell(run, story, None)
        assert run.processes[story.culprit].is_alive()
    for kind, text in said.values():
        assert kind == "LinkError", text
        assert re.search(rf"rank {story.culprit}: [^;]* and has left", text), text
        assert ROUNDS[story.recipe] in text


def test_a_rank_that_leaves_with_half_of_its_gradients_sent(context: Any) -> None:
    """In one backward pass more than the others, who learn it from what it has sent."""
    story = Story("ddp", "raises in backward")
    with running(context, story) as run:
        for _, (kind, text) in tell(run, story, None).items():
            assert kind == "LinkError", text
            assert f"rank {story.culprit}: gradients after {AT - 1} steps" in text, text


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd"])
def test_a_rank_that_leaves_after_its_round_failed(context: Any, recipe: str) -> None:
    """The others are in the same call, and would be waiting for its messages."""
    story = Story(recipe, "breaks in a message")
    with running(context, story) as run:
        for _, (kind, text) in tell(run, story, None).items():
            assert kind == "LinkError" and "has left" in text, text


PLACES = [(recipe, "finishes") for recipe in RECIPES]
PLACES += [("ddp", "skips a step"), ("slowmo", "skips a step")]


@pytest.mark.parametrize(("recipe", "deed"), PLACES)
def test_ranks_that_are_at_different_places(context: Any, recipe: str, deed: str) -> None:
    """They meet, and find that they do not belong together: an error on all, and never an average
    of what is not alike. A batch that was skipped shows at the next gradient round; where there
    is none, at the end, in `finish()`."""
    story = Story(recipe, deed)
    with running(context, story) as run:
        assert run.hear(story.culprit) == ("acts", "")
        said = run.errors(list(range(RANKS)))
        assert ended(run, list(range(RANKS)))
    for kind, text in said.values():
        assert kind == "LinkError", text
        assert f"rank {story.culprit}" in text
        assert "same optimizer steps" in text, "no advice"
        assert ("finish()" in text) == (deed == "finishes" or recipe == "slowmo")


# -- the same in simulation ----


def simulated(recipe: str, deed: Callable[[int, la.Synchronizer], bool]) -> list[str]:
    """What every rank is told; ``deed`` says whether that rank takes its ordinary step AT."""

    def run(rank: int) -> str:
        model, optimizer = job(rank)
        try:
            with la.attach(model, optimizer, RECIPES[recipe]) as sync:
                for t in range(1, AT + 20):
                    backward(model, optimizer)
                    if t != AT or deed(rank, sync):
                        optimizer.step()
        except la.LinkError as error:
            return str(error)
        return "nothing"

    return la.simulate(run, workers=RANKS)


def finish_early(rank: int, sync: la.Synchronizer) -> bool:
    if rank == 1:
        sync.finish()
    return rank != 1


def skip(rank: int, sync: la.Synchronizer) -> bool:
    return rank != 1


def ask_for_a_mean(rank: int, sync: la.Synchronizer) -> bool:
    if rank == 1:
        sync.mean(1.0)
    return True


def ask_for_the_consensus(rank: int, sync: la.Synchronizer) -> bool:
    if rank == 1:
        with sync.consensus():
            pass
    return True


DEEDS = [finish_early, skip, ask_for_a_mean, ask_for_the_consensus]


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_simulated_ranks_at_different_places(recipe: str, deed: Any) -> None:
    for text in simulated(recipe, deed):
        assert "rank" in text and "1" in text, text
        assert "disagree" in text or "in vain" in text


def test_a_simulated_rank_that_ends_early() -> None:
    def run(rank: int) -> str:
        model, optimizer = job(rank)
        la.attach(model, optimizer, la.local_sgd(2))
        for _ in range(3 if rank == 1 else 9):
            try:
                one_step(model, optimizer)
            except la.LinkError as error:
                return str(error)
        return "ended"

    first, second, third = la.simulate(run, workers=3)
    assert second == "ended"
    for text in (first, third):
        assert "Average round after 4 steps" in text and "ranks [1] have ended" in text


def test_a_simulated_rank_that_raises() -> None:
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        model, optimizer = job(rank)
        try:
            with la.attach(model, optimizer, la.local_sgd(2)):
                for t in range(1, 9):
                    if (rank, t) == (1, AT):
                        raise BrokenLoopError("the user's own trouble")
                    one_step(model, optimizer)
        except la.LinkError as error:
            told[rank] = str(error)
            raise

    with pytest.raises(BrokenLoopError, match="the user's own trouble"):
        la.simulate(run, workers=3)
    assert told.keys() == {0, 2}
    assert all("rank 1" in text and "BrokenLoopError" in text for text in told.values())


def test_a_failed_run_stays_failed() -> None:
    """Whoever goes on after the error gets it again, at once."""

    def run(rank: int) -> list[str]:
        model, optimizer = job(rank)
        sync = la.attach(model, optimizer, la.local_sgd(2))
        if rank == 0:
            return []
        texts = []
        for call in (sync.finish, partial(sync.mean, 1.0), sync.consensus_state_dict):
            with pytest.raises(la.LinkError) as caught:
                call()
            texts.append(str(caught.value))
        return texts

    assert [len(texts) for texts in la.simulate(run, workers=3)] == [0, 3, 3]


# -- leaving on an exception ----


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_exception_sends_nothing_and_propagates(recipe: str) -> None:
    def run(rank: int) -> bool:
        model, optimizer = job(rank)
        error, sent, weights = BrokenLoopError("trouble"), -1, Tensor()
        try:
            with la.attach(model, optimizer, RECIPES[recipe]) as sync:
                for _ in range(AT):
                    one_step(model, optimizer)
                sent = sync.stats().bytes_sent
                weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
                raise error
        except BrokenLoopError as caught:
            kept = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            alone = sync.stats().bytes_sent == sent and not sync.attached
            return caught is error and caught.__cause__ is None and alone and kept.equal(weights)
        return False

    assert la.simulate(run, workers=2) == [True, True]


def test_one_rank_that_leaves_alone_waits_for_nobody() -> None:
    """The ranks that go on need not meet it: they had no round due."""

    def run(rank: int) -> str:
        model, optimizer = job(rank)
        try:
            with la.attach(model, optimizer, la.local_sgd(100)) as sync:
                for _ in range(AT):
                    one_step(model, optimizer)
                if rank == 0:
                    raise KeyError("left")
                sync.detach()
                return "went on"
        except (KeyError, la.LinkError) as error:
            return type(error).__name__

    assert la.simulate(run, workers=2) == ["KeyError", "LinkError"]


def test_steps_after_detach_are_nobodys_business() -> None:
    def run(rank: int) -> int:
        model, optimizer = job(rank)
        sync = la.attach(model, optimizer, la.ddp())
        one_step(model, optimizer)
        sync.detach()
        sent = sync.stats().bytes_sent
        for _ in range(rank):
            one_step(model, optimizer)
        assert sync.step == 1
        return sync.stats().bytes_sent - sent

    assert la.simulate(run, workers=3) == [0, 0, 0]


# -- bad arguments ----


def attach_in_simulation(**options: Any) -> None:
    recipe = options.pop("recipe", la.local_sgd(2))

    def run(rank: int) -> None:
        model, optimizer = job(rank)
        la.attach(model, optimizer, recipe, **options)

    la.simulate(run, workers=4)


def attach_other_model(rank: int) -> None:
    model, _ = job(rank)
    _, optimizer = job(rank)
    la.attach(model, optimizer, la.ddp())


def attach_twice(rank: int) -> None:
    model, optimizer = job(rank)
    la.attach(model, optimizer, la.ddp())
    la.attach(model, optimizer, la.ddp())


def attach_meta(rank: int) -> None:
    model = nn.Linear(2, 2, device="meta")
    la.attach(model, torch.optim.SGD(model.parameters()), la.ddp())


def in_simulation(worker: Callable[[int], None]) -> Callable[[], Any]:
    return partial(la.simulate, worker, workers=2)


LOOSE: Any = la
"""The library without its types: what is passed here is wrong on purpose."""
INTEGER = "integer of at least 1, not"
CHOICES = "'keep', 'average', 'reset'"
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "period 0": (lambda: LOOSE.local_sgd(0), f"period must be an {INTEGER} 0"),
    "period -3": (lambda: LOOSE.local_sgd(-3), f"period must be an {INTEGER} -3"),
    "period 2.0": (lambda: LOOSE.local_sgd(2.0), f"period must be an {INTEGER} 2.0"),
    "period True": (lambda: LOOSE.local_sgd(True), f"period must be an {INTEGER} True"),
    "period '4'": (lambda: LOOSE.slowmo(None, "4"), f"period must be an {INTEGER} '4'"),
    "period None": (lambda: LOOSE.diloco(None), f"period must be an {INTEGER} None"),
    "every 0": (lambda: LOOSE.every(0), f"period must be an {INTEGER} 0"),
    "after -1": (lambda: LOOSE.after(-1, la.every(1)), "start must be an integer of at least 0"),
    "until 1.5": (lambda: LOOSE.until(1.5, la.every(1)), "end must be an integer of at least 0"),
    "start -1": (lambda: LOOSE.post_local_sgd(-1, 2), "start|end"),
    "delay -1": (lambda: LOOSE.local_sgd(2, delay=-1), "delay must be an integer of at least 0"),
    "delay 0.5": (lambda: LOOSE.diloco(2, delay=0.5), "delay must be an integer of at least 0"),
    "hierarchical, a period 1.5": (
        lambda: LOOSE.hierarchical(2, 1.5),
        f"period must be an {INTEGER} 1.5",
    ),
    "hierarchical, group_period 0": (
        lambda: LOOSE.hierarchical(0, 4),
        f"group_period must be an {INTEGER} 0",
    ),
    "graph": (
        lambda: LOOSE.sgp("circle"),
        "graph must be one of 'exponential', .*'ring'.*'circle'",
    ),
    "graph a number": (lambda: LOOSE.d_psgd(2), "graph must be one of .*'random', not 2"),
    "peers 0": (lambda: LOOSE.sgp(peers=0), f"peers must be an {INTEGER} 0"),
    "peers 1.5": (lambda: LOOSE.sgp("ring", 1.5), f"peers must be an {INTEGER} 1.5"),
    "peers True": (lambda: LOOSE.sgp("ring", True), f"peers must be an {INTEGER} True"),
    "delay of gossip": (lambda: LOOSE.sgp(delay=-1), "delay must be an integer of at least 0"),
    "beta 0": (
        lambda: LOOSE.easgd(4, 0.0),
        "beta must be .* greater than 0 and at most 1, not 0.0",
    ),
    "beta 1.1": (lambda: LOOSE.eamsgd(4, 1.1), "beta must be .* at most 1, not 1.1"),
    "beta nan": (lambda: LOOSE.easgd(4, float("nan")), "beta must be a finite number"),
    "pull 1": (lambda: LOOSE.easgd(4, pull=1), "pull must be .* at least 0 and below 1, not 1"),
    "pull -0.1": (lambda: LOOSE.lsgd(4, pull=-0.1), "pull must be .* at least 0 and below 1"),
    "local_pull 1": (lambda: LOOSE.lsgd(4, local_pull=1.0), "local_pull must be .* below 1"),
    "drift text": (lambda: LOOSE.lsgd(4, drift="0.1"), "drift must be .*, not '0.1'"),
    "local_drift 2": (lambda: LOOSE.lsgd(4, local_drift=2), "local_drift must be .* below 1"),
    "window 0": (lambda: LOOSE.lsgd(4, window=0), f"window must be an {INTEGER} 0"),
    "local_period -1": (
        lambda: LOOSE.lsgd(4, local_period=-1),
        "local_period must be an integer of at least 0, not -1",
    ),
    **{
        f"{name}, period {period}": (
            partial(getattr(LOOSE, name), period),
            f"period must be an {INTEGER} {period}",
        )
        for name in ("easgd", "downpour", "lsgd")
        for period in (0, 1.5, True)
    },
    "groups of no size": (
        lambda: attach_in_simulation(recipe=la.lsgd(4, local_period=1)),
        r"attach\(\.\.\., group_size=4\)",
    ),
    "groups of three of four": (
        lambda: attach_in_simulation(recipe=la.hierarchical(2, 4), group_size=3),
        "group_size must divide the number of workers: 3 does not divide 4",
    ),
    "groups of four of two workers": (
        lambda: attach_in_simulation(
            recipe=la.lsgd(4, local_period=1), group_size=4, nprocs_per_node=2
        ),
        "group_size must divide the number of workers: 4 does not divide 2",
    ),
    "group_size 0": (
        lambda: attach_in_simulation(recipe=la.lsgd(4, local_period=1), group_size=0),
        f"group_size must be an {INTEGER} 0",
    ),
    "seed": (lambda: attach_in_simulation(recipe=la.sgp("random"), seed=-1), "seed must be"),
    "optimizer_state": (lambda: LOOSE.local_sgd(2, optimizer_state="drop"), CHOICES),
    "optimizer_state of slowmo": (lambda: LOOSE.slowmo(None, optimizer_state=None), CHOICES),
    "momentum 1": (
        lambda: LOOSE.slowmo(None, 4, 1.0),
        "momentum must be .* at least 0 and below 1",
    ),
    "momentum -0.1": (lambda: LOOSE.diloco(4, 0.7, -0.1), "momentum must be .*, not -0.1"),
    "momentum nan": (lambda: LOOSE.diloco(4, 0.7, float("nan")), "momentum must be .* finite"),
    "momentum text": (lambda: LOOSE.slowmo(None, 4, "0.5"), "momentum must be .*, not '0.5'"),
    "lr 0": (lambda: LOOSE.slowmo(None, 4, 0.5, 0.0), "lr must be .* greater than 0"),
    "lr inf": (lambda: LOOSE.diloco(4, float("inf")), "lr must be a finite number"),
    "lr True": (lambda: LOOSE.diloco(4, True), "lr must be a finite number"),
    "base not called": (lambda: LOOSE.slowmo(la.local_sgd), r"base must be .*local_sgd\(12\)"),
    "base a number": (lambda: LOOSE.slowmo(48), "base"),
    "sharded a word": (
        lambda: LOOSE.slowmo(None, 4, sharded="no"),
        "sharded must be True or False",
    ),
    "average a number": (lambda: LOOSE.slowmo(None, 4, average=3), "average must be True or False"),
    "outer not callable": (lambda: LOOSE.diloco(4, outer=0.7), "outer"),
    "recipe not called": (
        lambda: attach_in_simulation(recipe=la.local_sgd),
        r"as laconic\.local_sgd\(12\), not <function local_sgd",
    ),
    "recipe by name": (lambda: attach_in_simulation(recipe="ddp"), r"as laconic\.local_sgd\(12\)"),
    "recipe None": (lambda: attach_in_simulation(recipe=None), r"as laconic\.local_sgd\(12\)"),
    "recipe a lone round": (
        lambda: attach_in_simulation(recipe=la.ddp()[0]),
        r"as laconic\.local_sgd\(12\)",
    ),
    "recipe over an unknown set": (
        lambda: attach_in_simulation(
            recipe=(la.Round(la.every(1), Average(), Mean(), over="all"),)
        ),
        "over.*'workers'",
    ),
    "buffers": (lambda: attach_in_simulation(buffers="mean"), "'keep', 'broadcast', not 'mean'"),
    "nprocs_per_node 3 of 4": (
        lambda: attach_in_simulation(nprocs_per_node=3),
        "divide .* 4 ranks",
    ),
    "nprocs_per_node 8 of 4": (
        lambda: attach_in_simulation(nprocs_per_node=8),
        "divide .* 4 ranks",
    ),
    "nprocs_per_node 0": (lambda: attach_in_simulation(nprocs_per_node=0), f"{INTEGER} 0"),
    "nprocs_per_node True": (lambda: attach_in_simulation(nprocs_per_node=True), f"{INTEGER} True"),
    "nprocs_per_node auto": (lambda: attach_in_simulation(nprocs_per_node="auto"), "'env'"),
    "timeout 0": (lambda: attach_in_simulation(timeout=0), "timeout must be .* greater than 0"),
    "timeout text": (lambda: attach_in_simulation(timeout="5"), "timeout must be .*, not '5'"),
    "scaler": (lambda: attach_in_simulation(scaler=True), "scaler must be .*GradScaler"),
    "no process group": (lambda: attach_other_link(), r"laconic\.init\(\).*laconic\.simulate"),
    "optimizer of another model": (in_simulation(attach_other_model), "no parameter of the model"),
    "attached twice": (in_simulation(attach_twice), r"sync\.detach\(\) first"),
    "on the meta device": (in_simulation(attach_meta), "materialize"),
    "workers 0": (
        lambda: LOOSE.simulate(lambda rank: rank, workers=0),
        f"workers must be an {INTEGER}",
    ),
    "bandwidth": (lambda: throttled("100 apples"), "100mbit"),
    "bandwidth 0": (lambda: throttled("0"), "positive"),
    "latency": (lambda: throttled("1mbit", "-3ms"), "20ms"),
}


def attach_other_link() -> None:
    model, optimizer = job(0)
    la.attach(model, optimizer, la.ddp())


def throttled(bandwidth: str, latency: str = "0") -> None:
    def slow(link: la.links.Link) -> la.links.Link:
        return la.links.Throttled(link, bandwidth, latency)

    la.simulate(lambda rank: rank, workers=2, link=slow)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_a_value_error_that_names_what_is_allowed(name: str) -> None:
    call, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    "options", [{"nprocs_per_node": 3}, {"group_size": 3}, {"group_size": 4, "nprocs_per_node": 2}]
)
def test_numbers_that_do_not_divide_are_refused_alike_on_every_rank(
    options: dict[str, Any],
) -> None:
    def run(rank: int) -> str:
        model, optimizer = job(rank)
        with pytest.raises(ValueError) as caught:
            la.attach(model, optimizer, la.lsgd(4, local_period=1), **{"group_size": 1, **options})
        return str(caught.value)

    texts = la.simulate(run, workers=4)
    assert len(set(texts)) == 1 and "divide" in texts[0]


def test_a_refused_attach_leaves_the_optimizer_alone() -> None:
    """What was refused can be done right afterward; steps in between run no rounds."""

    def run(rank: int) -> int:
        model, optimizer = job(rank)
        with pytest.raises(ValueError, match="buffers"):
            la.attach(model, optimizer, la.ddp(), buffers="mean")  # type: ignore[arg-type]
        for _ in range(rank):
            one_step(model, optimizer)
        sync = la.attach(model, optimizer, la.ddp())
        one_step(model, optimizer)
        return sync.step

    assert la.simulate(run, workers=3) == [1, 1, 1]


UNLIKE: dict[str, Callable[[int], dict[str, Any]]] = {
    "recipe": lambda rank: {"recipe": la.local_sgd(2 + (rank == 1))},
    "kind of recipe": lambda rank: {"recipe": la.ddp() if rank == 1 else la.local_sgd(2)},
    "momentum": lambda rank: {"recipe": la.slowmo(None, 4, 0.5 + 0.1 * (rank == 1))},
    "buffers": lambda rank: {"buffers": "keep" if rank == 1 else "average"},
    "shapes": lambda rank: {"width": 3 + (rank == 1)},
    "dtype": lambda rank: {"dtype": torch.float64 if rank == 1 else torch.float32},
    "frozen": lambda rank: {"frozen": rank == 1},
    "nprocs_per_node": lambda rank: {"nprocs_per_node": 1 + (rank == 1)},
    "group_size": lambda rank: {"recipe": la.hierarchical(1, 2), "group_size": 1 + (rank == 1)},
    "graph": lambda rank: {"recipe": la.sgp("ring" if rank == 1 else "exponential")},
    "seed": lambda rank: {"recipe": la.sgp("random"), "seed": rank},
}


def attach_unlike(rank: int, what: str, link: la.links.Link | None = None) -> str:
    options = UNLIKE[what](rank)
    model = nn.Linear(4, options.pop("width", 3), dtype=options.pop("dtype", torch.float32))
    model.bias.requires_grad_(not options.pop("frozen", False))
    recipe = options.pop("recipe", la.local_sgd(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError) as caught:
        la.attach(model, optimizer, recipe, link=link, **options)
    return str(caught.value)


def _unlike(what: str, rank: int) -> str:
    return attach_unlike(rank, what)


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_attach_unlike_things_are_told_so_on_every_rank(what: str) -> None:
    for text in la.simulate(partial(_unlike, what), workers=2):
        assert "must be the same" in text
        assert "[1]" in text or what in ("nprocs_per_node", "group_size")


WRONG_ON_ONE: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"recipe": "local_sgd(4)"}, "recipe must be what a recipe function returns"),
    "groups": ({"recipe": la.lsgd(4, local_period=1)}, "give the number of workers in a group"),
    "buffers": ({"buffers": "mean"}, "'average', 'keep'"),
    "seed": ({"seed": -1}, "seed must be"),
    "scaler": ({"scaler": 1.0}, "scaler must be"),
    "timeout": ({"timeout": 0.0}, "timeout must be"),
    "metrics": ({"metrics": 3}, "metrics must be"),
    "nprocs_per_node": ({"nprocs_per_node": 0}, "nprocs_per_node"),
    "group_size": ({"group_size": 0}, "group_size must be"),
    "no parameter": ({"other": True}, "has no parameter of the model"),
    "mesh": ({"mesh": 3}, "AttributeError"),
}
"""What rank 1 alone passes, and what it is told; the others wait for nobody."""


def attach_wrong(rank: int, what: str, link: la.links.Link | None = None) -> str:
    given = dict(WRONG_ON_ONE[what][0]) if rank == 1 else {}
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    held = other if given.pop("other", False) else model
    optimizer = torch.optim.SGD(held.parameters(), 0.1)
    recipe = given.pop("recipe", la.local_sgd(2))
    with pytest.raises(ValueError) as caught:
        la.attach(model, optimizer, recipe, **{"link": link, "timeout": 20.0, **given})
    return str(caught.value)


@pytest.mark.parametrize("what", WRONG_ON_ONE)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(what: str) -> None:
    first, second, third = la.simulate(partial(_wrong, what), workers=3)
    assert WRONG_ON_ONE[what][1] in second
    assert first == third == f"rank 1: {second}"


def _wrong(what: str, rank: int) -> str:
    return attach_wrong(rank, what)


def test_what_is_wrong_on_one_process_is_an_error_on_all(pool: gloo.Pool) -> None:
    """Over process groups of its own, which end with it."""
    for what in ("recipe", "timeout", "nprocs_per_node"):
        answers = pool.run(groups_left, what, ranks=4)
        (first, _), (second, _), *_ = answers
        assert first == f"rank 1: {second}" and WRONG_ON_ONE[what][1] in second
        assert [left for _, left in answers] == [0] * 4


def groups_left(rank: int, what: str) -> tuple[str, int]:
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    said = attach_wrong(rank, what)
    return said, len(groups) - before


def unlike_over(rank: int, what: str) -> str:
    return attach_unlike(rank, what, gloo.link_of(2))


@pytest.mark.parametrize("what", ["recipe", "shapes"])
def test_processes_that_attach_unlike_things_are_told_so(pool: gloo.Pool, what: str) -> None:
    for text in pool.run(unlike_over, what, ranks=2):
        assert "must be the same" in text and "ranks [1]" in text


@pytest.mark.fault("attach(..., elastic=, link='nccl') and LACONIC_COORDINATOR ignored options")
@pytest.mark.parametrize("option", [{"link": "nccl"}, {"link": "tcp"}, {"group_size": 2}])
@pytest.mark.parametrize("by_environment", [False, True])
def test_what_an_elastic_run_cannot_follow_is_refused(
    option: dict[str, Any], by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("LACONIC_COORDINATOR", "127.0.0.1:1")
    else:
        option = {**option, "elastic": la.Elastic("127.0.0.1:1", wait=0.1)}
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = la.hierarchical(2, 4) if "group_size" in option else la.local_sgd(4)
    with pytest.raises(ValueError, match="cannot be used with elastic="):
        la.attach(model, optimizer, recipe, timeout=0.1, **option)


@pytest.mark.fault("errors said 'after 0 steps' where no step was taken, or others had been")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ["load_state_dict()", "consensus()"])
def test_an_error_names_no_step_that_was_not_taken(name: str, steps: int) -> None:
    said: list[str] = []

    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.local_sgd(1))
        state = sync.state_dict()
        for step in range(steps + rank):
            model(torch.randn(4, 2) + rank + step).sum().backward()
            optimizer.step()
        try:
            if name == "consensus()":
                with sync.consensus():
                    pass
            else:
                sync.load_state_dict(state)
        except la.LinkError as error:
            said.append(str(error))
            raise

    with pytest.raises(la.LinkError):
        la.simulate(run, 2)
    assert said and not re.search("after 0 steps|after step 0", said[0]), said
