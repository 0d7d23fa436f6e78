"""A checkpoint on disk: a directory in which every rank has a file of its own.

    laconic.json             the manifest: which save counts, of how many ranks, after which step
    rank-0-of-4.7-x.pt ...   what each rank saved in the save of serial 7, with a token x of its own

Ranks may share the directory, or each host may have its own. A save of serial s has three parts,
and each begins when the one before it is known to be done on all ranks:

1. every rank writes its file of serial s, which no manifest names yet, and a manifest under another
   name;
2. every rank renames that manifest to its place;
3. every rank deletes what is older than s.

So where any manifest says s all files of s are there, and while any says less those of before are
there, too: however a save ends, the newest manifest that a rank can see belongs to a checkpoint
that is whole, and `load` takes this one. The next save has a higher serial than anything that is
there, and deletes what one that was cut short has left.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import pickle
import random
import re
import secrets
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.attach import check_free, synchronizer_of
from laconic.buckets import is_sharded, on_mesh_of
from laconic.compat.comm_optimizer import CommOptimizer
from laconic.compat.dist_optimizer import DistOptimizer
from laconic.compat.fairscale import SlowMoDistributedDataParallel
from laconic.device import ACCELERATORS
from laconic.engine.synchronizer import LOAD, SAVE, Synchronizer
from laconic.errors import LinkError

T = TypeVar("T")
log = logging.getLogger("laconic")

VERSION = 1
MANIFEST = "laconic.json"
_FORMAT = "laconic checkpoint"
_NAME = re.compile(r"rank-\d+-of-\d+\.(\d+)-[0-9a-f]+\.(pt|json)")
_MOST_LETTERS = 400
_RECEIVED = "received-"
"""What the names of folders begin with in which a rank keeps files that others have sent."""
_PIECE = 2**24
"""Bytes of a file that ranks send each other at a time."""
_FRONT = "laconic: "
"""Before the names of what is saved with ``others`` and is not the user's."""
_EVERY_RANK = (
    "Each rank saves its own parameters, optimizer state and private state: call laconic.save on "
    "every rank, outside any `if rank == 0`"
)


@runtime_checkable
class Stateful(Protocol):
    """What has state to save: a scheduler, a GradScaler, a sampler, another module."""

    def state_dict(self) -> Any:
        """The state, as plain data."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Put it back."""
        ...


class _Parts(NamedTuple):
    """What is saved, in the order in which it is loaded: the synchroniser compares the parameters
    with those that it was saved with, so it comes last. Its ranks agree on each save and load.
    ``objects``: what else a front end has that has state, by name."""

    model: nn.Module
    optimizer: Optimizer
    sync: Synchronizer
    objects: dict[str, Stateful]
    front: SlowMoDistributedDataParallel | None

    def bind(self) -> None:
        """Tell a wrapped module its optimiser, if it has not seen it yet; every rank does."""
        if self.front is not None and self.front.synchronizer.driver.bound is None:
            self.front.bind(self.optimizer)


class _Counter:
    """Local steps since the last round, which a `DistOptimizer` counts by itself."""

    def __init__(self, front: DistOptimizer) -> None:
        self._front = front

    def state_dict(self) -> dict[str, int]:
        return {"counter": self._front.counter}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._front.counter = int(state_dict["counter"])


class _Outside:
    """Parameters of the optimiser that are in no module that is saved: float32 masters, say."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    def state_dict(self) -> dict[str, Tensor]:
        return {str(index): p.detach().clone() for index, p in enumerate(self._params)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        for index, p in enumerate(self._params):
            p.copy_(state_dict[str(index)])


def _parts(
    model: nn.Module, optimizer: Optimizer, sync: Synchronizer | DistOptimizer | None
) -> _Parts:
    """The one place that knows front ends: one that has a synchroniser, and saves it in its own
    ``state_dict()``, is replaced here by the plain module or optimiser in it and that
    synchroniser, so that no state is saved twice."""
    dist = sync if isinstance(sync, DistOptimizer) else None
    front: SlowMoDistributedDataParallel | None = None
    if isinstance(optimizer, CommOptimizer) and optimizer.dist_optimizer is not None:
        dist, optimizer = optimizer.dist_optimizer, optimizer.optimizer
    if dist is not None:
        dist.join()
        sync = dist.sync
    if isinstance(model, SlowMoDistributedDataParallel):
        front, model = model, model.module
        if sync is not None and sync is not front.synchronizer:
            raise ValueError("sync is not what follows the wrapped module")
        sync = front.synchronizer
    elif dist is None and (found := synchronizer_of(optimizer)) and not found.driver.hooked:
        raise ValueError("a front end follows this optimizer: pass it, as it has state of its own")
    attached = synchronizer_of(optimizer)
    if front is not None and front.synchronizer.driver.bound is None:
        check_free(optimizer)
        attached = front.synchronizer
    if attached is None:
        raise ValueError(
            "no synchroniser belongs to this optimizer: call laconic.attach first, or use "
            "torch.save where nothing is communicated"
        )
    if sync is not None and sync is not attached:
        raise ValueError("sync (or the wrapped module) is not what follows this optimizer")
    objects: dict[str, Stateful] = {}
    if dist is not None:
        objects[f"{_FRONT}counter"] = _Counter(dist)
    return _Parts(model, optimizer, attached, objects, front)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    sync: Synchronizer | DistOptimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Save a checkpoint in the directory ``path``, in place of the one that is there.

    Every rank must call it, after the same number of steps: each saves its own model, optimiser,
    synchroniser (``sync``; None: the one attached to ``optimizer``) with what is in flight, and
    random state: Python's, torch's on the CPU and on the current CUDA device if that is in use, and
    NumPy's global one if it is loaded. ``model`` may be a `SlowMoDistributedDataParallel`,
    ``optimizer`` a `CommOptimizer`, ``sync`` a `DistOptimizer`: what they count is saved, too.
    Parameters that the optimiser has beside the model's, as float32 masters, are as well.

    ``others``: by name, objects with ``state_dict()`` and
    ``load_state_dict()`` (a scheduler, a GradScaler), or plain data (numbers, strings, tensors,
    lists, dicts; ``generator.get_state()``), each rank's own. Gradients are not saved: call it
    between steps.

    However the call ends, on whichever ranks (a process killed, a full disk, power lost), the
    directory holds the checkpoint of before or the new one, whole. Needs room for both. Each path
    holds one checkpoint: use several to keep several.

    Raises `OSError` on every rank, naming those that could not write, and ``ValueError`` for what
    cannot be saved; the checkpoint of before then stays. Raises `laconic.LinkError` where not all
    ranks call it, as soon as the others come to another call of laconic's (a round, say).
    """
    parts = _parts(model, optimizer, sync)
    parts.bind()
    try:
        with parts.sync.gathering(SAVE) as gather:
            _save(
                Path(path).expanduser(),
                parts,
                dict(others or {}),
                _AllRanks(f"laconic.save to {path}", gather),
            )
    except LinkError as error:
        raise LinkError(f"{error}. {_EVERY_RANK}", ranks=error.ranks) from None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    sync: Synchronizer | DistOptimizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Put back what `save` saved in the directory ``path``; the run then goes on bit for bit.

    Every rank must call it, after `laconic.attach`, with a model and optimiser built as they were
    (for a wrapped module whose optimiser moves float32 masters, after its
    ``bind(optimizer, fp32_params)``).
    ``others``: the objects whose state was saved, by name. Returns what was saved of ``others``
    that is plain data (tensors on the CPU), and ``"step"``, the steps done. ``missing_ok``: where
    no rank finds a checkpoint, as in a run's first attempt, nothing is loaded, and the result is
    empty.

    A rank's file may lie in any rank's directory: ranks send each other the files that some of
    them cannot see. With another number of ranks or workers than saved it, or where files are lost
    (a host with its directory), every rank goes on from the consensus of the workers that are left:
    the model that ``sync.finish()`` would have left. One line of the log says so. Outer state is
    cut anew, and begins anew where it is lost; private state is averaged over the workers
    (`laconic.engine.regroup`). Rank r takes its own optimizer state and ``others``, and all that
    ``finish()`` does not average. If its file is lost, it takes those of a rank that is left (with
    a sharded model, one with the same part). A rank's random state goes on only where its file is
    there and the numbers of ranks and workers are the same, so that no two ranks draw alike.

    Raises ``ValueError`` (`OSError` for what cannot be read) on every rank where any of them cannot
    load its part; nothing has changed then. Needs room for a copy of the model's and the
    optimizer's state. Going on from a consensus needs room for three more of the model, for the
    state that all ranks saved, and on disk for the files that are sent. Files are read as plain
    data: no code in them is run.
    """
    parts = _parts(model, optimizer, sync)
    with parts.sync.gathering(LOAD) as gather:
        return _load(
            Path(path).expanduser(),
            parts,
            dict(others or {}),
            _AllRanks(f"laconic.load of {path}", gather),
            missing_ok,
        )


# -- what ranks do together ----


class _AllRanks:
    """The ranks in one call, who find out after each part of it how it went on all of them."""

    def __init__(self, call: str, gather: Callable[[Any], list[Any]]) -> None:
        self.call = call
        self._gather = gather

    def do(self, work: Callable[[], T]) -> T:
        """Run ``work``. Where it failed on any rank, one error for all: `OSError` if it was that
        wherever it failed, else ``ValueError``."""
        return self._do(work, lambda _: None)[0]

    def share(self, work: Callable[[], T]) -> list[T]:
        """As `do`; returns what ``work`` returned (anything that JSON holds) by rank."""
        return self._do(work, lambda result: result)[1]

    def refuse(self, text: str) -> ValueError:
        """What all ranks found out alike."""
        return ValueError(f"{self.call}: {text}")

    def _do(self, work: Callable[[], T], note: Callable[[T | None], Any]) -> tuple[T, list[Any]]:
        result: T | None = None
        caught: Exception | None = None
        try:
            result = work()
        except Exception as error:  # whatever it is: the other ranks would wait in vain
            caught = error
        problem = None if caught is None else [isinstance(caught, OSError), _one_line(caught)]
        said = self._gather([problem, note(result)])
        failed = [(rank, *problem) for rank, (problem, _) in enumerate(said) if problem]
        if failed:
            kind = OSError if all(system for _, system, _ in failed) else ValueError
            ranks: dict[str, list[int]] = {}
            for rank, _, text in failed:
                ranks.setdefault(text, []).append(rank)
            told = "; ".join(f"{_ranks(found)}: {text}" for text, found in ranks.items())
            raise kind(f"{self.call}: {told}") from caught
        return result, [shared for _, shared in said]  # type: ignore[return-value]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no more is known"
    if not isinstance(error, (OSError, ValueError)) or isinstance(error, UnicodeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ..."


# -- files ----


@dataclass(frozen=True)
class _Manifest:
    """Which save counts. ``token``: a random name of that save, which all its files bear."""

    serial: int
    token: str
    ranks: int
    workers: int
    step: int

    def file(self, folder: Path, rank: int) -> Path:
        return folder / f"rank-{rank}-of-{self.ranks}.{self.serial}-{self.token}.pt"

    def text(self) -> str:
        return json.dumps({"format": _FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in ``folder``, checked; None where there is none."""
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        said = json.loads(text)
        version = said["version"] if said["format"] == _FORMAT else None
        manifest = {field.name: said[field.name] for field in fields(_Manifest)} if version else {}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    if version != VERSION:
        raise ValueError(f"{MANIFEST} is not of version {VERSION} of laconic's checkpoints")
    numbers = [value for name, value in manifest.items() if name != "token"]
    if any(type(value) is not int or value < 0 for value in numbers) or 0 in numbers[1:3]:
        raise ValueError(f"{MANIFEST} is damaged: {manifest}")
    return manifest


def _serials(folder: Path) -> dict[str, int]:
    """The names of rank files, and of what ends of saves left of them, with their serials."""
    found = {name: _NAME.fullmatch(name) for name in os.listdir(folder)}
    return {name: int(match[1]) for name, match in found.items() if match is not None}


def _sync_folder(folder: Path) -> None:
    """Have what was renamed in ``folder`` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def _write(file: Path, payload: Mapping[str, Any]) -> None:
    """``payload`` as ``file``, on disk but for its name. Raises ``ValueError`` where it is not
    plain."""
    with file.open("wb") as opened:
        try:
            torch.save(payload, opened)
        except RuntimeError as error:  # torch's own, of what the file said
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from error
        opened.flush()
        os.fsync(opened.fileno())
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    if foreign:
        raise ValueError(
            f"the state holds {', '.join(sorted(foreign))}, which is no plain data: save numbers, "
            "strings, tensors, and lists and dicts of these"
        )


def _read(file: Path, manifest: _Manifest, rank: int, *, mapped: bool = False) -> dict[str, Any]:
    """What `_write` wrote for ``rank`` in the save of ``manifest``; ``mapped``: its tensors stay on
    disk until they are looked at."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # torch.load compares no checksums
        if damaged is not None:
            raise ValueError(f"{file.name} is damaged (at {damaged})")
        payload = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{file.name} is damaged or cut short: {_one_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file.name} holds more than plain data") from error
    if not isinstance(payload, dict) or payload.get("token") != manifest.token:
        raise ValueError(f"{file.name} is not of the save that {MANIFEST} names")
    if payload["rank"] != rank:
        raise ValueError(f"{file.name} is what rank {payload['rank']} saved")
    return payload


# -- saving ----


def _save(folder: Path, parts: _Parts, others: dict[str, Any], all_ranks: _AllRanks) -> None:
    rank = parts.sync.rank

    def prepare() -> tuple[int, str]:
        _check_names(others)
        _make_folder(folder)
        for left in folder.glob(f"{_RECEIVED}*"):  # by a load that was killed
            shutil.rmtree(left, ignore_errors=True)
        return max(_serials(folder).values(), default=0), secrets.token_hex(8)

    found = all_ranks.share(prepare)
    manifest = _Manifest(
        serial=max(newest for newest, _ in found) + 1,
        token=found[0][1],
        ranks=len(found),
        workers=parts.sync.workers,
        step=parts.sync.step,
    )
    own = manifest.file(folder, rank)
    prepared = own.with_suffix(".json")

    def write_files() -> None:
        _write(own, {"token": manifest.token, "rank": rank, **_state(parts, others)})
        with prepared.open("w") as opened:
            opened.write(manifest.text())
            opened.flush()
            os.fsync(opened.fileno())
        _sync_folder(folder)

    def commit() -> None:
        there = _read_manifest(folder) or {"serial": -1}
        if there["serial"] >= manifest.serial and there["token"] != manifest.token:
            raise ValueError("another run saves to this directory: give each one its own")
        os.replace(prepared, folder / MANIFEST)
        _sync_folder(folder)

    try:
        all_ranks.do(write_files)
    except (OSError, ValueError):  # known to all, so none commits; after a LinkError some may have
        _delete(folder, lambda name, s: s == manifest.serial and name.startswith(f"rank-{rank}-"))
        raise
    all_ranks.do(commit)
    _delete(folder, lambda _, serial: serial < manifest.serial)


def _delete(folder: Path, unwanted: Callable[[str, int], bool]) -> None:
    """Rank files that are ``unwanted``, by name and serial. What stays, the next save deletes."""
    with suppress(OSError):
        for name, serial in _serials(folder).items():
            if unwanted(name, serial):
                (folder / name).unlink(missing_ok=True)


def _check_names(others: Mapping[str, Any]) -> None:
    for name in others:
        if not isinstance(name, str) or name == "step" or name.startswith(_FRONT):
            raise ValueError(f"others: names must be strings other than 'step', not {name!r}")


def _state(parts: _Parts, others: Mapping[str, Any]) -> dict[str, Any]:
    """All that is this rank's, as plain data."""
    objects = _objects(parts, others)
    return {
        "random": _random_state(),
        "sync": parts.sync.state_dict(),
        "model": parts.model.state_dict(),
        "optimizer": _plain(parts.optimizer.state_dict()),
        "optimizer of": _optimizer_of(parts, objects),
        "objects": {name: _plain(value.state_dict()) for name, value in objects.items()},
        "plain": {name: _plain(v) for name, v in others.items() if name not in objects},
    }


def _objects(parts: _Parts, others: Mapping[str, Any]) -> dict[str, Stateful]:
    """What has state beside the model, the optimiser and the synchroniser, by name."""
    objects = {name: value for name, value in others.items() if isinstance(value, Stateful)}
    known = {id(p) for module in (parts.model, *objects.values()) for p in _parameters(module)}
    held = [p for group in parts.optimizer.param_groups for p in group["params"]]
    outside = [p for p in held if id(p) not in known]
    if outside:
        objects[f"{_FRONT}parameters outside the model"] = _Outside(outside)
    return {**objects, **parts.objects}


def _parameters(value: object) -> list[nn.Parameter]:
    return list(value.parameters()) if isinstance(value, nn.Module) else []


def _optimizer_of(parts: _Parts, objects: Mapping[str, Stateful]) -> list[Any]:
    """The optimiser's class and, by group, its parameters' names (None outside all modules)."""
    modules = {"": parts.model, **{k: m for k, m in objects.items() if isinstance(m, nn.Module)}}
    names = {
        id(p): f"{prefix}.{name}" if prefix else name
        for prefix, module in modules.items()
        for name, p in reversed(list(module.named_parameters()))
    }
    groups = [group["params"] for group in parts.optimizer.param_groups]
    return [type(parts.optimizer).__name__, [[names.get(id(p)) for p in group] for group in groups]]


def _plain(value: Any) -> Any:
    """``value`` with Python's numbers in place of NumPy's, which schedules leave in parameter
    groups, and which only code could put back."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value


# -- random state ----


def _random_state() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": None if numpy is None else _numpy_state(numpy.random.get_state(legacy=False)),
        **{name: k.random_state() if k.in_use() else None for name, k in ACCELERATORS.items()},
    }


def _numpy_state(state: dict[str, Any]) -> Any:
    inner = {k: v if isinstance(v, int) else v.tolist() for k, v in state["state"].items()}
    return _plain({**state, "state": inner})


def _check_random_state(saved: Mapping[str, Any]) -> None:
    """Raise where it is none; tried on generators of no importance."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.RandomState().set_state(saved["numpy"])
    for name, kind in ACCELERATORS.items():
        state = saved.get(name) if kind.count() else None
        if state is not None and state.shape != kind.random_state().shape:
            raise ValueError(
                f"the {name.upper()} generator's state is not one of this version of torch"
            )


def _put_random_state(saved: Mapping[str, Any]) -> None:
    """What there is no library or card for here, nothing here draws from."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.set_state(saved["numpy"])
    for name, kind in ACCELERATORS.items():
        if saved.get(name) is not None and kind.count():
            kind.set_random_state(saved[name])


def _numpy() -> Any:
    """NumPy, which the run may come to import only later; None where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


# -- loading ----


@dataclass(frozen=True)
class _Found:
    """What a rank read and checked, to be put back. ``others``: what all the ranks saved whose
    consensus the run goes on from, by rank; None where this rank's own goes on. ``random``: None if
    it is not to be put back."""

    targets: Sequence[tuple[Stateful, Any]]
    saved: dict[str, Any]
    others: dict[int, dict[str, Any]] | None
    random: Mapping[str, Any] | None


def _load(
    folder: Path,
    parts: _Parts,
    others: dict[str, Any],
    all_ranks: _AllRanks,
    missing_ok: bool,
) -> dict[str, Any]:
    manifests = all_ranks.share(lambda: _read_manifest(folder))
    if missing_ok and not any(manifests):
        return {}
    manifest = _newest(manifests, all_ranks)
    plan = _plan(folder, manifest, parts, all_ranks)
    with _received(folder, manifest, plan, parts.sync, all_ranks) as files:
        found = all_ranks.do(lambda: _find(files, manifest, plan, parts, others))
        parts.bind()
        undo: list[Callable[[], Any]] = []

        def put_back() -> None:
            before = [copy.deepcopy(target.state_dict()) for target, _ in found.targets]
            for (target, state), kept in zip(found.targets, before, strict=True):
                undo.append(partial(target.load_state_dict, kept))
                target.load_state_dict(state)

        try:
            all_ranks.do(put_back)
            if found.others is None:
                parts.sync.load_state_dict(found.saved["sync"])
            else:
                _load_consensus(parts, others, found)
        except (OSError, ValueError):
            for back in undo:
                with suppress(Exception):  # of what could not load: the first error is the one
                    back()
            raise
    if found.random is not None:
        _put_random_state(found.random)
    if plan.note and parts.sync.rank == 0:
        log.warning("%s", plan.note)
    return {**found.saved["plain"], "step": parts.sync.step}


@dataclass(frozen=True)
class _Plan:
    """What is loaded where. ``seen``: by rank, the ranks of the run that saved whose files it can
    see. ``left``: those whose files somebody can see. ``kept``: those of them whose consensus the
    run goes on from, if it does (``regroup``). ``shards``: in how many parts each worker has the
    model. ``inner``: ranks of a worker, if there were as many; else 1. ``note``: the line for the
    log."""

    seen: Sequence[Sequence[int]]
    left: Sequence[int]
    kept: Sequence[int]
    regroup: bool
    shards: int
    inner: int
    note: str = ""

    def own(self, rank: int) -> int:
        """The rank whose optimizer state and ``others`` go on as those of ``rank``."""
        if rank in self.left:
            return rank
        alike = [r for r in self.left if r % self.shards == rank % self.shards]
        worker = [r for r in alike if r // self.inner == rank // self.inner]
        choice = worker or alike
        return choice[rank // self.shards % len(choice)]

    def needed(self, rank: int) -> list[int]:
        """The ranks whose consensus ``rank`` works out: those with the same part of the model."""
        if not self.regroup:
            return [rank]
        return [r for r in self.kept if r % self.shards == rank % self.shards]


def _plan(folder: Path, manifest: _Manifest, parts: _Parts, all_ranks: _AllRanks) -> _Plan:
    """Alike on every rank. Raises where nothing is left to go on from."""
    every = range(manifest.ranks)
    seen = all_ranks.share(lambda: [r for r in every if manifest.file(folder, r).exists()])
    left = sorted({r for some in seen for r in some})
    lost = [r for r in every if r not in left]
    ranks, workers = len(seen), parts.sync.workers
    inner, former = ranks // workers, manifest.ranks // manifest.workers
    same = (manifest.ranks, manifest.workers) == (ranks, workers)
    shards = inner if parts.sync.sharded else 1
    saved = f"saved by {manifest.workers} workers ({_count(manifest.ranks, 'rank')})"
    files = f"; the files of {_ranks(lost)} are lost" if lost else ""
    if not left:
        raise all_ranks.refuse(f"{saved}{files}: there is nothing to go on from")
    if shards > 1 and former != shards:
        raise all_ranks.refuse(
            f"{saved} with {former} ranks each, and there are {inner} in each worker now: a "
            "sharded model needs as many"
        )
    if {r % shards for r in left} != set(range(shards)):
        raise all_ranks.refuse(
            f"{saved}{files}, and with them the last copy of a part of the model"
        )
    if same and not lost:
        return _Plan(seen, left, left, False, shards, inner)
    whole = [r for r in left if all(r // former * former + k in left for k in range(former))]
    kept = whole if shards > 1 and whole else left
    count = len({r // former for r in kept})
    note = (
        f"{all_ranks.call}: {saved}{files}. {_count(workers, 'worker')} "
        f"({_count(ranks, 'rank')}) continue after step {manifest.step} from the mean of "
        f"{_count(count, 'saved worker')}; outer state is redistributed, private state averaged"
    )
    return _Plan(seen, left, kept, True, shards, inner if same else 1, note)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@contextmanager
def _received(
    folder: Path, manifest: _Manifest, plan: _Plan, sync: Synchronizer, all_ranks: _AllRanks
) -> Iterator[Callable[[int], Path]]:
    """Yields where to find a rank's file, once the ranks have sent each other those that some need
    and cannot see."""
    wanted = {
        source
        for rank, seen in enumerate(plan.seen)
        for source in {*plan.needed(rank), plan.own(rank)} - {*seen}
    }
    own = plan.seen[sync.rank]
    with ExitStack() as made:

        def room() -> Path:
            """A folder for what this rank cannot see."""
            if wanted <= {*own}:
                return folder
            place = tempfile.TemporaryDirectory(dir=_made(folder), prefix=_RECEIVED)
            return Path(made.enter_context(place))

        there = all_ranks.do(room) if wanted else folder

        def find(rank: int) -> Path:
            return manifest.file(folder if rank in own else there, rank)

        for source in sorted(wanted):
            sender = next(r for r, seen in enumerate(plan.seen) if source in seen)
            _send(manifest.file(folder, source), sender, find(source), sync, all_ranks)
        yield find


def _made(folder: Path) -> Path:
    _make_folder(folder)
    return folder


def _send(file: Path, sender: int, target: Path, sync: Synchronizer, all_ranks: _AllRanks) -> None:
    """``file``, which ``sender`` can see, to ``target`` on every rank that cannot."""
    sends, gets = sync.rank == sender, target != file
    size = all_ranks.share(lambda: file.stat().st_size if sends else 0)[sender]
    with ExitStack() as opened:

        def open_files() -> tuple[BufferedReader | None, BufferedWriter | None]:
            source = opened.enter_context(file.open("rb")) if sends else None
            return source, opened.enter_context(target.open("wb")) if gets else None

        source, sink = all_ranks.do(open_files)
        for start in range(0, size, _PIECE):
            piece = bytearray(min(_PIECE, size - start))

            def read(piece: bytearray = piece) -> None:
                if source is not None and source.readinto(piece) != len(piece):
                    raise OSError(f"{file.name} became shorter while it was read")

            def write(piece: bytearray = piece) -> None:
                if sink is not None:
                    sink.write(piece)

            all_ranks.do(read)
            sync.share_bytes(torch.frombuffer(piece, dtype=torch.uint8), sender)
            all_ranks.do(write)


def _load_consensus(parts: _Parts, others: Mapping[str, Any], found: _Found) -> None:
    """Go on from the consensus of the ranks in ``found``; all else was put back before."""
    modules = _modules(parts, others)
    assert found.others is not None, "there is a consensus to go on from"
    saved = found.others

    def load(rank: int | None) -> None:
        state = found.saved if rank is None else saved[rank]
        for name, module in modules.items():
            module.load_state_dict(state["objects"][name] if name else state["model"])

    parts.sync.load_parts({rank: one["sync"] for rank, one in saved.items()}, load)
    if parts.front is not None:
        parts.front.copy_masters()


def _modules(parts: _Parts, others: Mapping[str, Any]) -> dict[str, Stateful]:
    """What holds the optimizer's parameters, by its name in ``objects``; the model's is empty."""
    objects = _objects(parts, others)
    held = {id(p) for group in parts.optimizer.param_groups for p in group["params"]}
    found = {
        name: value
        for name, value in objects.items()
        if isinstance(value, _Outside) or any(id(p) in held for p in _parameters(value))
    }
    return {"": parts.model, **found}


def _newest(found: Sequence[dict[str, Any] | None], all_ranks: _AllRanks) -> _Manifest:
    """The manifest that counts: ranks on hosts of their own may have been stopped between one
    host's and another's."""
    manifests = {rank: _Manifest(**said) for rank, said in enumerate(found) if said is not None}
    if not manifests:
        raise all_ranks.refuse(
            f"there is no {MANIFEST}, so no checkpoint of laconic.save, in that directory"
        )
    serial = max(manifest.serial for manifest in manifests.values())
    newest = {rank: m for rank, m in manifests.items() if m.serial == serial}
    first = min(newest)
    other = [rank for rank, manifest in newest.items() if manifest != newest[first]]
    if other:
        raise all_ranks.refuse(
            f"{_ranks(other)} see a checkpoint of another run than rank {first}: the directories "
            "must be those of one run"
        )
    return newest[first]


def _find(
    files: Callable[[int], Path],
    manifest: _Manifest,
    plan: _Plan,
    parts: _Parts,
    others: Mapping[str, Any],
) -> _Found:
    """Read what this rank needs and check it against what is here. Raises ``ValueError``."""
    rank = parts.sync.rank
    own = plan.own(rank)
    saved = _read(files(own), manifest, own)
    same = own == rank and (manifest.ranks, manifest.workers) == (
        len(plan.seen),
        parts.sync.workers,
    )
    random_state = saved["random"] if same else None
    if random_state is not None:
        _check_random_state(random_state)
    everyone = None
    if plan.regroup:
        everyone = {r: _read(files(r), manifest, r, mapped=True) for r in plan.needed(rank)}
    objects = _objects(parts, others)
    sharded = [p for p in _parameters(parts.model) if is_sharded(p)]
    for one in (saved, *(everyone or {}).values()):
        for key in ("model", "optimizer", "objects") if plan.regroup and sharded else ():
            one[key] = on_mesh_of(one[key], sharded[0])
        _check_fits(one, parts, objects)
    states = saved["objects"]
    targets: list[tuple[Stateful, Any]] = [(objects[name], states[name]) for name in objects]
    targets += [(parts.model, saved["model"]), (parts.optimizer, saved["optimizer"])]
    return _Found(targets, saved, everyone, random_state)


def _check_fits(saved: Mapping[str, Any], parts: _Parts, objects: Mapping[str, Stateful]) -> None:
    """Raise unless what a rank ``saved`` is of this model, optimizer and these objects."""
    states = saved["objects"]
    for name in sorted(objects.keys() ^ states.keys()):
        if name in states:
            raise ValueError(f"others lacks {name!r}, an object whose state was saved")
        raise ValueError(f"no state of others[{name!r}] was saved, but of {sorted(states)}")
    _check_model(parts.model, saved["model"])
    if saved["optimizer of"] != _optimizer_of(parts, objects):
        raise ValueError(
            "the optimizer is another one: its class, its groups or the parameters in them differ "
            f"({saved['optimizer of'][0]} was saved, this is {type(parts.optimizer).__name__})"
        )


def _check_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    here = model.state_dict()
    there_alone, here_alone = sorted(saved.keys() - here.keys()), sorted(here.keys() - saved.keys())
    if there_alone or here_alone:
        raise ValueError(
            f"the model is another one: the checkpoint alone has {_some(there_alone)}, this model "
            f"alone has {_some(here_alone)}"
        )
    for key, value in here.items():
        if isinstance(value, Tensor) and _kind(value) != _kind(saved[key]):
            raise ValueError(
                f"the model is another one: {key!r} is {_kind(saved[key])} in the checkpoint and "
                f"{_kind(value)} here"
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) or "nothing"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
