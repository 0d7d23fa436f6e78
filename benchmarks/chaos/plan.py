"""Which faults come when: a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORKERS = 4
FAULTS_PER_RUN = 15
ON_HOSTS = 3
"""One run of so many is on hosts of its own, where cables are cut."""
EMBEDDED = 5
"""One run of so many has no coordinator but the one that a worker serves."""
SAVES = 5
"""One run of so many calls `laconic.save`, each 40 steps."""

EQUAL = {
    # recipe: period of the steps after which all models are equal, and until when every step is one
    "laconic.ddp()": (1, 0),
    "laconic.ddp(codec='int4')": (1, 0),
    "laconic.local_sgd(4)": (4, 0),
    "laconic.post_local_sgd(300, 4)": (4, 300),
    "laconic.slowmo(laconic.local_sgd(3), period=6)": (3, 0),
    "laconic.diloco(8)": (8, 0),
}
DELAYED = "local_sgd(4, delay=2, codec='int8')", "diloco(8, delay=3)", "streaming_diloco(8)"
GOSSIP = "sgp()", "sgp(delay=1)", "d_psgd()"
QUORUM = "diloco(8, quorum=3, grace=0.05)", "diloco(8, quorum=2, pace='own', codec='int8')"
OTHERS = *DELAYED, *GOSSIP, "easgd(3)", "auto()", *QUORUM
RECIPES = *EQUAL, *(f"laconic.{name}" for name in OTHERS)
CODED = "int4", "int8", "streaming_diloco"

PHASES_OF = {
    "newcomer": ["replay", "replay", "connect", "compare"],
    "donor": ["state", "feed", "feed", "feed"],
    "leaving": ["leave", "complete"],
}
ONCE = "connect", "compare", "save", "state", "leave"
"""Phases that come seldom: faults are at their first end."""

# of all faults: how often these kinds come; what follows "and" happens to another worker
OFTEN = "kill in phase", "kill", "kill and kill", "kill donor", "kill in phase and kill", "term"
USUAL = "short stop", "long stop", "coordinator", "term in phase", "stop in phase", "kill newcomer"
USUAL += "kill and coordinator", "kill all but one", "term all but one", "mass join"
RARE = "stop donor", "stop newcomer", "kill and short stop", "kill and long stop", "term and kill"
RARE += "long stop and long stop", "kill while leaving", "long stop and coordinator", "late beats"
RARE += "lost beats", "long lost beats", "late beats and kill", "lost beats and kill"
KINDS = dict.fromkeys(OFTEN, 7) | dict.fromkeys(USUAL, 4) | dict.fromkeys(RARE, 2)
ISOLATED = "cut", "one-way out", "one-way in", "one-way pair"
HOST_KINDS = {f"{length} {how}": 6 for how in ISOLATED for length in ("short", "long")}
HOST_KINDS |= dict.fromkeys(("long one-way peers", "kill", "coordinator"), 4)
HOST_KINDS |= dict.fromkeys(("long cut and kill", "long cut and coordinator"), 3)
HOST_KINDS |= dict.fromkeys(("short half", "long half", "short refused", "whole cut"), 3)
EMBEDDED_KINDS = dict.fromkeys(("kill", "term", "short stop", "kill and kill", "mass join"), 4)
"""Where a worker serves the coordinator's address: if it is hit, another one does. If more than
half were lost with it, the others would wait for 90 s."""


@dataclass(frozen=True)
class Fault:
    """``after`` steps after all have recovered from the one before. ``target`` and ``other``:
    places among the living workers. ``phase``, ``entry``: at that entry of the phase.
    ``seconds``: how long what is short lasts, and how long a coordinator is down. ``pause``:
    seconds between two faults at once, and before a replacement is started."""

    kind: str
    after: int
    target: int
    other: int
    phase: str
    entry: int
    seconds: float
    pause: float


@dataclass(frozen=True)
class Plan:
    """One run."""

    number: int
    recipe: str
    hosts: bool
    embedded: bool
    min_workers: int | None
    save: int
    faults: tuple[Fault, ...]

    def equal(self, step: int) -> bool:
        """Whether the recipe makes all models equal after ``step``."""
        period, every = EQUAL.get(self.recipe, (0, 0))
        return step < every or bool(period and step % period == 0)

    @property
    def title(self) -> str:
        """In one line."""
        where = "hosts" if self.hosts else "local"
        inside = ", no coordinator apart" if self.embedded else ""
        return f"run {self.number}, {self.recipe}, {where}{inside}, min_workers={self.min_workers}"


def phases_of(recipe: str, save: bool) -> list[str]:
    """The phases that a worker comes to in every run of ``recipe``."""
    phases = ["backward", "inner step", "send", "complete"]
    phases += ["save"] * save
    name = recipe.removeprefix("laconic.")
    phases += ["encode", "decode"] * any(c in recipe for c in CODED)
    if name != "auto()":  # which phases there are beyond these depends on its choices
        phases += ["reduce"] * (name not in GOSSIP)
        phases += ["outer step"] * (not name.startswith("ddp"))
    return phases


def _fault(kind: str, rng: random.Random, phases: Sequence[str]) -> Fault:
    target = rng.randrange(WORKERS)
    other = (target + rng.randrange(1, WORKERS)) % WORKERS
    if "in phase" in kind:
        phase = rng.choice(["connect", "compare", *phases] if "and" in kind else phases)
    else:
        phase = rng.choice(PHASES_OF.get(kind.split()[-1], [""]))
    return Fault(
        *(kind, rng.randint(3, 60), target, other, phase),
        entry=1 if phase in ONCE else rng.randint(1, 8),
        seconds=round(rng.uniform(0.2, 3.0), 2),
        pause=rng.choice([0.0, 0.0, 0.02, 0.1, 0.5]),
    )


def plan(seed: int, faults: int, only: Sequence[str], recipe: str | None) -> list[Plan]:
    """All runs: as many as give ``faults`` faults. ``only``: of these kinds; ``recipe``: under this
    one, instead of each in turn."""
    runs: list[Plan] = []
    for number, left in enumerate(range(faults, 0, -FAULTS_PER_RUN)):
        rng = random.Random(f"{seed}/{number}")
        name = recipe or RECIPES[number % len(RECIPES)]
        save = 40 if rng.randrange(SAVES) == 0 and "quorum" not in name else 0
        embedded = number % EMBEDDED == EMBEDDED - 1 and not only
        hosts = number % ON_HOSTS == ON_HOSTS - 1 if not only else not set(only) & set(KINDS)
        kinds = EMBEDDED_KINDS if embedded else HOST_KINDS if hosts else KINDS
        kinds = {k: n for k, n in (KINDS | HOST_KINDS).items() if k in only} if only else kinds
        drawn = rng.choices([*kinds], [*kinds.values()], k=min(left, FAULTS_PER_RUN))
        each = tuple(_fault(kind, rng, phases_of(name, bool(save))) for kind in drawn)
        least = rng.choice([1, 1, 2, None])
        runs.append(Plan(number, name, hosts, embedded, least, save, each))
    return runs
