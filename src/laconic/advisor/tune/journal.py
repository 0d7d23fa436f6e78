"""The journal of a tuning: Optuna's, on a file that survives whatever ends the process."""

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
"""What the study in a journal is called, by which it is known as ours."""
SETTINGS = "settings"
"""The study's attribute that says what is tuned, and how."""
COMPUTE = "compute"
"""The attribute with the seconds that a step computes, as measured when the tuning began."""


class _Held(JournalFileOpenLock):
    """No lock: the process has the whole journal, see `opened`."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def opened(path: Path, settings: Mapping[str, Any]) -> Iterator[optuna.Study]:
    """The study in the journal at ``path``, made if there is none. A record that was cut off is
    dropped, and a trial that was under way counts for nothing: its setting will be chosen again.

    Raises ``ValueError``, and leaves the file as it is, for one that is no journal of ours, for one
    with other ``settings``, and while another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is tuning with {path}: wait for its end") from None
        whole = _check(path)
        file.truncate(whole)
        yield _study(path, settings)


def _check(path: Path) -> int:
    """Bytes of the whole lines in a journal of ours, or in an empty file."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    try:
        lines = [json.loads(line) for line in text[:whole].splitlines()]
        ours = all(isinstance(line, dict) and "op_code" in line for line in lines)
        ours = ours and (lines[0]["study_name"] == NAME if lines else _is_cut(text))
    except (ValueError, KeyError):
        ours = False
    if not ours:
        raise ValueError(f"{path} is no journal of laconic tune: choose another --out")
    return whole


def _is_cut(text: bytes) -> bool:
    """Whether ``text``, without the end of a line, is the beginning of a journal: its first record
    may have been cut off."""
    return not text or text.startswith(b'{"op_code":0,')


def _study(path: Path, settings: Mapping[str, Any]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(
        JournalFileBackend(str(path), lock_obj=_Held(str(path)))
    )
    begun = bool(storage.get_all_studies())
    make = optuna.load_study if begun else optuna.create_study  # to make it again adds a record
    study = make(storage=storage, study_name=NAME)
    wanted = json.loads(json.dumps(settings))
    found = study.user_attrs.get(SETTINGS, {})
    if not study.get_trials(deepcopy=False):  # nothing is lost: what was wrong may be put right
        if found != wanted:
            study.set_user_attr(SETTINGS, wanted)
            study.set_user_attr(COMPUTE, None)
    elif found != wanted:
        names = (n for n in {**found, **wanted} if found.get(n) != wanted.get(n))
        name = next(names)
        raise ValueError(
            f"{path} holds a tuning with {name} {found.get(name)}, not {wanted.get(name)}: give "
            "the same options to go on, or choose another --out"
        )
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study
