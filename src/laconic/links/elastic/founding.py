"""How the workers of an elastic run find each other at its start."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence

from laconic.errors import LinkError
from laconic.links import health
from laconic.links.elastic.registry import SAY_SECONDS, Registry
from laconic.links.elastic.view import Member, View

log = logging.getLogger("laconic")

LOOK_SECONDS = 0.05
"""How long a worker that starts waits before it looks again."""
SETTLE = 1.0
"""Seconds without another worker after which the first view is proposed."""
UNCLEAR_SECONDS = 60.0
"""After so long, workers that cannot be reached count as ended."""


class RestoredError(Exception):
    """A run that is older than this worker goes on with the coordinator: begin again."""


def alive(members: Sequence[Member], secret: bytes, me: str = "") -> list[Member]:
    """Those of ``members`` whose beacons answer, ``me`` included."""
    others = [m for m in members if m.id != me]
    answers = health.ask_all([m.beacon for m in others], secret)
    living = {m.id for m, a in zip(others, answers, strict=True) if not a.lost}
    return [m for m in members if m.id == me or m.id in living]


class _Before:
    """Whether the run that a coordinator knows of has ended. If none of its workers answers, its
    hosts may be down, or only out of reach from here."""

    def __init__(self) -> None:
        self.unclear = False
        self._since = 0.0
        self._over = 0
        """The epoch of a run that has ended."""

    def is_alive(self, view: View, secret: bytes) -> bool:
        """Whether a member of ``view`` answers."""
        if view.epoch == self._over:
            return False
        answers = health.ask_all([m.beacon for m in view.members], secret)
        now = time.monotonic()
        self._since = self._since or now
        if all(a == health.GONE for a in answers) or now - self._since >= UNCLEAR_SECONDS:
            self._over = view.epoch
        alive = not all(answer.lost for answer in answers)
        self.unclear = not alive and view.epoch != self._over
        return alive


def agreed(registry: Registry, secret: bytes, about: str) -> str:
    """What the job is about: ``about``, unless a run of the job that has not ended is about
    something else."""
    registry.program = hashlib.sha256(about.encode()).hexdigest()[:16]
    said, latest = registry.about(about), registry.latest()
    if said == about or latest is None:
        return said
    answers = health.ask_all([m.beacon for m in latest.members], secret)
    over = all(answer == health.GONE for answer in answers)
    return registry.about(about, instead_of=said) if over else said


def found(
    registry: Registry, me: Member, secret: bytes, *, need: int, expected: int | None, wait: float
) -> tuple[View, bool]:
    """Wait for the first view of a run of at least ``need`` workers, at most ``wait`` seconds. No
    more are waited for once ``expected`` have come. Returns that view; or the present view of a run
    under way, and True. Raises `RestoredError` if such a run has just told the coordinator."""
    end, number = time.monotonic() + wait, registry.enter(me)
    at = f"{registry.host}:{registry.port}"
    known: dict[int, Member] = {}
    changed, before = time.monotonic(), _Before()
    say = changed + SAY_SECONDS
    while True:
        if registry.secret() != secret:
            raise RestoredError
        latest = registry.latest()
        if latest is not None and latest.place(me.id) is not None:
            return latest, False
        new = registry.entered(known)
        if new:
            known.update(new)
            changed = time.monotonic()
        if latest is not None and before.is_alive(latest, secret):
            if registry.strangers & set(latest.ids):
                registry.put_back()
                raise LinkError(
                    f"another program has begun a run under this job at {at} just now: give this "
                    "one another job="
                )
            return latest, True
        living = alive(list(known.values()), secret, me.id)
        first = min((n for n, m in known.items() if m in living), default=number)
        now = time.monotonic()
        settled = now - changed >= SETTLE or expected == len(living)
        if before.unclear and now >= end:
            raise LinkError(
                f"the workers of the run at {at} cannot be reached from here: do their addresses "
                "and ports open?"
            )
        elif first == number and len(living) >= need and settled and not before.unclear:
            members = tuple(m for _, m in sorted(known.items()) if m in living)
            epoch = 1 if latest is None else latest.epoch + 1
            gone = [m.id for m in known.values() if m not in living]
            registry.propose(View(epoch, members, "the run begins"), gone)
        elif now >= end:
            raise LinkError(
                f"{len(living)} of {need} workers have come to the coordinator at {at} within "
                f"{wait:g} s: start more workers, or lower workers= or min_workers="
            )
        else:
            if now >= say:
                log.warning(
                    "%d of %d workers have come to the coordinator at %s; waiting for more, up to "
                    "%.0f s", len(living), expected or need, at, end - now,
                )  # fmt: skip
                say = end
            time.sleep(LOOK_SECONDS)
