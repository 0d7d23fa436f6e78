"""The journal of a search: an Optuna journal in a file, usable however the process ends."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

NAME = "laconic tune"
"""Name of the study in a journal, which identifies the journal as ours."""
SETTINGS = "settings"
"""Attribute of the study: what is tuned, and how."""
COMPUTE = "compute"
"""Attribute of the study: compute seconds of a step, measured at the start of the search."""


class _NoLock(JournalFileOpenLock):
    """A lock without effect: the process holds the whole journal, see `open_journal`."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any]) -> Iterator[optuna.Study]:
    """Open the study in the journal at ``path``, or create it.

    An incomplete last record is dropped. A trial that was running does not count, and its setting
    may be chosen again.

    Raises ``ValueError``, without changing the file, if it is not a journal of ours, if it has
    other ``settings``, or if another process is using it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is tuning with {path}: wait until it ends") from None
        length = _check(path)
        file.truncate(length)
        yield _study(path, settings)


def _check(path: Path) -> int:
    """Return the bytes of the complete lines in a journal of ours. The file may be empty."""
    text = path.read_bytes()
    length = text.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in text[:length].splitlines()]
        ours = all(isinstance(line, dict) and "op_code" in line for line in lines)
        ours = ours and (lines[0]["study_name"] == NAME if lines else _is_truncated(text))
    except (ValueError, KeyError):
        ours = False
    if not ours:
        raise ValueError(f"{path} is not a journal of laconic tune: choose another --out")
    return length


def _is_truncated(text: bytes) -> bool:
    """Return whether ``text``, without a line end, may be an incomplete first record."""
    return not text or text.startswith(b'{"op_code":0,')


def _study(path: Path, settings: Mapping[str, Any]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(
        JournalFileBackend(str(path), lock_obj=_NoLock(str(path)))
    )
    exists = bool(storage.get_all_studies())
    make = optuna.load_study if exists else optuna.create_study  # creating again adds a record
    study = make(storage=storage, study_name=NAME)
    wanted = json.loads(json.dumps(settings))
    saved = study.user_attrs.get(SETTINGS, {})
    if not study.get_trials(deepcopy=False):  # without trials, the settings may still change
        if saved != wanted:
            study.set_user_attr(SETTINGS, wanted)
            study.set_user_attr(COMPUTE, None)
    elif saved != wanted:
        names = (n for n in {**saved, **wanted} if saved.get(n) != wanted.get(n))
        name = next(names)
        raise ValueError(
            f"{path} was made with {name} {saved.get(name)}, not {wanted.get(name)}: give "
            "the same options to resume, or choose another --out"
        )
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study
