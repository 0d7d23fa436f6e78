"""Samples are dealt to the workers of each view, whatever the history of views."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from laconic import ElasticSampler
from laconic.engine.reports import Heard, Reports


class Worker:
    """One worker, without a network: what it has drawn, and what others have heard of it."""

    def __init__(self, samples: int, lost: str) -> None:
        self.sampler = ElasticSampler(samples, seed=3, epochs=1, lost=lost)
        self.reports = Reports({"data": self.sampler})
        self.reports.heard = {}
        self.drawn: list[int] = []
        """Since the last deal."""
        self.all: list[int] = []
        self.step = 0
        self.iterator = iter(self.sampler)
        self.rounds: list[list[bool]] = []
        """Whether each one is complete."""

    def draw(self, count: int) -> None:
        for _ in range(count):
            sample = next(self.iterator, None)
            if sample is not None:
                self.drawn.append(sample)
                self.all.append(sample)
        self.step += 1

    def finish_step(self, *, began: bool, idle: bool) -> None:
        round = [False]
        self.rounds += [round] * began
        for each in self.rounds if idle else ():
            each[0] = True
        self.reports.after_step((lambda: round[0]) if began else None)


def meet(view: list[tuple[str, Worker]], interrupted: set[str]) -> None:
    """The members of a view exchange reports; some are interrupted before they have all."""
    texts = {id: json.dumps(worker.reports.report()) for id, worker in view}
    reports = {id: json.loads(text) for id, text in texts.items()}
    for id, worker in view:
        if id not in interrupted:
            worker.reports.hear(reports, id)
            worker.drawn = []


@pytest.mark.parametrize("lost", ["again", "counted"])
@pytest.mark.parametrize("seed", range(12))
def test_every_sample_once_under_any_history_of_views(seed: int, lost: str) -> None:
    chance = random.Random(seed)
    samples = chance.randrange(200, 400)
    view = [(f"w{i}", Worker(samples, lost)) for i in range(3)]
    count, gone = 3, list[tuple[Worker, int]]()
    meet(view, set())
    steps_lost = 0
    for _ in range(30):
        for _, worker in view:
            worker.draw(chance.randrange(3))
            worker.finish_step(began=chance.random() < 0.5, idle=chance.random() < 0.7)
        for id, worker in view:  # signs of life
            for other, teller in view:
                if other != id and chance.random() < 0.3:
                    worker.reports.heard = {**worker.reports.heard, other: teller.reports.note()}
        if chance.random() < 0.4:
            if len(view) > 1 and chance.random() < 0.6:
                id, worker = view.pop(chance.randrange(len(view)))
                notes = [w.reports.heard.get(id) for _, w in view]
                heard = [h for h in (Heard.unpack(n, 1) for n in notes if n) if h is not None]
                now = Heard.unpack(worker.reports.note(), 1)
                assert now is not None
                last = max((h for h in heard if h.deal == now.deal), default=None)
                known = (0, 0) if last is None else last.drawn[0]
                best = max(heard, default=None)
                steps_lost += 0 if best is None else best.step - best.sent
                kept = known[0] if lost == "counted" else known[1]
                gone.append((worker, len(worker.drawn) - kept))
            else:
                view.append((f"w{count}", Worker(samples, lost)))
                count += 1
            if chance.random() < 0.3:  # some do not hear the end, and a second view follows
                meet(view, {id for id, _ in view if chance.random() < 0.5})
            meet(view, set())
    while any(len(worker.sampler) for _, worker in view):
        for _, worker in view:
            worker.draw(1)
    read = Counter(s for _, worker in view for s in worker.all)
    for worker, unheard in gone:
        read.update(worker.all[: len(worker.all) - unheard])
    assert read == dict.fromkeys(range(samples), 1)
    stats = view[0][1].reports
    assert stats.workers_lost == len(gone) and stats.steps_lost == steps_lost
    states = [worker.sampler.state_dict() for _, worker in view]
    shared = [{k: s[k] for k in ("gaps", "frontier", "workers", "samples_lost")} for s in states]
    assert all(state == shared[0] for state in shared)
    if lost == "again":
        assert shared[0]["samples_lost"] == 0


def test_what_a_round_sends_counts_once_it_is_complete() -> None:
    """And not what was drawn since it was begun."""
    worker = Worker(100, "again")
    meet([("a", worker)], set())

    def known() -> tuple[int, int, tuple[int, int]]:
        heard = Heard.unpack(worker.reports.note(), 1)
        assert heard is not None
        return heard.step, heard.sent, heard.drawn[0]

    found = []
    for began, idle in ((True, False), (True, False), (False, True), (False, True), (True, True)):
        worker.draw(3)
        worker.finish_step(began=began, idle=idle)
        found.append(known())
    assert found == [
        (1, 0, (3, 0)),
        (2, 0, (6, 0)),
        (3, 2, (9, 6)),
        (4, 2, (12, 6)),
        (5, 5, (15, 15)),
    ]
