"""Which faults come when: a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORKERS = 4
FAULTS_PER_RUN = 15
ON_HOSTS = 3
"""One run of so many is on hosts of its own, where cables are cut."""
SAVES = 5
"""One run of so many calls `laconic.save`, each 40 steps."""

RECIPES = {
    # recipe: period of the steps after which all models are equal, and until when every step is one
    "laconic.ddp()": (1, 0),
    "laconic.ddp(codec='int4')": (1, 0),
    "laconic.local_sgd(4)": (4, 0),
    "laconic.local_sgd(4, delay=2, codec='int8')": (0, 0),
    "laconic.post_local_sgd(300, 4)": (4, 300),
    "laconic.slowmo(laconic.local_sgd(3), period=6)": (3, 0),
    "laconic.diloco(8)": (8, 0),
    "laconic.diloco(8, delay=3)": (0, 0),
    "laconic.streaming_diloco(8)": (0, 0),
    "laconic.sparse_loco(6)": (6, 0),
    "laconic.easgd(3)": (0, 0),
    "laconic.sgp()": (0, 0),
    "laconic.sgp(delay=1)": (0, 0),
    "laconic.d_psgd()": (0, 0),
    "laconic.noloco(4)": (0, 0),
    "laconic.auto()": (0, 0),
}

GOSSIP = ("sgp", "d_psgd", "noloco")
CODED = ("int4", "int8", "streaming_diloco", "sparse_loco")
NO_OUTER_STEP = ("ddp",)

KINDS = {
    # kind: how often, of all faults
    "kill": 14,
    "term": 6,
    "short stop": 6,
    "long stop": 5,
    "coordinator": 4,
    "kill in phase": 22,
    "term in phase": 4,
    "stop in phase": 4,
    "kill newcomer": 5,
    "kill donor": 6,
    "stop donor": 1,
    "stop newcomer": 1,
    "kill two": 6,
    "kill, then kill in phase": 6,
    "kill and coordinator": 4,
    "kill and short stop": 3,
    "kill and long stop": 2,
    "two long stops": 1,
    "term and kill": 2,
    "kill while leaving": 2,
    "long stop and coordinator": 1,
}
ON_HOSTS_KINDS = {
    "short cut": 8,
    "long cut": 8,
    "short one-way out": 5,
    "long one-way out": 6,
    "short one-way in": 5,
    "long one-way in": 6,
    "short one-way pair": 6,
    "long one-way pair": 8,
    "long one-way peers": 5,
    "long cut and kill": 3,
    "long cut and coordinator": 3,
    "kill": 4,
    "coordinator": 2,
}


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

    def __str__(self) -> str:
        parts = [f"{self.kind}: worker {self.target}"]
        if "two" in self.kind or "and" in self.kind or "pair" in self.kind or "," in self.kind:
            parts.append(f"other {self.other}")
        if self.phase:
            parts.append(f"{self.phase} entry {self.entry}")
        return f"{', '.join(parts)}, after {self.after} steps, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Plan:
    """One run."""

    number: int
    seed: int
    recipe: str
    hosts: bool
    min_workers: int | None
    save: int
    faults: tuple[Fault, ...]

    def equal(self, step: int) -> bool:
        """Whether the recipe makes all models equal after ``step``."""
        period, every = RECIPES.get(self.recipe, (0, 0))
        return step < every or bool(period and step % period == 0)

    @property
    def title(self) -> str:
        """In one line."""
        least = "majority" if self.min_workers is None else f"min_workers={self.min_workers}"
        where = "hosts" if self.hosts else "local"
        saves = ", saves" if self.save else ""
        return f"run {self.number}, {self.recipe}, {where}, {least}{saves}"


def phases_of(recipe: str, save: bool) -> list[str]:
    """The phases that a worker comes to in every run of ``recipe``."""
    name = recipe.removeprefix("laconic.").partition("(")[0]
    if name == "auto":  # which phases there are beyond these depends on its choices
        return ["backward", "inner step", "send", "complete", *(["save"] if save else [])]
    phases = ["backward", "inner step", "send", "complete"]
    coded = any(c in recipe for c in CODED)
    if coded:
        phases += ["encode", "decode"]
    if name not in GOSSIP:
        phases.append("reduce")
    if name not in NO_OUTER_STEP:
        phases.append("outer step")
    if save:
        phases.append("save")
    return phases


def make(
    number: int, seed: int, recipe: str, count: int, only: Sequence[str], *, hosts: bool
) -> Plan:
    """The plan of run ``number``. ``only``: faults of these kinds, if any is named."""
    rng = random.Random(f"{seed}/{number}/{recipe}")
    least = rng.choice([1, 2, 2, None])
    save = 40 if rng.randrange(SAVES) == 0 else 0
    kinds = ON_HOSTS_KINDS if hosts else KINDS
    kinds = {k: w for k, w in kinds.items() if not only or k in only}
    if not kinds:
        where = "on hosts" if hosts else "local"
        raise ValueError(f"no such kind {where}")
    phases = phases_of(recipe, bool(save))
    faults = []
    for kind in rng.choices(list(kinds), list(kinds.values()), k=count):
        faults.append(_fault(kind, rng, phases))
    return Plan(number, seed, recipe, hosts, least, save, tuple(faults))


def _fault(kind: str, rng: random.Random, phases: Sequence[str]) -> Fault:
    target = rng.randrange(WORKERS)
    other = (target + rng.randrange(1, WORKERS)) % WORKERS
    phase, entry = "", rng.randint(1, 12)
    if "in phase" in kind:
        phase = rng.choice(phases if "," not in kind else ["connect", "compare", *phases])
        entry = 1 if phase in ("connect", "compare", "save") else entry
    elif kind.endswith("newcomer"):
        phase = rng.choice(["replay", "replay", "connect", "compare"])
        entry = rng.randint(1, 4) if phase == "replay" else 1
    elif kind.endswith("donor"):
        phase = rng.choice(["state", "feed", "feed", "feed"])
        entry = 1 if phase == "state" else rng.randint(1, 6)
    elif kind == "kill while leaving":
        phase, entry = "leave", 1
    return Fault(
        *(kind, rng.randint(3, 60), target, other, phase, entry),
        seconds=round(rng.uniform(0.2, 3.0), 2),
        pause=rng.choice([0.0, 0.0, 0.02, 0.1, 0.5]),
    )


def plan(
    seed: int,
    recipes: Sequence[str],
    faults: int,
    *,
    may_have_hosts: bool,
    kinds: Sequence[str] | None = None,
) -> list[Plan]:
    """All runs: as many as give ``faults`` faults. ``kinds``: of these kinds only."""
    runs: list[Plan] = []
    left = faults
    while left > 0:
        number = len(runs)
        hosts = may_have_hosts and number % ON_HOSTS == ON_HOSTS - 1
        if kinds:
            hosts = may_have_hosts and not set(kinds) & set(KINDS)
        recipe = recipes[number % len(recipes)]
        if len(recipes) % ON_HOSTS == 0:  # else the same recipes would always be on hosts
            recipe = recipes[(number + number // len(recipes)) % len(recipes)]
        runs.append(make(number, seed, recipe, min(left, FAULTS_PER_RUN), kinds or (), hosts=hosts))
        left -= FAULTS_PER_RUN
    return runs
