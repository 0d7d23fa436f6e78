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
"""Name of the study in a journal."""
BEGIN = b'{"op_code":0,'
"""What a journal of Optuna begins with."""
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

    Raises ``ValueError``, without changing the file, if it is not a journal, if it has other
    ``settings``, or if another process is using it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is tuning with {path}: wait until it ends") from None
        text = path.read_bytes()
        if not BEGIN.startswith(text[: len(BEGIN)]):
            raise ValueError(f"{path} is not a journal of laconic tune: choose another --out")
        file.truncate(text.rfind(b"\n") + 1)
        yield _study(path, settings)


def _study(path: Path, settings: Mapping[str, Any]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = JournalFileBackend(str(path), lock_obj=_NoLock(str(path)))
    storage = optuna.storages.JournalStorage(backend)
    exists = bool(storage.get_all_studies())
    make = optuna.load_study if exists else optuna.create_study  # creating again adds a record
    study = make(storage=storage, study_name=NAME)
    wanted = json.loads(json.dumps(settings))
    saved = study.user_attrs.get(SETTINGS, {})
    if saved != wanted:
        if study.get_trials(deepcopy=False):  # without trials, the settings may still change
            name = next(n for n in {**saved, **wanted} if saved.get(n) != wanted.get(n))
            raise ValueError(
                f"{path} was made with {name} {saved.get(name)}, not {wanted.get(name)}: give "
                "the same options to resume, or choose another --out"
            )
        study.set_user_attr(SETTINGS, wanted)
        study.set_user_attr(COMPUTE, None)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study
