"""laconic.save and laconic.load: exact, atomic on every rank, and refused with the reason."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import random
import re
import resource
import shutil
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as la
from laconic import checkpoint
from laconic.checkpoints import manifest, saving
from laconic.links.wrapped import Wrapped

from tests.support import gloo

STEPS, NEXT = 14, 4
RECIPES: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "local_sgd, late": la.local_sgd(3, delay=7),
    "slowmo": la.slowmo(la.local_sgd(4, delay=3), 6, momentum=0.5),
    "sgp, late": la.sgp("bipartite_linear", delay=2),
    "d_psgd": la.d_psgd(),
    "easgd": la.easgd(2, pull=0.3),
    "diloco, late": la.diloco(4, delay=3),
    "lsgd": la.lsgd(4, local_period=0),
}


# -- a run that draws from every generator ----


class Net(nn.Module):
    """Drops out, and keeps running statistics."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.last(nn.functional.dropout(hidden, 0.3, self.training))


class Run:
    """One worker's model, optimizer, schedule and synchronizer; ``seed`` of the generators."""

    def __init__(
        self,
        recipe: la.Recipe,
        seed: int,
        link: la.links.Link | None = None,
        hidden: int = 6,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net(hidden)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.model.first.parameters(), "weight_decay": 0.1},
                {"params": [*self.model.norm.parameters(), *self.model.last.parameters()]},
            ],
            lr=0.05,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.sync = la.attach(self.model, self.optimizer, recipe, link=link, **options)

    def go(self, end: int) -> list[Tensor]:
        """Train up to step ``end``; all that the run is, after each step."""
        trace = []
        while self.sync.step < end:
            x = torch.randn(5, 3) * random.random()
            y = torch.from_numpy(np.random.normal(size=(5, 2))).float()
            loss = (self.model(x) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.sync.report_loss(loss)
            self.optimizer.step()
            self.scheduler.step()
            trace.append(torch.cat([loss.detach().reshape(1), self.values()]))
        return trace

    def values(self) -> Tensor:
        """The model, the optimizer's state and its learning rates, flat."""
        state = self.optimizer.state_dict()
        kept = [v.reshape(-1) for s in state["state"].values() for v in s.values()]
        lrs = torch.tensor([group["lr"] for group in state["param_groups"]])
        whole = [*(v.reshape(-1) for v in self.model.state_dict().values()), *kept, lrs]
        return torch.cat([v.double() for v in whole]).clone()

    def save(self, path: Path, **others: Any) -> None:
        la.save(path, self.model, self.optimizer, others={"scheduler": self.scheduler, **others})

    def load(self, path: Path, **others: Any) -> dict[str, Any]:
        others = {"scheduler": self.scheduler, **others}
        return la.load(path, self.model, self.optimizer, self.sync, others=others)


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Whether two sets of traces are alike to the last bit."""
    return all(
        torch.equal(a, b)
        for trace, trace2 in zip(one, other, strict=True)
        for a, b in zip(trace, trace2, strict=True)
    )


def whole(
    rank: int,
    recipe: la.Recipe,
    saves: list[int],
    folder: Path,
    link: la.links.Link | None = None,
) -> list[Tensor]:
    """The run that never stops, and saves on its way."""
    run = Run(recipe, 100 + rank, link)
    trace = []
    for step in [*saves, STEPS]:
        trace += run.go(step)
        if step in saves:
            run.save(folder / str(step), epoch=step // 3)
    run.sync.detach()
    return trace


def tail(
    rank: int, recipe: la.Recipe, step: int, folder: Path, link: la.links.Link | None = None
) -> list[Tensor]:
    """The steps after ``step``, by a worker that starts with other random state."""
    run = Run(recipe, 999, link)
    assert run.load(folder / str(step)) == {"epoch": step // 3, "step": step}
    assert run.sync.step == step
    trace = run.go(min(step + NEXT, STEPS))
    run.sync.detach()
    return trace


def over_gloo(rank: int, task: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    return task(rank, *arguments, link=gloo.link_of(ranks))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    saves = sorted(random.Random(name).sample(range(1, STEPS - 1), 4))
    undisturbed = la.simulate(lambda r: whole(r, recipe, [], tmp_path), workers=3)
    saving_run = la.simulate(lambda r: whole(r, recipe, saves, tmp_path), workers=3)
    assert same(undisturbed, saving_run), "saving disturbed the run"
    for step in saves:
        tails = la.simulate(partial(_tail, recipe, step, tmp_path), workers=3)
        expected = [trace[step : step + NEXT] for trace in undisturbed]
        assert same(expected, tails), f"saved after step {step}"


def _tail(recipe: la.Recipe, step: int, folder: Path, rank: int) -> list[Tensor]:
    return tail(rank, recipe, step, folder)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_in_processes_that_never_ran_it(
    pool: gloo.Pool, name: str, tmp_path: Path
) -> None:
    """What threads saved goes on in processes, and what processes saved in threads."""
    recipe = RECIPES[name]
    first, second = sorted(random.Random(f"{name}, processes").sample(range(2, STEPS - 2), 2))
    here, there = tmp_path / "threads", tmp_path / "processes"
    threads = la.simulate(lambda r: whole(r, recipe, [first, second], here), workers=3)
    processes = pool.run(over_gloo, whole, 3, recipe, [first, second], there, ranks=3)
    assert same(threads, processes)
    for step in (first, second):
        expected = [trace[step : step + NEXT] for trace in threads]
        assert same(expected, pool.run(over_gloo, tail, 3, recipe, step, here, ranks=3))
        assert same(expected, la.simulate(partial(_tail, recipe, step, there), workers=3))


# -- whole or not at all, wherever it ends ----


class Killed(BaseException):
    """As SIGKILL ends a process: no handler for errors sees it."""


PACKAGE = str(Path(saving.__file__).parent)
UNHARMFUL = {
    "plain",
    "_optimizer_of",
    "_numpy_state",
    "<listcomp>",
    "<dictcomp>",
    "<genexpr>",
}
"""Functions of many lines that touch no file."""


@contextmanager
def killed_at(rank: int, line: int) -> Iterator[list[int]]:
    """End simulated worker ``rank`` at the ``line``-th line of laconic.checkpoints that it runs in
    `laconic.save`; yields the lines that it ran."""
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        ours = code.co_filename == checkpoint.__file__ or code.co_filename.startswith(PACKAGE)
        if not ours or code.co_name in UNHARMFUL:
            return None
        if event == "line" and getattr(threading.current_thread(), "laconic_rank", None) == rank:
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise Killed
        return trace

    threading.settrace(trace)
    try:
        yield lines
    finally:
        threading.settrace(None)  # type: ignore[arg-type]


def folder_of(base: Path, rank: int, shared: bool) -> Path:
    """One directory for all, or one for each rank, as on hosts of their own."""
    return base / "all" if shared else base / f"host{rank}"


def constant_run(rank: int, value: float) -> Run:
    """A worker of two parameters, both ``value``."""
    run = Run(la.local_sgd(4, delay=3), rank, hidden=2)
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(value)
    return run


def saves(rank: int, base: Path, shared: bool, *values: float) -> None:
    """One save for each value, which the whole model then has, at step ``value``."""
    threading.current_thread().laconic_rank = rank  # type: ignore[attr-defined]
    for value in values:
        run = constant_run(rank, value)
        run.sync.step = int(value)
        run.save(folder_of(base, rank, shared), value=value + rank)


def loads(rank: int, base: Path, shared: bool) -> float:
    """Which save counts; asserts that it is whole."""
    run = constant_run(rank, -1.0)
    found = run.load(folder_of(base, rank, shared))
    value = float(found["value"]) - rank
    assert run.sync.step == found["step"] == int(value)
    assert all((p == value).all() for p in run.model.parameters())
    return value


def files(base: Path) -> list[str]:
    return sorted(str(p.relative_to(base)) for p in base.rglob("*") if p.is_file())


WORKERS = 2


def found_after_crash(base: Path, shared: bool) -> float:
    """Which of two saves a run finds on all ranks."""
    (value,) = set(la.simulate(lambda r: loads(r, base, shared), workers=WORKERS))
    return value


def check_next_save(base: Path, shared: bool) -> None:
    """It leaves nothing else behind."""
    la.simulate(lambda r: saves(r, base, shared, 3.0), workers=WORKERS)
    assert len(files(base)) == WORKERS + (1 if shared else WORKERS), files(base)
    assert found_after_crash(base, shared) == 3.0


def left(base: Path, old: set[int]) -> list[tuple[str, int, int]]:
    """The files: their names, sizes and, of those that were there before, times of change."""
    found = []
    for name in files(base):
        stat = (base / name).stat()
        time_of_change = stat.st_mtime_ns if stat.st_mtime_ns in old else 0
        found.append((without_tokens(name), stat.st_size, time_of_change))
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize(("rank", "shared"), [(0, True), (0, False), (1, False)])
def test_a_worker_killed_at_any_line_leaves_one_whole_checkpoint(
    rank: int, shared: bool, tmp_path: Path
) -> None:
    before, base = tmp_path / "before", tmp_path / "after"
    la.simulate(lambda r: saves(r, before, shared, 1.0), workers=WORKERS)
    shutil.copytree(before, base)
    with killed_at(rank, 0) as lines:
        la.simulate(lambda r: saves(r, base, shared, 2.0), workers=WORKERS)
    old = {(before / name).stat().st_mtime_ns for name in files(before)}
    found, last = [], None
    for line in range(1, len(lines) + 1):
        shutil.rmtree(base)
        shutil.copytree(before, base)
        with killed_at(rank, line), pytest.raises(Killed):
            la.simulate(lambda r: saves(r, base, shared, 2.0), workers=WORKERS)
        if left(base, old) != last:  # else it is what the line before left
            last = left(base, old)
            found.append(found_after_crash(base, shared))
            check_next_save(base, shared)
    assert len(found) > 5
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    gc.collect()  # files left open are told of here, and not after the test


class Heard(Wrapped):
    """Tells ``listener`` of every collective that is complete."""

    def __init__(self, link: la.links.Link, listener: Callable[[], None]) -> None:
        super().__init__(link)
        self.listener = listener

    @contextmanager
    def around(self, collective: str, amount: Any, received: int) -> Iterator[None]:
        yield
        self.listener()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_worker_cut_off_in_any_agreement_leaves_one_whole_checkpoint(
    rank: int, shared: bool, tmp_path: Path
) -> None:
    """What the others know, and go on from, it does not: it must not clear away its file."""
    before, base = tmp_path / "before", tmp_path / "after"
    la.simulate(lambda r: saves(r, before, shared, 1.0), workers=WORKERS)

    def save_deaf(r: int, after: int) -> None:
        run = constant_run(r, 2.0)
        run.sync.step = 2
        heard = iter(range(after))

        def listen() -> None:
            if r == rank and next(heard, None) is None:
                raise la.LinkError("no answer")

        run.sync.driver.session.world = Heard(run.sync.driver.session.world, listen)  # type: ignore[assignment]
        run.save(folder_of(base, r, shared), value=2.0 + r)

    found = []
    for after in range(20):
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(before, base)
        try:
            la.simulate(partial(_first_last, save_deaf, after), workers=WORKERS)
        except la.LinkError:
            found.append(found_after_crash(base, shared))
        else:
            break
    assert after < 19, "the last save met no such end"
    assert found == sorted(found) and set(found) == {1.0, 2.0}


def _first_last(task: Callable[[int, int], None], after: int, rank: int) -> None:
    task(rank, after)


# -- over processes that are killed ----

LAST = 30


@dataclass
class Processes:
    """Ranks in processes of their own."""

    children: list[Any] = field(default_factory=list)
    connections: list[Any] = field(default_factory=list)

    def hear(self, rank: int, seconds: float = 200.0) -> Any:
        assert self.connections[rank].poll(seconds), f"rank {rank} is silent"
        return self.connections[rank].recv()


def _live(rank: int, ranks: int, port: int, task: Any, arguments: Any, connection: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        task(rank, connection, *arguments)
    except Exception as error:
        connection.send((type(error).__name__, str(error)))


@contextmanager
def running(context: Any, ranks: int, task: Any, *arguments: Any) -> Iterator[Processes]:
    """``task(rank, connection, *arguments)`` in processes, of which none is left afterward."""
    here, port = Processes(), gloo.free_port()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        child = context.Process(
            target=_live, args=(rank, ranks, port, task, arguments, theirs), daemon=True
        )
        child.start()
        theirs.close()
        here.children.append(child)
        here.connections.append(ours)
    try:
        yield here
    finally:
        for child in here.children:
            child.kill()
            child.join()


def save_always(rank: int, connection: Any, base: Path) -> None:
    """Go on from what is there, and save after every step."""
    run = Run(RECIPES["slowmo"], 100 + rank)
    path = folder_of(base, rank, shared=False)
    try:
        run.load(path)
    except ValueError as error:
        assert "there is no" in str(error)
    while run.sync.step < LAST:
        run.go(run.sync.step + 1)
        run.save(path)
        connection.send(("saved", run.sync.step))
    connection.send(("ended", run.values().tolist()))


def test_processes_killed_at_random_go_on_bit_for_bit(context: Any, tmp_path: Path) -> None:
    """Killed and started again, one of them or both, until they are through."""

    def undisturbed(rank: int) -> Tensor:
        run = Run(RECIPES["slowmo"], 100 + rank)
        run.go(LAST)
        return run.values()

    dice, kills = random.Random(), 0
    while True:
        with running(context, 2, save_always, tmp_path) as processes:
            steps = [processes.hear(rank) for rank in range(2)]
            if kills < 8 and steps[0][0] == "saved":
                time.sleep(dice.random() * 0.1)
                for rank in dice.choice([[0], [1], [0, 1]]):
                    processes.children[rank].kill()
                kills += 1
                for child in processes.children:
                    child.join(30)
                    assert child.exitcode is not None, "a rank hangs"
                continue
            ends = []
            for rank, last in enumerate(steps):
                while last[0] == "saved":
                    last = processes.hear(rank)
                assert last[0] == "ended", last
                ends.append(torch.tensor(last[1], dtype=torch.float64))
        break
    assert kills
    assert same([ends], [la.simulate(undisturbed, workers=2)])


# -- rank 0 alone ----


def save_on_rank_0(rank: int, connection: Any, base: Path) -> None:
    run = Run(la.local_sgd(4), rank, timeout=600.0)
    run.go(5)
    if rank == 0:
        run.save(base)
    run.go(9)


def check_refusal(texts: list[str]) -> None:
    assert len(texts) == 2
    for text in texts:
        assert "laconic.save (every rank must call it)" in text
    assert "outside any `if rank == 0`" in texts[0] and "after 5 steps" in texts[0]


def test_rank_0_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        with pytest.raises(la.LinkError) as caught:
            save_on_rank_0(rank, None, tmp_path)
        return str(caught.value)

    check_refusal(la.simulate(run, workers=2))
    assert files(tmp_path) == []


def test_rank_0_alone_is_refused_in_processes(context: Any, tmp_path: Path) -> None:
    with running(context, 2, save_on_rank_0, tmp_path) as processes:
        told = [processes.hear(rank) for rank in range(2)]  # long before the timeout of the link
    assert [kind for kind, _ in told] == ["LinkError"] * 2
    check_refusal([text for _, text in told])
    assert files(tmp_path) == []


def save_at_the_end(rank: int, connection: Any, base: Path) -> None:
    with la.attach(model := nn.Linear(2, 2), sgd(model), la.local_sgd(4)) as sync:
        if rank == 0:
            la.save(base, model, sync.driver.session.optimizer)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_rank_0_alone_is_refused_when_the_others_are_through(context: Any, tmp_path: Path) -> None:
    with running(context, 2, save_at_the_end, tmp_path) as processes:
        check = [processes.hear(rank, 40) for rank in range(2)]
    assert [kind for kind, _ in check] == ["LinkError"] * 2
    for _, text in check:
        assert "every rank must call it" in text


# -- what cannot be written ----


def two_saves(
    rank: int,
    base: Path,
    spoiled: Callable[[int], Any] = nullcontext,
    others: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> str:
    """Save, spoil something, save again: what the error says. The first one must still be there."""
    run = Run(la.local_sgd(4, delay=3), rank)
    path = folder_of(base, rank, shared=False)
    run.go(3)
    run.save(path)
    kept, before = run.values(), files(path)
    run.go(5)
    with spoiled(rank), pytest.raises((OSError, ValueError)) as caught:
        run.save(path, **others(rank))
    assert files(path) == before
    run.go(6)  # the run is none the worse
    assert run.load(path)["step"] == 3
    assert torch.equal(run.values(), kept)
    return f"{type(caught.value).__name__} {caught.value}"


def check_told(texts: list[str], kind: str, *words: str) -> None:
    """Alike on all ranks, in one line."""
    assert len(texts) > 1 and len(set(texts)) == 1, texts
    assert texts[0].startswith(kind) and "\n" not in texts[0], texts[0]
    for word in words:
        assert word in without_tokens(texts[0]), texts[0]


def without_tokens(text: str) -> str:
    """Names of files as if they did not end in a random token."""
    return re.sub(r"-[0-9a-f]{16}(?=\.pt|\.json)", "", text)


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """On rank 1 files end after 4 kB: what a full disk, or a quota, is to who writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_on_a_full_disk(rank: int, connection: Any, base: Path) -> None:
    big = {"big": torch.zeros(100_000)}  # more than a buffer takes
    connection.send(two_saves(rank, base, full_disk, lambda r: big))


def test_a_full_disk_of_one_rank_is_an_error_on_all(context: Any, tmp_path: Path) -> None:
    with running(context, 2, save_on_a_full_disk, tmp_path) as processes:
        told = [processes.hear(rank).replace(f"host{rank}", "host") for rank in range(2)]
    check_told(told, "OSError", "rank 1: ", "File too large")


def test_a_directory_that_one_rank_cannot_make_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "host1").touch()

    def run(rank: int) -> str:
        with pytest.raises(OSError) as caught:
            Run(la.ddp(), rank).save(folder_of(tmp_path, rank, shared=False) / "checkpoint")
        return f"{type(caught.value).__name__} {str(caught.value).partition(': ')[2]}"

    check_told(la.simulate(run, workers=3), "OSError", "rank 1: ", "Not a directory")


def test_a_manifest_that_one_rank_cannot_rename_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may have renamed its own by then: the new save counts, as all of it is there."""
    la.simulate(lambda r: saves(r, tmp_path, False, 1.0), workers=2)
    rename = os.replace

    def refuse(source: Path, target: Path) -> None:
        if target == tmp_path / "host1" / manifest.MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)

    def run(rank: int) -> str:
        with pytest.raises(OSError) as caught:
            saves(rank, tmp_path, False, 2.0)
        return str(caught.value).partition(": ")[2]

    check_told(la.simulate(run, workers=2), "rank 1: ", "Input/output error")
    monkeypatch.undo()
    assert la.simulate(lambda r: loads(r, tmp_path, False), workers=2) == [2.0, 2.0]
    check_next_save(tmp_path, False)


class Own:
    """An object of the user's, whose state is whatever it is; one on ``rank`` refuses to load."""

    def __init__(self, state: Any, broken: bool = False) -> None:
        self.state = state
        self.broken = broken

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.broken:
            raise RuntimeError("no\nroom")


UNSAVED: dict[str, tuple[Callable[[int], dict[str, Any]], str, tuple[str, ...]]] = {
    "an array": (lambda r: {"a": np.ones(2)}, "ValueError", ("ranks 0, 1: ", "no plain data")),
    "an array on one rank": (
        lambda r: {"a": np.ones(2) if r else 1},
        "ValueError",
        ("rank 1: ", "numpy", "no plain data"),
    ),
    "a path": (lambda r: {"a": [{"b": Path()}]}, "ValueError", ("PosixPath", "no plain data")),
    "a function": (lambda r: {"a": lambda: 1}, "ValueError", ("lambda",)),
    "a lock": (lambda r: {"a": threading.Lock()}, "ValueError", ("TypeError", "lock")),
    "state that is not plain": (lambda r: {"a": Own({1: Own(2)})}, "ValueError", ("Own",)),
    "state that is not to be had": (
        lambda r: {"a": Own(3) if r else nn.LazyLinear(2)},
        "ValueError",
        ("rank 0: ",),
    ),
    "the name step": (lambda r: {"step": 1}, "ValueError", ("'step'",)),
    "a name on one rank": (lambda r: {"step" if r else "a": 1}, "ValueError", ("rank 1: ",)),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    others, kind, words = UNSAVED[name]
    told = la.simulate(lambda r: two_saves(r, tmp_path, others=others), workers=2)
    check_told([text.replace(f"host{r}", "host") for r, text in enumerate(told)], kind, *words)


def test_parameters_in_no_module_are_not_lost(tmp_path: Path) -> None:
    """An optimizer may hold a head that the model does not."""

    def run(rank: int) -> list[bool]:
        torch.manual_seed(rank)
        model, head = nn.Linear(2, 3), nn.Linear(3, 1)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
        la.attach(model, optimizer, la.local_sgd(2))

        def step() -> Tensor:
            optimizer.zero_grad()
            head(model(torch.randn(4, 2))).square().mean().backward()
            optimizer.step()
            return torch.cat([p.detach().reshape(-1) for p in [*model.parameters(), head.weight]])

        same = []
        for others in ({}, {"head": head}):
            step()
            la.save(tmp_path, model, optimizer, others=others)
            after = [step() for _ in range(3)]
            la.load(tmp_path, model, optimizer, others=others)
            same += [torch.equal(step(), expected) for expected in after]
        return same

    assert la.simulate(run, workers=2) == [[True] * 6] * 2


def test_consensus_weights_are_not_taken_for_the_workers_own(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        own = Run(la.local_sgd(4), rank)
        own.go(2)
        own.save(tmp_path)
        for call in (own.save, own.load):
            with own.sync.consensus(), pytest.raises(ValueError, match=r"inside sync.consensus"):
                call(tmp_path)
        own.save(tmp_path)

    la.simulate(run, workers=2)


def test_a_synchronizer_is_needed_and_must_be_the_right_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"laconic\.attach first"):
        la.save(tmp_path, model, sgd(model))

    def run(rank: int) -> None:
        one, two = Run(la.ddp(), rank), Run(la.local_sgd(2), rank)
        for call in (la.save, la.load):
            with pytest.raises(ValueError, match="is not what follows this optimizer"):
                call(tmp_path, one.model, one.optimizer, two.sync)

    la.simulate(run, workers=1)


def test_files_are_on_disk_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a loss of power: what is renamed was flushed, and the directory is, before other ranks
    are told."""
    events: list[tuple[str, str]] = []
    flush, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(("rename", str(source)))
        rename(source, target)

    def run(rank: int) -> None:
        own = Run(la.ddp(), rank)
        own.sync.driver.session.world = Heard(
            own.sync.driver.session.world, lambda: events.append(("told", ""))
        )  # type: ignore[assignment]
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        own.save(tmp_path / "new" / "folder")

    la.simulate(run, workers=1)
    monkeypatch.undo()
    folder = str(tmp_path / "new" / "folder")
    events = [(kind, without_tokens(path)) for kind, path in events]
    own, manifest = f"{folder}/rank-0-of-1.1.pt", f"{folder}/rank-0-of-1.1.json"
    renamed = events.index(("rename", manifest))
    assert [kind for kind, _ in events].count("rename") == 1
    assert ("fsync", own) in events[:renamed] and ("fsync", manifest) in events[:renamed]
    named = events.index(("fsync", folder), events.index(("fsync", manifest)))
    assert ("told", "") in events[named:renamed], "the ranks agree on what is on disk"
    again = events.index(("fsync", folder), renamed)
    assert ("told", "") not in events[renamed:again] and ("told", "") in events[again:]
    for made in (tmp_path, tmp_path / "new"):
        assert ("fsync", str(made)) in events[:named], "its name could be lost"


# -- what cannot be loaded ----


def damage_nothing(path: Path) -> None:
    """The checkpoint is in order; what it is loaded into is not."""


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (file,) = path.glob(name)
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the manifest."""

    def damage(path: Path) -> None:
        said = json.loads((path / manifest.MANIFEST).read_text())
        change(said)
        (path / manifest.MANIFEST).write_text(json.dumps(said))

    return damage


def flip_a_bit(path: Path) -> None:
    """In the values of a tensor, where torch does not notice."""
    (file,) = path.glob("*.pt")
    with zipfile.ZipFile(file) as archive:
        entry = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(file.read_bytes())
    data[entry.header_offset + 400] ^= 4
    file.write_bytes(data)
    torch.load(file, weights_only=True)


class Planted:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def plant_code(path: Path) -> None:
    (file,) = path.glob("*.pt")
    torch.save({**torch.load(file), "more": Planted(path / "was")}, file)


def spoil_random_state(path: Path) -> None:
    (file,) = path.glob("*.pt")
    saved = torch.load(file)
    saved["random"]["torch"] = torch.zeros(3, dtype=torch.uint8)
    torch.save(saved, file)


def replace_file(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (file,) = path.glob("*.pt")
        file.write_bytes(content)

    return damage


def from_rank_0(path: Path) -> None:
    (file,), (other,) = path.glob("*.pt"), (path.parent / "host0").glob("*.pt")
    shutil.copy(other, file)


def from_another_run(path: Path, everything: bool = False) -> None:
    other = path.parent / "other"
    la.simulate(lambda r: saved_run(r, other), workers=2)
    (own,) = path.glob("*.pt")
    for file in (other / path.name).iterdir():
        if everything:
            shutil.copy(file, path / file.name)
        elif file.suffix == ".pt":
            shutil.copy(file, own)
    shutil.rmtree(other)


def saved_run(rank: int, base: Path) -> Run:
    run = Run(RECIPES["slowmo"], rank)
    run.go(7)
    run.save(folder_of(base, rank, shared=False), own=Own(1))
    return run


@dataclass(frozen=True)
class Refused:
    """What is done to rank 1's directory, how the run that loads differs, and what the error says
    on both ranks. ``others``: what this rank passes."""

    text: str
    damage: Callable[[Path], None] = damage_nothing
    recipe: str = "slowmo"
    hidden: int = 6
    change: Callable[[Run], Any] = lambda run: None
    others: Callable[[int], dict[str, Any]] = lambda rank: {"own": Own(0)}


def other_class(run: Run) -> None:
    run.sync.detach()
    run.optimizer = torch.optim.SGD(run.optimizer.param_groups)  # type: ignore[assignment]
    attach_anew(run)


def other_order(run: Run) -> None:
    run.sync.detach()
    groups = run.optimizer.param_groups
    groups[1]["params"][:2] = reversed(groups[1]["params"][:2])
    attach_anew(run)


def doubled(run: Run) -> None:
    run.sync.detach()
    run.model.double()
    attach_anew(run)


def attach_anew(run: Run) -> None:
    run.sync = la.attach(run.model, run.optimizer, RECIPES["slowmo"])


REFUSED = {
    "a file is empty": Refused("rank 1: rank-1-of-2.1.pt is damaged", cut("*.pt", 0)),
    "half a file": Refused("rank 1: rank-1-of-2.1.pt is damaged", cut("*.pt", 0.5)),
    "nearly a file": Refused("rank 1: rank-1-of-2.1.pt is damaged", cut("*.pt", 0.999)),
    "a bit is wrong": Refused("rank 1: rank-1-of-2.1.pt is damaged (at ", flip_a_bit),
    "rubbish": Refused("rank 1: rank-1-of-2.1.pt is damaged", replace_file(b"rubbish" * 99)),
    "a bare pickle": Refused("rank 1: rank-1-of-2.1.pt is damaged", replace_file(pickle.dumps(1))),
    "code": Refused("rank 1: rank-1-of-2.1.pt has more than plain data", plant_code),
    "rank 0's file": Refused("rank 1: rank-1-of-2.1.pt is not of the save", from_another_run),
    "another run's file": Refused("rank-1-of-2.1.pt is the file of rank 0", from_rank_0),
    "another run's directory": Refused(
        "rank 1 see a checkpoint of another run", partial(from_another_run, everything=True)
    ),
    "half a manifest": Refused("rank 1: laconic.json is damaged", cut("laconic.json", 0.5)),
    "another manifest": Refused(
        "rank 1: laconic.json is damaged", rewrite(lambda said: said.update(serial="1"))
    ),
    "no ranks": Refused("rank 1: laconic.json is damaged", rewrite(lambda d: d.update(ranks=0))),
    "a list for a manifest": Refused(
        "rank 1: laconic.json is damaged",
        lambda path: (path / manifest.MANIFEST).write_text("[1]") and None,
    ),
    "random state that is none": Refused("rank 1: RuntimeError: ", spoil_random_state),
    "another version": Refused(
        "rank 1: laconic.json has format and version", rewrite(lambda d: d.update(version=2))
    ),
    "another format": Refused(
        "rank 1: laconic.json has format and version", rewrite(lambda d: d.update(format="x"))
    ),
    "another width": Refused(
        "the model differs: 'first.weight' is (6, 3) float32 in the checkpoint and (7, 3)",
        hidden=7,
    ),
    "another dtype": Refused("(6, 3) float32 in the checkpoint and (6, 3) float64", change=doubled),
    "other names": Refused(
        "alone has 'more'", change=lambda run: run.model.register_buffer("more", torch.ones(1))
    ),
    "another optimizer": Refused("AdamW was saved, this is SGD", change=other_class),
    "another order": Refused("the optimizer differs", change=other_order),
    "another recipe": Refused("this run follows ddp() (arguments", recipe="ddp"),
    "an object is missing": Refused("others lacks 'own'", others=lambda rank: {}),
    "an object on rank 1": Refused(
        "rank 1: others lacks 'own'", others=lambda r: {} if r else {"own": Own(0)}
    ),
    "an object too many": Refused(
        "no state of others['more'] was saved",
        others=lambda rank: {"own": Own(0), "more": Own(0)},
    ),
    "an object that fails on rank 1": Refused(
        "rank 1: RuntimeError: no room", others=lambda rank: {"own": Own(0, broken=rank == 1)}
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_changes_nothing_on_any_rank(name: str, tmp_path: Path) -> None:
    case = REFUSED[name]
    la.simulate(lambda r: saved_run(r, tmp_path) and None, workers=2)
    case.damage(tmp_path / "host1")

    def run(rank: int) -> str:
        own = Run(RECIPES[case.recipe], 50 + rank, hidden=case.hidden)
        own.go(3)
        case.change(own)
        before = everything(own)
        others = case.others(rank)
        with pytest.raises(ValueError) as caught:
            own.load(folder_of(tmp_path, rank, shared=False), **others)
        assert all(o.state == 0 for o in others.values())
        after = everything(own)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[key])), key
        own.sync.detach()
        return f"ValueError {caught.value}".replace(f"host{rank}", "host")

    check_told(la.simulate(run, workers=2), "ValueError", case.text)
    assert not (tmp_path / "host1" / "was").exists(), "code in a file was run"


def everything(run: Run) -> dict[str, Any]:
    """All that loading may change."""
    flights = [len(r["flights"]) for r in run.sync.state_dict()["rounds"]]
    return {
        "values": run.values(),
        "step": run.sync.step,
        "flights": flights,
        "epoch": run.scheduler.last_epoch,
        "torch": torch.get_rng_state(),
        "python": hash(random.getstate()),
        "numpy": np.random.get_state()[1].astype(np.int64),  # type: ignore[index, union-attr]
    }


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def run(rank: int) -> list[str]:
        own = Run(la.ddp(), rank)
        told = []
        for name in ("", "nowhere", "file", "file/below"):
            with pytest.raises(ValueError) as caught:
                own.load(tmp_path / name)
            told.append(str(caught.value))
        return told

    for texts in zip(*la.simulate(run, workers=2), strict=True):
        check_told(list(texts), "laconic.load of /", "there is no laconic.json")


# -- others ----


def test_others_come_back(tmp_path: Path) -> None:
    """Objects get their state, plain data is returned, each rank its own; NumPy's numbers, which
    schedules leave in parameter groups, do not stand in the way."""

    def run(rank: int) -> None:
        own = Run(la.local_sgd(2), rank)
        own.optimizer.param_groups[0]["lr"] = np.float64(0.1) / 3
        generator = torch.Generator().manual_seed(rank)
        plain = {
            "seen": {"ids": [rank, (2, None)], 3: {"x"}, "rate": np.float32(0.1)},
            "generator": generator.get_state(),
            "best": torch.tensor([float(rank)]),
        }
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank)
        own.save(tmp_path, scaler=scaler, own=Own([rank, np.int64(4)]), **plain)
        expected = torch.rand(3, generator=generator)

        fresh = Run(la.local_sgd(2), 7)
        objects = {"scaler": torch.amp.GradScaler("cpu"), "own": Own(None)}
        found = fresh.load(tmp_path, **objects, seen="what is passed of plain data does not count")
        assert found.keys() == {"seen", "generator", "best", "step"}
        assert found["step"] == 0 and found["best"].tolist() == [rank]
        assert found["seen"] == {"ids": [rank, (2, None)], 3: {"x"}, "rate": float(np.float32(0.1))}
        again = torch.rand(3, generator=generator.set_state(found["generator"]))
        assert torch.equal(expected, again)
        assert objects["scaler"].get_scale() == 2.0**rank
        assert objects["own"].state == [rank, 4]
        assert fresh.optimizer.param_groups[0]["lr"] == 0.1 / 3
        assert type(fresh.optimizer.param_groups[0]["lr"]) is float
        assert own.optimizer.param_groups[0]["lr"].dtype == np.float64, "saving changed the run"

    la.simulate(run, workers=2)


def test_the_current_cards_generator_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CUDA is in use; a stand-in for its generator, as these tests need no card."""
    card = [torch.arange(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: card[0].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: card.__setitem__(0, state))

    def run(rank: int) -> None:
        own = Run(la.ddp(), rank)
        own.save(tmp_path)
        card[0] = card[0] + 1
        own.load(tmp_path)
        assert card[0].tolist() == list(range(16))
        card[0] = torch.zeros(4, dtype=torch.uint8)
        with pytest.raises(ValueError, match="CUDA generator's state"):
            own.load(tmp_path)

    la.simulate(run, workers=1)


def test_ranks_that_save_after_different_steps_are_told(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        own = Run(la.local_sgd(9), rank)
        own.go(2 + rank)
        with pytest.raises(la.LinkError, match=r"after [23] steps"):
            own.save(tmp_path)

    la.simulate(run, workers=2)
    assert files(tmp_path) == []


# -- another number of ranks ----

REST = {
    "ddp": (la.ddp(), False),
    "slowmo": (la.slowmo(None, 3, momentum=0.5), False),
    "local_sgd": (la.local_sgd(4), True),
    "local_sgd, late": (la.local_sgd(4, delay=3), True),
    "easgd": (la.easgd(2, pull=0.3), True),
    "diloco, late": (la.diloco(3, delay=1), True),
    "sgp, late": (la.sgp("bipartite_linear", delay=2), True),
}
"""Recipes, and whether workers must come to rest for another number to go on."""


def parameters(run: Run) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.model.parameters()])


@dataclass(frozen=True)
class Saved:
    """What a rank had when it saved."""

    parameters: Tensor
    values: Tensor
    first: Tensor
    """The first momenta of the first parameter."""


def save_at_6(rank: int, recipe: la.Recipe, finish: bool, base: Path, shared: bool) -> Saved:
    run = Run(recipe, rank)
    run.go(6)
    if finish:
        run.sync.finish()
    run.save(folder_of(base, rank, shared), rank=rank)
    state = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    return Saved(parameters(run), run.values(), state)


def load_at_6(
    rank: int, recipe: la.Recipe, base: Path, nprocs_per_node: int = 1
) -> tuple[int, Saved, bool]:
    run = Run(recipe, 60 + rank, nprocs_per_node=nprocs_per_node)
    before = torch.get_rng_state()
    found = run.load(base / "all")
    untouched = torch.equal(torch.get_rng_state(), before)
    first = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    loaded = Saved(parameters(run), run.values(), first)
    assert run.sync.step == found["step"] == 6
    run.go(9)
    return found["rank"], loaded, untouched


@pytest.mark.parametrize("name", REST)
def test_another_number_of_ranks_goes_on_from_the_one_model(name: str, tmp_path: Path) -> None:
    recipe, finish = REST[name]
    saved = la.simulate(lambda r: save_at_6(r, recipe, finish, tmp_path, True), workers=4)
    for ranks in (1, 2, 3, 5):
        loaded = la.simulate(lambda r: load_at_6(r, recipe, tmp_path), workers=ranks)
        assert len(loaded) == ranks
        for rank, (source, run, untouched) in enumerate(loaded):
            assert source == rank % 4
            assert torch.equal(run.parameters, saved[0].parameters)
            assert torch.equal(run.first, saved[source].first)
            assert untouched, "two ranks could draw alike"
    assert torch.equal(saved[0].first, saved[1].first) == (name == "ddp")


def test_the_same_ranks_in_other_workers(tmp_path: Path) -> None:
    """Four workers go on as two of two ranks each."""
    recipe = la.slowmo(None, 3, momentum=0.5)
    saved = la.simulate(lambda r: save_at_6(r, recipe, False, tmp_path, True), workers=4)
    loaded = la.simulate(lambda r: load_at_6(r, recipe, tmp_path, 2), workers=4)
    for source, run, _ in loaded:
        assert torch.equal(run.values, saved[source].values)


def test_a_save_by_fewer_ranks_replaces_the_files_of_more(tmp_path: Path) -> None:
    la.simulate(lambda r: save_at_6(r, la.ddp(), False, tmp_path, True), workers=4)
    la.simulate(lambda r: save_at_6(r, la.ddp(), False, tmp_path, True), workers=2)
    names = ["all/laconic.json", "all/rank-0-of-2.2.pt", "all/rank-1-of-2.2.pt"]
    assert [without_tokens(name) for name in files(tmp_path)] == names


# -- models sharded inside each worker ----


def sharded_run(rank: int, seed: int) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    recipe = la.slowmo(la.local_sgd(4, delay=3), 6, momentum=0.5)
    return model, optimizer, la.attach(model, optimizer, recipe, link=gloo.link_of(4), mesh=mesh)


def sharded_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    trace = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        trace.append(torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()]))
    return trace


def sharded(rank: int, path: Path) -> tuple[bool, str]:
    """Whether the run goes on bit for bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, sync = sharded_run(rank, 1)
        torch.manual_seed(rank)
        sharded_steps(model, optimizer, 5)
        la.save(path, model, optimizer)
        whole_run = sharded_steps(model, optimizer, 4)
        sync.detach()
        model, optimizer, sync = sharded_run(rank, 2)
        la.load(path, model, optimizer)
        tail_run = sharded_steps(model, optimizer, 4)
        sync.detach()
    return same([whole_run], [tail_run]), str(whole_run[-1].sum())


def test_a_sharded_model_goes_on_bit_for_bit(pool: gloo.Pool, tmp_path: Path) -> None:
    told = pool.run(sharded, tmp_path, ranks=4)
    assert all(ok for ok, _ in told)
    assert len({text for _, text in told}) == 4, "the shards are not apart"


def test_a_run_that_saves_where_another_one_does_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job started again while its predecessor is at work; what the faster one saved stays."""

    def run(rank: int) -> None:
        slow, fast = Run(la.ddp(), 5), Run(la.ddp(), 6)
        slow.go(2)
        fast.go(3)

        def before_its_commit(folder: Path) -> Any:
            monkeypatch.setattr(saving, "read_manifest", read)
            fast.save(tmp_path)
            fast.save(tmp_path)
            return read(folder)

        read = saving.read_manifest
        monkeypatch.setattr(saving, "read_manifest", before_its_commit)
        with pytest.raises(ValueError, match="another run saves to this directory"):
            slow.save(tmp_path)
        again = Run(la.ddp(), 7)
        assert again.load(tmp_path)["step"] == 3
        slow.save(tmp_path)
        assert again.load(tmp_path)["step"] == 2

    la.simulate(run, workers=1)
