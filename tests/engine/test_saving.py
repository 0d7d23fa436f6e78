"""laconic.save, laconic.load and state dicts: exact, atomic on every rank, and refused with the
reason."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laconic as la

from tests.support.loops import descend, flat, refusal, sgd

STEPS, NEXT = 14, 4
SLOW = pytest.mark.slow
MANIFEST = "laconic.json"
SLOWMO = la.slowmo(la.local_sgd(4, delay=3), 6, momentum=0.5)


# -- a run that draws from every generator ----


def put_another_tensor(norm: Any, _: object) -> None:
    norm.running_mean = norm.running_mean.clone()


class Run:
    """One worker's model, which drops out and keeps running statistics, and its optimizer, schedule
    and synchronizer; ``seed`` of the generators."""

    def __init__(
        self,
        recipe: la.Recipe,
        seed: int,
        hidden: int = 6,
        *,
        frozen: bool = False,
        **options: Any,
    ) -> None:
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        norm, drop = nn.BatchNorm1d(hidden), nn.Dropout(0.3)
        norm.register_forward_pre_hook(put_another_tensor)
        self.model = nn.Sequential(
            nn.Linear(3, hidden), norm, nn.Tanh(), drop, nn.Linear(hidden, 2)
        )
        self.model[0].weight.requires_grad_(not frozen)
        groups: list[dict[str, Any]] = [
            {"params": self.model[0].parameters(), "weight_decay": 0.1},
            {"params": self.model[1:].parameters()},
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
            descend(self.optimizer, loss, self.sync)
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

    def save(self, path: Path, **more: Any) -> None:
        la.save(path, self.model, self.optimizer, others={"scheduler": self.scheduler, **more})

    def load(self, path: Path, **more: Any) -> dict[str, Any]:
        parts = self.model, self.optimizer, self.sync
        return la.load(path, *parts, others={"scheduler": self.scheduler, **more})


@pytest.mark.parametrize(
    "recipe", [la.sgp("bipartite_linear", delay=2), pytest.param(SLOWMO, marks=SLOW)]
)
def test_a_run_goes_on_bit_for_bit(recipe: la.Recipe, tmp_path: Path) -> None:
    """With generators, schedules and buffers; saved with messages in flight, which disturbs
    nothing. Who goes on had other random state."""
    saves = 4, 9, 12

    def run(rank: int) -> None:
        undisturbed = Run(recipe, 100 + rank).go(STEPS)
        own, trace = Run(recipe, 100 + rank), []
        for step in saves:
            trace += own.go(step)
            own.save(tmp_path / str(step), epoch=step // 3)
        trace += own.go(STEPS)
        assert all(map(torch.equal, undisturbed, trace)), "saving disturbed the run"
        for step in saves:
            fresh = Run(recipe, 999)
            assert fresh.load(tmp_path / str(step)) == {"epoch": step // 3, "step": step}
            again = fresh.go(min(step + NEXT, STEPS))
            assert all(map(torch.equal, again, undisturbed[step : step + NEXT])), step

    la.simulate(run, workers=3)


@pytest.mark.parametrize("step", [3, 5])
@pytest.mark.fault("a parameter that was frozen at the save was not in x after the load")
@pytest.mark.fault("coded gradients saved right after a change of requires_grad were refused")
def test_a_frozen_parameter_goes_on_bit_for_bit(step: int, tmp_path: Path) -> None:
    """Saved when the steps after it have been taken, or at once. Under a recipe without rounds on
    parameters; then the run switches to one that codes them, in blocks of eight."""

    def run(rank: int) -> None:
        traces = []
        for loads in (False, True):
            own = Run(la.ddp(codec="int4"), 100 + rank, buffers="keep", frozen=loads)
            if loads:
                own.load(tmp_path)
            else:
                own.go(3)
                own.model[0].weight.requires_grad_(False)
                own.go(step)
                own.save(tmp_path)
            trace = own.go(6)
            own.sync.switch(la.local_sgd(2, codec=la.codecs.Int4(8)))
            traces.append(trace + own.go(9))
        assert all(map(torch.equal, *traces))

    la.simulate(run, workers=2)


# -- whole or not at all, wherever it ends ----

WORKERS = 2


def folder_of(base: Path, rank: int, shared: bool = False) -> Path:
    """One directory for all, or one for each rank, as on hosts of their own."""
    return base / "all" if shared else base / f"host{rank}"


def constant_run(rank: int, value: float) -> Run:
    """A worker whose parameters are ``value``, after as many steps."""
    run = Run(la.local_sgd(4, delay=3), rank, hidden=2)
    run.sync.driver.session.step = max(int(value), 0)
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
    [(0, True, 60), *(pytest.param(r, r == 0, 1, marks=SLOW) for r in (0, 1))],
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
    commit = range(max(1, end - 40), end, 1 + every // 8)  # where most can go wrong
    for line in sorted({*range(1, end, every), *commit, end - 1}):
        shutil.rmtree(base)
        shutil.copytree(before, base)
        with killed_at(rank, line), pytest.raises(Killed):
            saves(base, shared, 2.0)
        if left() != last:  # else it is what the line before left
            last = left()
            found.append(found_in(base, shared))
            saves(base, shared, 3.0)  # leaves nothing else behind
            assert len(files(base)) == WORKERS + (1 if shared else WORKERS), files(base)
            assert found_in(base, shared) == 3.0
    assert found == sorted(found) and set(found) == {1.0, 2.0}
    gc.collect()  # files left open are told of here, and not after the test


# -- what cannot be saved ----


def test_rank_0_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        own = Run(la.local_sgd(4), rank)
        with pytest.raises(la.LinkError) as caught, own.sync:
            own.go(5)
            if rank == 0:
                own.save(tmp_path)
            own.go(9)
        said = str(caught.value)
        assert "laconic.save (every rank must call it)" in said
        assert "outside any `if rank == 0`" in said
        assert rank or ("call laconic.save on every rank" in said and "after 5 steps" in said)

    la.simulate(run, workers=2)
    assert files(tmp_path) == []


def check_told(texts: Sequence[str], kind: str, *words: str) -> None:
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
UNSAVED: list[tuple[Callable[[int], dict[str, Any]], tuple[str, ...]]] = [
    (lambda r: {"a": np.ones(2) if r else 1}, ("ValueError", "rank 1: ", "no plain data")),
    (lambda r: {"a": Own({1: Own(2)})}, ("ValueError", "ranks 0, 1: ", "Own")),
    (lambda r: {"step" if r else "a": 1}, ("ValueError", "rank 1: ", "step")),
    (lambda r: {"a": torch.zeros(r * BIG)}, ("OSError", "rank 1: ", "File too large")),
]


def test_what_cannot_be_saved_is_an_error_on_all(tmp_path: Path) -> None:
    """The first save is still there. Files end after so many bytes: what a full disk is to who
    writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BIG, limits[1]))

    def run(rank: int) -> list[str]:
        run, path, told = Run(la.local_sgd(4, delay=3), rank), folder_of(tmp_path, rank), []
        run.go(3)
        run.save(path)
        kept, before = run.values(), files(path)
        for others, _ in UNSAVED:
            run.go(run.sync.step + 1)
            with pytest.raises((OSError, ValueError)) as caught:
                run.save(path, **others(rank))
            said = f"{type(caught.value).__name__} {caught.value}"
            told.append(said.replace(f"host{rank}", "host"))
            assert files(path) == before
        run.go(9)  # it is none the worse
        assert run.load(path)["step"] == 3 and torch.equal(run.values(), kept)
        return told

    try:
        for told, (_, words) in zip(zip(*la.simulate(run, 2), strict=True), UNSAVED, strict=True):
            check_told(told, *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
        for recipe, saves in ((la.ddp(codec="int8"), False), (la.ddp(), True)):
            other = Run(recipe, rank)
            other.model(torch.randn(5, 3)).sum().backward()
            if saves:
                other.save(tmp_path / "half")
            else:
                said = refusal(lambda run=other: run.save(tmp_path / "half"))  # type: ignore[misc]
                assert "save after optimizer.step()" in said
                other.optimizer.zero_grad()  # the program leaves this step out
                other.save(tmp_path / "left out")
        own.go(3 + rank)
        said = refusal(lambda: own.save(tmp_path / "apart"), la.LinkError)
        assert re.search("after [34] steps", said)

    la.simulate(run, workers=2)
    assert not (tmp_path / "apart").exists() or files(tmp_path / "apart") == []


def test_files_are_on_disk_before_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a loss of power: what is renamed was flushed, and so are the directories."""
    events, flush, rename = list[str](), os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(without_tokens(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(f"named {without_tokens(str(source))}")
        rename(source, target)

    folder, names = tmp_path / "new" / "folder", ("rank-0-of-1.1.pt", "rank-0-of-1.1.json")

    def run(rank: int) -> None:
        own = Run(la.ddp(), rank)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            patched.setattr(os, "replace", replace)
            own.save(folder)

    la.simulate(run, workers=1)
    named = events.index(f"named {folder / names[1]}")
    places = *(folder / name for name in names), folder, folder.parent, tmp_path
    assert {str(place) for place in places} <= {*events[:named]}
    assert events[named + 1] == str(folder)


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
        own = Run(SLOWMO, rank)
        own.go(7)
        own.save(folder_of(base, rank), own=Own(1))

    la.simulate(run, workers=2)


class Refused(NamedTuple):
    """What is done to rank 1's directory, and how the run that loads differs. ``others``: what this
    rank passes."""

    damage: Callable[[Path], None] = lambda path: None
    recipe: la.Recipe = SLOWMO
    hidden: int = 6
    others: Callable[[int], dict[str, Any]] = lambda rank: {"own": Own(0)}


REFUSED = {
    "rank 1: rank-1-of-2.1.pt is damaged": Refused(cut("*.pt", 0.9)),
    "rank 1: rank-1-of-2.1.pt is damaged (at ": Refused(flip_a_bit),
    "rank 1: rank-1-of-2.1.pt has more than plain data": Refused(plant_code),
    "rank 1: rank-1-of-2.1.pt is not of the save": Refused(from_another_run),
    "rank 1: laconic.json is damaged": Refused(cut(MANIFEST, 0.5)),
    "rank 1: laconic.json has format and version": Refused(another_version),
    "(6, 3) float32 in the checkpoint, (7, 3) float32 here": Refused(hidden=7),
    "this run follows ddp()": Refused(recipe=la.ddp()),
    "rank 1: others lacks 'own'": Refused(others=lambda r: {} if r else {"own": Own(0)}),
    "rank 1: RuntimeError: no room": Refused(others=lambda r: {"own": Own(0, broken=r == 1)}),
}
"""By what the error says on both ranks."""


def test_what_cannot_be_loaded_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    def everything(run: Run) -> list[Any]:
        flights = [len(r["flights"]) for r in run.sync.state_dict()["rounds"]]
        drawn = torch.get_rng_state(), hash(random.getstate()), str(np.random.get_state())
        whole = run.values(), *drawn, run.sync.step, flights, run.scheduler.last_epoch
        return [w.tolist() if isinstance(w, Tensor) else w for w in whole]

    def run(rank: int, case: Refused, base: Path) -> str:
        own = Run(case.recipe, 50 + rank, case.hidden)
        own.go(3)
        before, others = everything(own), case.others(rank)
        said = refusal(lambda: own.load(folder_of(base, rank), **others))
        assert all(o.state == 0 for o in others.values()) and everything(own) == before
        return said.replace(f"host{rank}", "host")

    save_run(tmp_path / "saved")
    for number, (text, case) in enumerate(REFUSED.items()):
        base = tmp_path / str(number)
        shutil.copytree(tmp_path / "saved", base)
        case.damage(base / "host1")
        check_told(la.simulate(partial(run, case=case, base=base), workers=2), "", text)
        assert not (base / "host1" / "was").exists(), "code in a file was run"


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


def test_dicts_and_lists_come_back_in_place(tmp_path: Path) -> None:
    """As objects do: who does not look at what is returned does not go on with epoch 0."""

    def run(rank: int) -> None:
        run = Run(la.local_sgd(2), rank)
        progress, history = {"epoch": 3 + rank, "best": 0.5}, [1.0, 2.0]
        run.save(tmp_path, progress=progress, history=history)
        others = {"progress": {"epoch": 0, "new": 1}, "history": [7.0]}
        found = Run(la.local_sgd(2), rank).load(tmp_path, **others)
        assert others == {"progress": progress, "history": history}
        assert found == {**others, "step": 0}

    la.simulate(run, workers=2)


# -- state dicts ----

Parts = tuple[Any, ...]
"""The states of a model, an optimizer and a synchronizer."""


def states_of(run: Run) -> Parts:
    parts = run.model, run.optimizer, run.sync
    return copy.deepcopy(tuple(part.state_dict() for part in parts))


def data_of(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_one_rank_alone_may_ask_for_its_state_which_then_does_not_change() -> None:
    def run(rank: int, asks: bool) -> list[Tensor]:
        own, trace, states = Run(la.diloco(5, delay=4), rank), list[Tensor](), []
        for t in range(1, STEPS + 1):
            trace += own.go(t)
            if asks and rank == 0:
                state = own.sync.state_dict()
                states.append((state, data_of(state)))
        assert all(data_of(state) == before for state, before in states)
        return trace

    plain, asked = (la.simulate(partial(run, asks=asks), workers=3) for asks in (False, True))
    assert all(all(map(torch.equal, *each)) for each in zip(plain, asked, strict=True))


def shortened(state: dict[str, Any]) -> dict[str, Any]:
    """With a tensor that is too short."""
    state = copy.deepcopy(state)
    state["rounds"][1]["state"][0]["u"] = torch.zeros(3)
    return state


def sync_of(choose: Callable[[int, list[Any]], Any]) -> Callable[[int, list[Parts]], Parts]:
    """The synchronizer's state is chosen among those of all ranks."""
    return lambda r, s: (*s[r % 2][:2], choose(r, [parts[2] for parts in s]))


Mistakes = list[tuple[Callable[[int, list[Parts]], Parts], str]]
"""What each rank hands over, given what both ranks have saved and its own present states, and what
the error says."""
OF_TWO: Mistakes = [
    (sync_of(lambda r, s: s[1 - r]), "its own"),
    (sync_of(lambda r, s: s[0]), "its own|ranks"),
    (lambda r, s: (s[2][0], *s[r][1:]), "load the model"),
    (lambda r, s: (s[2 * r][0], *s[r][1:]), "load the model|ranks [1]"),
    (lambda r, s: (s[0][0], *s[r][1:]), "load the model|ranks"),
    (sync_of(lambda r, s: [s[r]]), "not what"),
    (lambda r, s: (*s[r][:2], {**s[r][2], "rounds": []}), "not what"),
    (sync_of(lambda r, s: {**s[r], "version": 999}), "version|999"),
    (sync_of(lambda r, s: shortened(s[r]) if r else s[r]), "u"),
]
OF_THREE: Mistakes = [(sync_of(lambda r, s: s[r % 2]), "laconic.load")]


@pytest.mark.parametrize(
    ("recipe", "workers", "mistakes"),
    [
        (SLOWMO, 2, OF_TWO),
        (SLOWMO, 3, OF_THREE),
        (la.diloco(4), 2, [(lambda r, s: s[r], "was saved under slowmo")]),
    ],
)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(
    recipe: la.Recipe, workers: int, mistakes: Mistakes
) -> None:
    def save(rank: int) -> Parts:
        own = Run(SLOWMO, rank)
        own.go(7)
        return states_of(own)

    states = la.simulate(save, workers=2)

    def load(rank: int) -> None:
        own = Run(recipe, rank)
        own.go(5)
        present = states_of(own)
        for hand_over, said in mistakes:
            model, optimizer, sync = hand_over(rank, [*states, present])
            own.model.load_state_dict(model)
            own.optimizer.load_state_dict(optimizer)
            before = data_of(states_of(own))
            told = refusal(lambda state=sync: own.sync.load_state_dict(state))  # type: ignore[misc]
            assert any(word in told for word in said.split("|")), told
            assert data_of(states_of(own)) == before

    la.simulate(load, workers=workers)


def in_epochs(rank: int, path: Path, stop: int, generator: torch.Generator | None) -> Tensor:
    """Train as docs/checkpoints.md does, for ``stop`` steps in all, and save."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = TensorDataset(torch.arange(36.0).view(12, 3) / 36)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, rank)
    loader = DataLoader(data, batch_size=2, sampler=sampler, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with la.attach(model, optimizer, la.local_sgd(2)) as sync:
        la.load(path, model, optimizer, missing_ok=True)
        while sync.step < stop:
            epoch, done = divmod(sync.step, len(loader))
            sampler.set_epoch(epoch)
            if generator is not None:
                generator.manual_seed(epoch)
            for (x,) in itertools.islice(loader, done, stop - epoch * len(loader)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        la.save(path, model, optimizer)
    return flat(model)


@pytest.mark.parametrize("own", [True, False])
def test_a_loop_resumes_in_the_middle_of_an_epoch(tmp_path: Path, own: bool) -> None:
    """If the loader has a generator ``own``: a new iterator takes a number, and dropout differs."""

    def go(name: str, stop: int) -> list[Tensor]:
        def run(rank: int) -> Tensor:
            return in_epochs(rank, tmp_path / name, stop, torch.Generator() if own else None)

        return la.simulate(run, workers=2)

    go("interrupted", 4)
    assert all(map(torch.equal, go("interrupted", 9), go("whole", 9))) == own
