"""Saved at any step, loaded elsewhere: the run goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import Mean

from tests.support import gloo, training
from tests.support.own_updates import Pooled
from tests.support.recipes import ROWS
from tests.support.training import Job, build, plain_lr

STEPS = 14
SAVES = (1, 4, 5, 7, 8)
"""Before a first round, right after rounds, mid-period, and with messages in flight."""
Trace = list[Any]


def attached(job: Job, rank: int, link: la.links.Link | None) -> tuple[Any, ...]:
    model, optimizer = build(job, rank)
    return model, optimizer, la.attach(model, optimizer, job.recipe, link=link, **dict(job.options))


def onwards(job: Job, rank: int, parts: tuple[Any, ...], start: int, end: int) -> Iterator[int]:
    """Train from after step ``start`` up to ``end``; yields every step taken."""
    model, optimizer, sync = parts
    data = job.data()[rank]
    for t in range(start + 1, end + 1):
        training.step(job, model, optimizer, data[t - 1], t, sync)
        yield t


def record(parts: tuple[Any, ...]) -> Any:
    model, _, sync = parts
    with sync.consensus(mean=False):
        consensus = training.values(model)
    return training.values(model), consensus


def save(parts: tuple[Any, ...], path: Path) -> None:
    names = ("model", "optimizer", "sync")
    torch.save({k: v.state_dict() for k, v in zip(names, parts, strict=True)}, path)


def file_of(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}-rank{rank}.pt"


def straight(
    rank: int, job: Job, folder: Path | None, link: la.links.Link | None = None
) -> tuple[Trace, list[dict[str, int]]]:
    """The run that never stops; with ``folder`` it saves on its way. Also the bytes sent by the
    time of each save and right after it."""
    parts = attached(job, rank, link)
    trace, bytes_at_save = [], []
    for t in onwards(job, rank, parts, 0, STEPS):
        if folder is not None and t in SAVES:
            before = parts[2].stats().bytes_sent
            save(parts, file_of(folder, t, rank))
            bytes_at_save.append({"before": before, "after": parts[2].stats().bytes_sent})
        trace.append(record(parts))
    parts[2].detach()
    return trace, bytes_at_save


# -- bit for bit, on both links ----


def test_what_was_saved_does_not_change_as_the_run_goes_on() -> None:
    job = Job(ROWS["diloco, late"].recipe, 2, STEPS)

    def run(rank: int) -> bool:
        parts = attached(job, rank, None)
        list(onwards(job, rank, parts, 0, 4))
        state = parts[2].state_dict()
        before = io.BytesIO()
        torch.save(state, before)
        list(onwards(job, rank, parts, 4, 12))
        after = io.BytesIO()
        torch.save(state, after)
        return before.getvalue() == after.getvalue()

    assert la.simulate(run, workers=2) == [True, True]


def test_one_rank_alone_may_ask_for_its_state(pool: gloo.Pool) -> None:
    job = Job(ROWS["local_sgd(4, delay=2)"].recipe, 3, STEPS, "adamw")
    runs = pool.run(rank_0_saves, job, ranks=3)
    assert [count for _, count in runs] == [STEPS, 0, 0]
    undisturbed = la.simulate(lambda r: straight(r, job, None)[0], workers=3)
    assert training.same_bits([t for t, _ in runs], undisturbed)


def rank_0_saves(rank: int, job: Job) -> tuple[Trace, int]:
    parts = attached(job, rank, gloo.link_of(job.workers))
    trace, saves = [], 0
    for _ in onwards(job, rank, parts, 0, STEPS):
        if rank == 0:
            assert parts[2].state_dict()["rank"] == 0
            saves += 1
        trace.append(record(parts))
    parts[2].detach()
    return trace, saves


def test_finished_and_saved_and_resumed(tmp_path: Path) -> None:
    """`finish()` in mid-period is part of the run: resuming after it is resuming, too."""
    job = Job(ROWS["slowmo(local_sgd(3, delay=4), 5)"].recipe, 3, STEPS, lr=plain_lr)

    def run(rank: int, load: bool) -> Trace:
        parts = attached(job, rank, None)
        path = file_of(tmp_path, 7, rank)
        if load:
            saved = torch.load(path, weights_only=True)
            for part, name in zip(parts, ("model", "optimizer", "sync"), strict=True):
                part.load_state_dict(saved[name])
        else:
            list(onwards(job, rank, parts, 0, 7))
            parts[2].finish()
            save(parts, path)
        return [record(parts) for _ in onwards(job, rank, parts, 7, STEPS)]

    whole = la.simulate(lambda r: run(r, False), workers=3)
    assert training.same_bits(whole, la.simulate(lambda r: run(r, True), workers=3))


# -- what cannot be loaded is an error on every rank ----


@dataclass(frozen=True)
class Wrong:
    """One way to load the wrong thing: what this rank hands over, given everyone's saved parts
    (model, optimizer, sync), and what the error must say."""

    hand_over: Callable[[int, list[Any]], tuple[Any, Any, Any]]
    text: str
    workers: int = 2
    recipe: str = "slowmo(local_sgd(2), 6)"


def only(rank: int, broken: int, right: Any, wrong: Any) -> Any:
    return wrong if rank == broken else right


WRONG = {
    "the states swapped": Wrong(lambda r, s: (*s[r][:2], s[1 - r][2]), "its own"),
    "one rank's state on both": Wrong(lambda r, s: (*s[r][:2], s[0][2]), "its own|ranks"),
    "rank 0 loads rank 1's": Wrong(
        lambda r, s: (*s[r][:2], only(r, 0, s[r][2], s[1][2])), "its own|ranks [0]"
    ),
    "another recipe": Wrong(lambda r, s: s[r], "was saved under slowmo", recipe="diloco(4)"),
    "another period": Wrong(lambda r, s: s[r], "sync.switch", recipe="slowmo(None, 4)"),
    "the model not loaded": Wrong(lambda r, s: (None, *s[r][1:]), "load the model"),
    "the model not loaded on rank 1": Wrong(
        lambda r, s: (only(r, 1, s[r][0], None), *s[r][1:]), "load the model|ranks [1]"
    ),
    "rank 0's model on both": Wrong(lambda r, s: (s[0][0], *s[r][1:]), "load the model|ranks"),
    "rank 0's state alone, three ranks": Wrong(lambda r, s: s[0], "list of all", workers=3),
    "too short a list": Wrong(
        lambda r, s: (*s[0][:2], [s[0][2], s[1][2], s[1][2]]), "list of all", workers=3
    ),
    "the list in another order": Wrong(
        lambda r, s: (*s[r][:2], [s[1][2], s[0][2]]), "by rank: number 0"
    ),
    "another version": Wrong(lambda r, s: (*s[r][:2], {**s[r][2], "version": 999}), "version|999"),
    "something else altogether": Wrong(lambda r, s: (*s[r][:2], {"step": 3}), "state"),
    "something else on one rank": Wrong(
        lambda r, s: (*s[r][:2], only(r, 1, s[r][2], {"step": 3})), "state"
    ),
    "an empty list": Wrong(lambda r, s: (*s[r][:2], []), "state"),
}


def two_saved(row: str, steps: int) -> list[Any]:
    job = Job(ROWS[row].recipe, 2, STEPS)

    def run(rank: int) -> Any:
        parts = attached(job, rank, None)
        list(onwards(job, rank, parts, 0, steps))
        return tuple(part.state_dict() for part in parts)

    return la.simulate(run, workers=2)


def refuse(rank: int, saved: list[Any], row: str, name: str, ranks: int, over: bool) -> str:
    """The text of the ValueError; nothing else will do."""
    job = Job(ROWS[row].recipe, ranks, STEPS)
    parts = attached(job, rank, gloo.link_of(ranks) if over else None)
    states = WRONG[name].hand_over(rank, saved)
    for part, state in zip(parts[:2], states[:2], strict=True):
        if state is not None:
            part.load_state_dict(state)
    with pytest.raises(ValueError) as caught:
        parts[2].load_state_dict(states[2])
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_loaded_is_refused_on_every_rank(name: str) -> None:
    case, saved = WRONG[name], two_saved("slowmo(local_sgd(2), 6)", 7)
    work = partial(_refuse, saved, case, name)
    texts = la.simulate(work, workers=case.workers)
    for text in texts:
        assert any(part in text for part in case.text.split("|")), text


def _refuse(saved: list[Any], case: Wrong, name: str, rank: int) -> str:
    return refuse(rank, saved, case.recipe, name, case.workers, False)


def with_norm(buffers: Any, rank: int, delay: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recipe = la.d_psgd(delay=delay) if delay > 1 else la.local_sgd(2, delay=delay)
    return model, optimizer, la.attach(model, optimizer, recipe, buffers=buffers)


@pytest.mark.parametrize("rebound", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_buffers_resume_too(delay: int, rebound: bool) -> None:
    """With a delay messages are in flight; with ``rebound`` the module puts another tensor in place
    of a buffer in every step."""
    torch.manual_seed(1)
    batches = [[torch.randn(5, 3) for _ in range(8)] for _ in range(2)]

    def go(parts: tuple[Any, ...], rank: int, start: int, end: int) -> list[Tensor]:
        model, optimizer, _ = parts
        for x in batches[rank][start:end]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if rebound:
                model[1].running_mean = model[1].running_mean.clone()
            optimizer.step()
        return [t.clone() for t in model.state_dict().values()]

    def run(rank: int) -> bool:
        parts = with_norm("average", rank, delay)
        go(parts, rank, 0, 2)
        states = [{k: v for k, v in part.state_dict().items()} for part in parts]
        states[0] = {k: v.clone() for k, v in states[0].items()}
        buffer = io.BytesIO()
        torch.save(states[1:], buffer)
        whole = go(parts, rank, 2, 8)
        buffer.seek(0)
        states[1:] = torch.load(buffer, weights_only=True)
        fresh = with_norm("average", rank, delay)
        for part, state in zip(fresh, states, strict=True):
            part.load_state_dict(state)
        tail = go(fresh, rank, 2, 8)
        return all(map(torch.equal, whole, tail))

    assert la.simulate(run, workers=2) == [True, True]


# -- another number of workers: shared state is cut anew ----


@dataclass(frozen=True)
class Saved:
    """What one rank had right after an outer step."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    sync: dict[str, Any]
    anchor: dict[str, Any]


def save_at(job: Job, steps: int, rank: int) -> Saved:
    parts = attached(job, rank, None)
    list(onwards(job, rank, parts, 0, steps))
    anchor = record(parts)[1]
    model, optimizer, sync = (part.state_dict() for part in parts)
    return Saved({k: v.clone() for k, v in model.items()}, optimizer, sync, anchor)


def load_all(job: Job, saved: Sequence[Saved | None], rank: int) -> Saved:
    """Loaded from all ranks' states (None: lost), and saved again at once."""
    first = next(s for s in saved if s is not None)
    parts = attached(job, rank, None)
    parts[0].load_state_dict(first.model)
    parts[1].load_state_dict(first.optimizer)
    parts[2].load_state_dict([None if s is None else s.sync for s in saved])
    anchor = record(parts)[1]
    model, optimizer, sync = (part.state_dict() for part in parts)
    return Saved({k: v.clone() for k, v in model.items()}, optimizer, sync, anchor)


def whole_slots(saved: list[Saved], sharded: bool) -> dict[tuple[int, str], Tensor]:
    """Outer state by (bucket, name), put together from its slices without their padding. A worker
    is one rank here, and rank r has the r-th slice."""
    (last,) = {len(s.sync["rounds"]) - 1 for s in saved}
    rounds = [s.sync["rounds"][last] for s in saved]
    found = {}
    for bucket, size in enumerate(rounds[0]["sizes"]):
        for name, value in rounds[0]["state"][bucket].items():
            slices = [r["state"][bucket][name] for r in rounds]
            cut = sharded and value.dim() > 0
            whole = torch.cat(slices) if cut else slices[0].reshape(-1)
            found[bucket, name] = whole[:size].clone()
    return found


RECUT = [
    "slowmo(None, 4)",
    "slowmo(local_sgd(2), 6)",
    "slowmo(local_sgd(2), 6, unsharded)",
    "diloco(4)",
    "diloco(4, unsharded)",
    "diloco, Adam",
]


@pytest.mark.parametrize(("row", "ranks"), [*zip(RECUT, (3, 5, 1, 2, 5, 3), strict=True)])
def test_outer_state_is_cut_anew_for_another_number_of_workers(row: str, ranks: int) -> None:
    job, sharded = Job(ROWS[row].recipe, 4, 12), "unsharded" not in row
    saved = la.simulate(partial(save_at, job, 12), workers=4)
    loaded = la.simulate(partial(load_all, replace(job, workers=ranks), saved), workers=ranks)
    before, after = whole_slots(saved, sharded), whole_slots(loaded, sharded)
    assert before.keys() == after.keys()
    assert {"u", "m", "outer.exp_avg"} & {name for _, name in before}
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
        assert value.any(), f"{key} is not worth the comparison"
    for one in loaded:
        assert all((one.anchor[k] == saved[0].anchor[k]).all() for k in one.anchor)
        assert one.sync["step"] == 12


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_of_pooled_state_each_keeps_its_own_and_the_mean_stays(workers: int) -> None:
    job = Job((la.Round(la.every(3), Pooled(), Mean()),), 4, 12, lr=plain_lr)
    saved = la.simulate(partial(save_at, job, 6), workers=4)
    loaded = la.simulate(partial(load_all, replace(job, workers=workers), saved), workers=workers)
    before, after = (
        [one.sync["rounds"][0]["state"][0] for one in ranks] for ranks in (saved, loaded)
    )
    numel = saved[0].sync["rounds"][0]["sizes"][0]
    old, new = (torch.stack([state["sum"][:numel] for state in ranks]) for ranks in (before, after))
    assert float((old[0] - old.mean(0)).abs().max()) > 1e-3, "of which there are four"
    assert float((new.mean(0) - old.mean(0)).abs().max()) < 1e-12
    staying = min(workers, 4)
    assert float(((new - new[0])[:staying] - (old - old[0])[:staying]).abs().max()) < 1e-12
    if workers > 4:
        assert torch.equal(new[:4], old)
    for state in after:
        assert float(state["last"]) == (0 + 1 + 2 + 3) / 4


@pytest.mark.parametrize("recipe", [la.local_sgd(2, delay=5), la.sgp(delay=3), la.d_psgd(delay=3)])
def test_resume_with_messages_older_than_a_parameter_group(recipe: la.Recipe) -> None:
    """In flight, for fewer parameters than there are by now."""
    job = Job(recipe, 2, 12)

    def run(rank: int, saved: list[Any] | None) -> Any:
        model, optimizer = build(job, rank)
        late = nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64))

        def go(start: int, end: int) -> Trace:
            trace = []
            for t in range(start + 1, end + 1):
                if t == 4:
                    optimizer.add_param_group({"params": [late], "lr": 0.1})
                x, y = (torch.from_numpy(a) for a in job.data()[rank][t - 1])
                optimizer.zero_grad()
                (nn.functional.mse_loss(model(x), y) + late.square().sum()).backward()
                optimizer.step()
                trace.append(torch.cat([training.flat(model), late.detach()]).clone())
            return trace

        if saved is None:
            sync = la.attach(model, optimizer, recipe)
            go(0, 4)
            parts = [part.state_dict() for part in (model, optimizer, sync)]
            return copy.deepcopy([*parts, late.detach()]), go(4, 12)
        optimizer.add_param_group({"params": [late], "lr": 0.1})
        sync = la.attach(model, optimizer, recipe)
        states = copy.deepcopy(saved[rank][0])
        late.data.copy_(states.pop())
        stateful: tuple[Any, ...] = (model, optimizer, sync)
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(state)
        return go(4, 12)

    saved = la.simulate(lambda rank: run(rank, None), workers=2)
    tails = la.simulate(lambda rank: run(rank, saved), workers=2)
    for (_, whole), tail in zip(saved, tails, strict=True):
        assert len(whole) == len(tail) == 8
        assert all(torch.equal(a, b) for a, b in zip(whole, tail, strict=True))


# -- parts that are not of one run, and what a failed load leaves behind ----


def saved_after(steps: int, workers: int = 4) -> list[Any]:
    job = Job(ROWS["diloco(4)"].recipe, workers, STEPS)

    def run(rank: int) -> Any:
        parts = attached(job, rank, None)
        list(onwards(job, rank, parts, 0, steps))
        return tuple(part.state_dict() for part in parts)

    return la.simulate(run, workers=workers)


@pytest.mark.parametrize("which", ["one twice", "another step", "another recipe's"])
def test_parts_that_are_not_of_one_run_are_not_cut_anew(which: str) -> None:
    saved = [parts[2] for parts in saved_after(5)]
    wrong = {
        "one twice": saved[0],
        "another step": saved_after(6)[1][2],
        "another recipe's": {**saved[1], "recipe": "something else"},
    }[which]

    def run(rank: int) -> str:
        parts = attached(Job(ROWS["diloco(4)"].recipe, 2, STEPS), rank, None)
        before = training.values(parts[0])
        with pytest.raises(ValueError, match="by rank: number 1") as caught:
            parts[2].load_state_dict([saved[0], wrong, *saved[2:]])
        assert training.same_bits([[(before, before)]], [[record(parts)[:1] * 2]])
        return str(caught.value)

    assert len(set(la.simulate(run, workers=2))) == 1


def test_a_load_that_fails_on_one_rank_changes_nothing_on_any() -> None:
    saved = saved_after(7, workers=2)
    job = Job(ROWS["diloco(4)"].recipe, 2, STEPS)

    def run(rank: int) -> None:
        parts = attached(job, rank, None)
        list(onwards(job, rank, parts, 0, 5))
        before = copy.deepcopy(parts[2].state_dict())
        for part, state in zip(parts[:2], saved[rank][:2], strict=True):
            part.load_state_dict(copy.deepcopy(state))
        state = copy.deepcopy(saved[rank][2])
        if rank == 1:
            state["rounds"][0]["state"][0]["m"] = torch.zeros(3)
        with pytest.raises(ValueError):
            parts[2].load_state_dict(state)
        after = parts[2].state_dict()
        assert after["step"] == before["step"] == 5
        for name, value in before["rounds"][0]["state"][0].items():
            assert torch.equal(after["rounds"][0]["state"][0][name], value)

    la.simulate(run, workers=2)
