"""Checks of a run by the files that its workers have written: times, and bits."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

END = 2**62
"""In the place of the step: after `finish`."""


@dataclass
class Outcome:
    """What one fault has done. ``struck``: whether it happened, since a phase may not come.
    ``worst``: the longest step of a survivor, and ``bound``: the longest that is allowed.
    ``hit``: the workers that it has stopped or cut off. ``hung``: whether the run did not recover.
    ``evicted``: healthy workers that were."""

    kind: str
    phase: str
    text: str
    at_step: int = 0
    begin: float = 0.0
    struck: bool = True
    worst: float = 0.0
    bound: float = 0.0
    hit: set[int] = field(default_factory=set)
    recovered: float = 0.0
    identical: bool = True
    hung: bool = False
    evicted: int = 0
    lost: str = ""


def _slow(folder: Path, number: int) -> list[list[float]]:
    """When the worker's slow steps began, and how long they took."""
    path = folder / f"slow-{number}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[float(word) for word in line.split()] for line in lines]


def times(folder: Path, numbers: Sequence[int], outcomes: Sequence[Outcome]) -> list[str]:
    """Measure the worst step of each fault. Returns what is wrong."""
    slow = {number: _slow(folder, number) for number in numbers}
    ends = [*(out.begin for out in outcomes[1:]), float("inf")]
    wrong = []
    for out, next_fault in zip(outcomes, ends, strict=False):
        for number in set(numbers) - out.hit:
            for begin, seconds in slow[number] if out.begin else ():
                # what lies before the fault, or after the next, is not its doing
                end = min(begin + seconds, next_fault or float("inf"))
                out.worst = max(out.worst, end - max(begin, out.begin))
        if out.struck and out.worst > out.bound:
            wrong.append(f"{out.text}: a step took {out.worst:.1f} s of at most {out.bound:.1f} s")
    return wrong


def bits(
    folder: Path, numbers: Sequence[int], finished: Collection[int], outcomes: Sequence[Outcome]
) -> list[str]:
    """Compare the workers' digests of their models. Returns what is wrong."""
    found: dict[int, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number in numbers:
        path = folder / f"digests-{number}"
        data = path.read_bytes() if path.exists() else b""
        records = list(struct.iter_unpack("q8s", data[: len(data) // 16 * 16]))
        if number not in finished:
            records = records[:-1]  # what a lost worker did last need not be what others did
        for step, digest in records:
            found[step][digest].append(number)
    wrong = []
    different = sorted(step for step, digests in found.items() if len(digests) > 1)
    for step in different:
        before = [out for out in outcomes if out.at_step <= step]
        for out in before[-1:]:
            out.identical = False
    if different:
        first = "the end" if different[0] == END else f"step {different[0]}"
        groups = list(found[different[0]].values())
        wrong.append(f"after {first}, models differ: {groups} ({len(different)} steps)")
    return wrong
