"""Load a checkpoint: plan, receive files, check them, then load; undo it if any rank fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.manifest import Manifest, newest, read_manifest
from laconic.checkpoints.plan import Plan, make_plan, send_missing
from laconic.checkpoints.random_state import load_random_state, random_state
from laconic.checkpoints.rank_file import read_rank_file
from laconic.checkpoints.training_state import TrainingState, parameters
from laconic.engine.saved_state import Stateful
from laconic.sampler import ElasticSampler
from laconic.tensors import is_sharded, on_mesh_of

log = logging.getLogger("laconic")


def load(
    folder: Path, training: TrainingState, all_ranks: AllRanks, missing_ok: bool
) -> dict[str, Any]:
    """Load the checkpoint in ``folder`` into ``training``; every rank calls it. Returns the user's
    plain data and the step, and puts dicts and lists among it into those of ``training``, too."""
    missing: Any = None if missing_ok else False
    manifests = all_ranks.share(lambda: vars(m) if (m := read_manifest(folder)) else missing)
    if all(m is None for m in manifests):
        return {}
    manifest = newest([Manifest(**m) if m else None for m in manifests], all_ranks)
    sync = training.sync
    plan = make_plan(folder, manifest, sync, all_ranks)
    send_missing(folder, manifest, plan, sync, all_ranks)
    checked = all_ranks.do(lambda: _read(folder, manifest, plan, training))
    training.bind()
    undo: list[Callable[[], Any]] = []

    def load_objects() -> None:
        before = [copy.deepcopy(target.state_dict()) for target, _ in checked.states]
        for (target, state), previous in zip(checked.states, before, strict=True):
            undo.append(partial(target.load_state_dict, previous))
            target.load_state_dict(state)
        if checked.random is not None:
            undo.append(partial(load_random_state, random_state()))
            load_random_state(checked.random)

    try:
        all_ranks.do(load_objects)
        # last, since it compares the parameters with those that it was saved with
        if checked.averaged:
            _load_consensus(training, checked.saved, checked.averaged)
        else:
            sync.load_state_dict(checked.saved["sync"])
    except (OSError, ValueError):
        for restore in undo:
            with suppress(Exception):  # the first error is the one to raise
                restore()
        raise
    _deal_again(training, checked, all_ranks)
    if plan.note and sync.rank == 0:
        log.warning("%s", plan.note)
    plain = checked.saved["plain"]
    for name, own in training.others.items():
        if isinstance(own, dict) and isinstance(plain.get(name), dict):
            own.clear()
            own.update(plain[name])
        elif isinstance(own, list) and isinstance(plain.get(name), list):
            own[:] = plain[name]
    return {**plain, "step": sync.step}


@dataclass(frozen=True)
class _Checked:
    """What a rank has read and checked. ``states``: each object's state. ``saved``: the file that
    they are from. ``averaged``: by rank, the files whose consensus the run goes on from, if any.
    ``random``: the random state, or None."""

    states: Sequence[tuple[Stateful, Any]]
    saved: dict[str, Any]
    averaged: dict[int, dict[str, Any]]
    random: Mapping[str, Any] | None


def _read(folder: Path, manifest: Manifest, plan: Plan, training: TrainingState) -> _Checked:
    """Read the files that this rank needs, and check them against the run's objects."""
    rank, workers = training.sync.rank, training.sync.workers
    source = plan.source(rank)
    saved = read_rank_file(folder, manifest, source)
    chosen = plan.models(rank) if plan.averaged else []
    averaged = {r: read_rank_file(folder, manifest, r, mapped=True) for r in chosen}
    sharded = [p for p in parameters(training.model) if is_sharded(p)]
    for file in (saved, *averaged.values()):
        for key in ("model", "optimizer", "objects") if averaged and sharded else ():
            file[key] = on_mesh_of(file[key], sharded[0])
        training.check(file)
    states: list[tuple[Stateful, Any]] = [
        (value, saved["objects"][name]) for name, value in training.objects().items()
    ]
    states += [(training.model, saved["model"]), (training.optimizer, saved["optimizer"])]
    same = (manifest.ranks, manifest.workers) == (len(plan.visible), workers)
    random = saved["random"] if same and source == rank else None  # else two could draw alike
    return _Checked(states, saved, averaged, random)


def _deal_again(training: TrainingState, checked: _Checked, all_ranks: AllRanks) -> None:
    """Deal what remains of the samples to the present workers."""
    samplers = {k: s for k, s in training.others.items() if isinstance(s, ElasticSampler)}
    if not samplers:
        return
    files = [checked.saved, *checked.averaged.values()]

    def drawn() -> dict[str, list[list[int]]]:
        states = {name: [file["objects"][name] for file in files] for name in samplers}
        return {k: [[s["worker"], s["drawn"]] for s in saved] for k, saved in states.items()}

    known = all_ranks.share(drawn)
    counts = {}
    for name, sampler in samplers.items():
        saved = dict.fromkeys(range(sampler.state_dict()["workers"]), 0)  # lost: drawn again
        counts[name] = saved | {w: count for each in known for w, count in each[name]}
    training.sync.deal_again({name: list(each.values()) for name, each in counts.items()})


def _load_consensus(
    training: TrainingState, saved: Mapping[str, Any], averaged: Mapping[int, Mapping[str, Any]]
) -> None:
    """Go on from the consensus of the ranks in ``averaged``; all other state is ``saved``."""
    holders = training.holders()

    def load_model(rank: int | None) -> None:
        state = saved if rank is None else averaged[rank]
        training.model.load_state_dict(state["model"])
        for name, holder in holders.items():
            holder.load_state_dict(state["objects"][name])

    parts = [file["sync"] for _, file in sorted(averaged.items())]
    training.sync.driver.load(parts, load_model)
    if training.front is not None:
        training.front.copy_masters()
