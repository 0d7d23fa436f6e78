"""laconic.save and laconic.load: exact, atomic on every rank, and refused with the reason."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support.loops import flat, refusal, sgd

STEPS, NEXT = 14, 4
SLOW = pytest.mark.slow
MANIFEST = "laconic.json"
RECIPES: dict[str, la.Recipe] = {
    "local_sgd, late": la.local_sgd(3, delay=7),
    "slowmo": la.slowmo(la.local_sgd(4, delay=3), 6, momentum=0.5),
    "sgp, late": la.sgp("bipartite_linear", delay=2),
    "ddp": la.ddp(),
}
"""With the last, this file saves in other places."""


# -- a run that draws from every generator ----


class Net(nn.Module):
    """Drops out, and keeps running statistics."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, hidden), nn.BatchNorm1d(hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.running_mean = self.norm.get_buffer("running_mean").clone()  # another tensor
        hidden = self.norm(self.first(x)).tanh()
        y: Tensor = self.last(nn.functional.dropout(hidden, 0.3, self.training))
        return y


class Run:
    """One worker's model, optimizer, schedule and synchronizer; ``seed`` of the generators."""

    def __init__(self, recipe: la.Recipe, seed: int, hidden: int = 6, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net(hidden)
        groups: list[dict[str, Any]] = [
            {"params": self.model.first.parameters(), "weight_decay": 0.1},
            {"params": [*self.model.norm.parameters(), *self.model.last.parameters()]},
        ]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.sync = la.attach(self.model, self.optimizer, recipe, **options)

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


@pytest.mark.parametrize(
    "name",
    ["local_sgd, late", "sgp, late", pytest.param("slowmo", marks=SLOW)],
)
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """With generators, schedules and buffers; saved with messages in flight, which disturbs
    nothing. Who goes on had other random state."""
    saves = sorted(random.Random(name).sample(range(1, STEPS - 1), 3))

    def run(rank: int) -> None:
        undisturbed = Run(RECIPES[name], 100 + rank).go(STEPS)
        own, trace = Run(RECIPES[name], 100 + rank), []
        for step in saves:
            trace += own.go(step)
            own.save(tmp_path / str(step), epoch=step // 3)
        trace += own.go(STEPS)
        assert all(map(torch.equal, undisturbed, trace)), "saving disturbed the run"
        for step in saves:
            fresh = Run(RECIPES[name], 999)
            assert fresh.load(tmp_path / str(step)) == {"epoch": step // 3, "step": step}
            again = fresh.go(min(step + NEXT, STEPS))
            assert all(map(torch.equal, again, undisturbed[step : step + NEXT])), step

    la.simulate(run, workers=3)


# -- whole or not at all, wherever it ends ----

WORKERS = 2


def folder_of(base: Path, rank: int, shared: bool = False) -> Path:
    """One directory for all, or one for each rank, as on hosts of their own."""
    return base / "all" if shared else base / f"host{rank}"


def constant_run(rank: int, value: float) -> Run:
    """A worker whose parameters are ``value``, after as many steps."""
    run = Run(la.local_sgd(4, delay=3), rank, hidden=2)
    run.sync.step = max(int(value), 0)
    with torch.no_grad():
        for p in run.model.parameters():
            p.fill_(value)
    return run


def saves(base: Path, shared: bool, value: float) -> None:
    """Two workers save a model of ``value``."""

    def run(rank: int) -> None:
        threading.current_thread().laconic_rank = rank  # type: ignore[attr-defined]
        constant_run(rank, value).save(folder_of(base, rank, shared), value=value + rank)

    la.simulate(run, workers=WORKERS)


def found_in(base: Path, shared: bool) -> float:
    """Which save counts on all ranks; asserts that it is whole."""

    def run(rank: int) -> float:
        run = constant_run(rank, -1.0)
        found = run.load(folder_of(base, rank, shared))
        value = float(found["value"]) - rank
        assert run.sync.step == found["step"] == int(value)
        assert all((p == value).all() for p in run.model.parameters())
        return value

    (value,) = set(la.simulate(run, workers=WORKERS))
    return value


def files(base: Path) -> list[str]:
    return sorted(str(p.relative_to(base)) for p in base.rglob("*") if p.is_file())


def check_next_save(base: Path, shared: bool) -> None:
    """It leaves nothing else behind."""
    saves(base, shared, 3.0)
    assert len(files(base)) == WORKERS + (1 if shared else WORKERS), files(base)
    assert found_in(base, shared) == 3.0


def without_tokens(text: str) -> str:
    """Names of files as if they did not end in a random token."""
    return re.sub(r"-[0-9a-f]{16}(?=\.pt|\.json)", "", text)


class Killed(BaseException):
    """As SIGKILL ends a process: no handler for errors sees it."""


@contextmanager
def killed_at(rank: int, line: int) -> Iterator[list[int]]:
    """End simulated worker ``rank`` at the ``line``-th line that it runs of what saves; yields the
    lines that it ran."""
    package, lines = str(Path(la.__file__).parent / "checkpoint"), list[int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(package) or code.co_name == "plain":  # no file
            return None
        if event == "line" and getattr(threading.current_thread(), "laconic_rank", None) == rank:
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise Killed
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        yield lines
    finally:
        threading.settrace(before)


@pytest.mark.timeout(1500)  # hundreds of saves, at every line
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize(
    ("rank", "shared", "every"),
    [
        *((0, True, 30), (1, False, 30)),
        *(pytest.param(*case, 1, marks=SLOW) for case in ((0, True), (0, False), (1, False))),
    ],
)
def test_a_worker_killed_at_any_line_leaves_one_whole_checkpoint(
    rank: int, shared: bool, every: int, tmp_path: Path
) -> None:
    before, base = tmp_path / "before", tmp_path / "after"
    saves(before, shared, 1.0)
    shutil.copytree(before, base)
    with killed_at(rank, 0) as lines:
        saves(base, shared, 2.0)
    old = {(before / name).stat().st_mtime_ns for name in files(before)}

    def left() -> list[tuple[str, int, int]]:
        stats = [(name, (base / name).stat()) for name in files(base)]
        times = [s.st_mtime_ns if s.st_mtime_ns in old else 0 for _, s in stats]
        return [(without_tokens(n), s.st_size, t) for (n, s), t in zip(stats, times, strict=True)]

    found, last = [], None
    end = len(lines) + 1
    commit = range(max(1, end - 40), end, (every + 5) // 6)  # where most can go wrong
    for line in sorted({*range(1, end, every), *commit, end - 1}):
        shutil.rmtree(base)
        shutil.copytree(before, base)
        with killed_at(rank, line), pytest.raises(Killed):
            saves(base, shared, 2.0)
        if left() != last:  # else it is what the line before left
            last = left()
            found.append(found_in(base, shared))
            check_next_save(base, shared)
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    gc.collect()  # files left open are told of here, and not after the test


# -- what cannot be saved ----


def test_rank_0_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        own = Run(la.local_sgd(4), rank)

        def loop() -> None:
            with own.sync:
                own.go(5)
                if rank == 0:
                    own.save(tmp_path)
                own.go(9)

        return refusal(loop, la.LinkError)

    texts = la.simulate(run, workers=2)
    assert all("laconic.save (every rank must call it)" in text for text in texts)
    assert "outside any `if rank == 0`" in texts[0] and "after 5 steps" in texts[0]
    assert files(tmp_path) == []


def two_saves(rank: int, base: Path, others: Callable[[int], dict[str, Any]]) -> str:
    """Save, and save again with what cannot be saved: what the error says. The first save must
    still be there."""
    run, path = Run(la.local_sgd(4, delay=3), rank), folder_of(base, rank)
    run.go(3)
    run.save(path)
    kept, before = run.values(), files(path)
    run.go(5)
    with pytest.raises((OSError, ValueError)) as caught:
        run.save(path, **others(rank))
    assert files(path) == before
    run.go(6)  # the run is none the worse
    assert run.load(path)["step"] == 3
    assert torch.equal(run.values(), kept)
    return f"{type(caught.value).__name__} {caught.value}".replace(f"host{rank}", "host")


def check_told(texts: list[str], kind: str, *words: str) -> None:
    """Alike on all ranks, in one line."""
    assert len(texts) > 1 and len(set(texts)) == 1, texts
    assert texts[0].startswith(kind) and "\n" not in texts[0], texts[0]
    assert all(word in without_tokens(texts[0]) for word in words), texts[0]


class Own:
    """An object of the user's, whose state is whatever it is; a broken one refuses to load."""

    def __init__(self, state: Any, broken: bool = False) -> None:
        self.state = state
        self.broken = broken

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        if self.broken:
            raise RuntimeError("no\nroom")


BIG = 100_000
UNSAVED: dict[str, tuple[Callable[[int], dict[str, Any]], tuple[str, ...]]] = {
    "an array": (lambda r: {"a": np.ones(2)}, ("ValueError", "ranks 0, 1: ", "no plain data")),
    "an array on one rank": (
        lambda r: {"a": np.ones(2) if r else 1},
        ("ValueError", "rank 1: ", "numpy"),
    ),
    "state that is not plain": (lambda r: {"a": Own({1: Own(2)})}, ("ValueError", "Own")),
    "a name on one rank": (lambda r: {"step" if r else "a": 1}, ("ValueError", "rank 1: ", "step")),
    "a full disk of one rank": (
        lambda r: {"a": torch.zeros(r * BIG)},
        ("OSError", "rank 1: ", "File too large"),
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved_is_an_error_on_all(name: str, tmp_path: Path) -> None:
    """Files end after so many bytes: what a full disk, or a quota, is to who writes."""
    others, words = UNSAVED[name]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BIG, limits[1]))
    try:
        told = la.simulate(lambda r: two_saves(r, tmp_path, others), workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_told(told, *words)


def test_a_save_or_load_at_the_wrong_place_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert "laconic.attach first" in refusal(lambda: la.save(tmp_path, model, sgd(model)))

    def run(rank: int) -> None:
        own, other = Run(la.local_sgd(9), rank), Run(la.ddp(), rank)
        own.go(2)
        own.save(tmp_path)
        for call in (la.save, la.load):
            said = refusal(lambda call=call: call(tmp_path, own.model, own.optimizer, other.sync))  # type: ignore[misc]
            assert "is not what follows this optimizer" in said
        with own.sync.consensus():
            for method in (own.save, own.load):
                said = refusal(lambda method=method: method(tmp_path))  # type: ignore[misc]
                assert "inside sync.consensus" in said
        own.go(3 + rank)
        said = refusal(lambda: own.save(tmp_path / "apart"), la.LinkError)
        assert re.search("after [34] steps", said)

    la.simulate(run, workers=2)
    assert not (tmp_path / "apart").exists() or files(tmp_path / "apart") == []


def test_files_are_on_disk_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a loss of power: what is renamed was flushed, and so are the directories."""
    events: list[str] = []
    flush, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(without_tokens(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(f"named {without_tokens(str(source))}")
        rename(source, target)

    folder = tmp_path / "new" / "folder"

    def run(rank: int) -> None:
        own = Run(la.ddp(), rank)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        own.save(folder)
        monkeypatch.undo()

    la.simulate(run, workers=1)
    manifest = f"{folder}/rank-0-of-1.1.json"
    named = events.index(f"named {manifest}")
    before, after = events[:named], events[named + 1 :]
    for place in (f"{folder}/rank-0-of-1.1.pt", manifest, folder, folder.parent, tmp_path):
        assert str(place) in before
    assert str(folder) in after[:1]


# -- what cannot be loaded ----


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (file,) = path.glob(name)
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def another_version(path: Path) -> None:
    said = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**said, "version": 2}))


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


def from_another_run(path: Path) -> None:
    save_run(path.parent / "other")
    (own,), (file,) = path.glob("*.pt"), (path.parent / "other" / path.name).glob("*.pt")
    shutil.copy(file, own)


def save_run(base: Path) -> None:
    def run(rank: int) -> None:
        own = Run(RECIPES["slowmo"], rank)
        own.go(7)
        own.save(folder_of(base, rank), own=Own(1))

    la.simulate(run, workers=2)


@dataclass(frozen=True)
class Refused:
    """What is done to rank 1's directory, how the run that loads differs, and what the error says
    on both ranks. ``others``: what this rank passes."""

    text: str
    damage: Callable[[Path], None] = lambda path: None
    recipe: str = "slowmo"
    hidden: int = 6
    others: Callable[[int], dict[str, Any]] = lambda rank: {"own": Own(0)}


DAMAGED = "rank 1: rank-1-of-2.1.pt is damaged"
REFUSED = {
    "a file is empty": Refused(DAMAGED, cut("*.pt", 0)),
    "a bit is wrong": Refused(f"{DAMAGED} (at ", flip_a_bit),
    "code": Refused("rank 1: rank-1-of-2.1.pt has more than plain data", plant_code),
    "another run's file": Refused("rank 1: rank-1-of-2.1.pt is not of the save", from_another_run),
    "half a manifest": Refused("rank 1: laconic.json is damaged", cut(MANIFEST, 0.5)),
    "another version": Refused("rank 1: laconic.json has format and version", another_version),
    "another width": Refused(
        "the model differs: 'first.weight' is (6, 3) float32 in the checkpoint and (7, 3)",
        hidden=7,
    ),
    "another recipe": Refused("this run follows ddp()", recipe="ddp"),
    "an object on rank 1": Refused(
        "rank 1: others lacks 'own'", others=lambda r: {} if r else {"own": Own(0)}
    ),
    "an object that fails on rank 1": Refused(
        "rank 1: RuntimeError: no room", others=lambda rank: {"own": Own(0, broken=rank == 1)}
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with a directory each."""
    base = tmp_path_factory.mktemp("saved")
    save_run(base)
    return base


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_changes_nothing_on_any_rank(
    name: str, saved: Path, tmp_path: Path
) -> None:
    case = REFUSED[name]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    case.damage(tmp_path / "host1")

    def everything(run: Run) -> dict[str, Any]:
        return {
            "values": run.values(),
            "step": run.sync.step,
            "flights": [len(r["flights"]) for r in run.sync.state_dict()["rounds"]],
            "epoch": run.scheduler.last_epoch,
            "torch": torch.get_rng_state(),
            "python": hash(random.getstate()),
            "numpy": np.random.get_state()[1].astype(np.int64),  # type: ignore[index]
        }

    def run(rank: int) -> str:
        own = Run(RECIPES[case.recipe], 50 + rank, hidden=case.hidden)
        own.go(3)
        before, others = everything(own), case.others(rank)
        said = refusal(lambda: own.load(folder_of(tmp_path, rank), **others))
        assert all(o.state == 0 for o in others.values())
        for key, value in everything(own).items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[key])), key
        return said.replace(f"host{rank}", "host")

    check_told(la.simulate(run, workers=2), "", case.text)
    assert not (tmp_path / "host1" / "was").exists(), "code in a file was run"


# -- what comes back ----


def test_others_come_back(tmp_path: Path) -> None:
    """Objects get their state, plain data is returned, each rank its own; NumPy's numbers, which
    schedules leave in parameter groups, do not stand in the way. An optimizer may hold a head that
    the model does not: it is not lost."""

    def run(rank: int) -> None:
        own, head = Run(la.local_sgd(2), rank), nn.Linear(2, 1)
        own.optimizer.add_param_group({"params": head.parameters()})
        own.go(3)
        own.optimizer.param_groups[0]["lr"] = np.float64(0.1) / 3
        seen = {"ids": [rank, (2, None)], 3: {"x"}, "rate": np.float32(0.1)}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank)
        own.save(tmp_path, scaler=scaler, own=Own([rank, np.int64(4)]), seen=seen)
        assert own.optimizer.param_groups[0]["lr"].dtype == np.float64, "saving changed the run"

        fresh, other = Run(la.local_sgd(2), 7), nn.Linear(2, 1)
        fresh.optimizer.add_param_group({"params": other.parameters()})
        objects: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu"), "own": Own(None)}
        found = fresh.load(tmp_path, **objects, seen="what is passed of plain data does not count")
        assert found == {"seen": {**seen, "rate": float(np.float32(0.1))}, "step": 3}
        assert torch.equal(flat(other), flat(head)) and objects["own"].state == [rank, 4]
        assert objects["scaler"].get_scale() == 2.0**rank
        assert fresh.optimizer.param_groups[0]["lr"] == 0.1 / 3

    la.simulate(run, workers=2)


# -- another number of ranks ----


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """With random state of its own, or two could draw alike. Files of ranks that are gone are
    deleted."""

    def run(rank: int, save: bool) -> None:
        own = Run(RECIPES["ddp"], 60 + rank)
        before = torch.get_rng_state()
        if not save:
            found = own.load(tmp_path)
            assert own.sync.step == found["step"] == 6 and found["rank"] == rank % 4
            assert torch.equal(torch.get_rng_state(), before)
        own.go(6 if save else 9)
        own.save(tmp_path, rank=rank)

    la.simulate(partial(run, save=True), workers=4)
    la.simulate(partial(run, save=False), workers=2)
    names = [MANIFEST, "rank-0-of-2.2.pt", "rank-1-of-2.2.pt"]
    assert [without_tokens(name) for name in files(tmp_path)] == names
