"""What the workers of an elastic run tell each other: with every sign of life, and at every view.

From that all compute the same: which samples each of them draws from now on, and what was lost with
the workers that are gone.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from laconic.sampler import ElasticSampler, Recorded


class Heard(NamedTuple):
    """How far a worker is. ``deal``: counts the deals of samples. ``step``: optimizer steps that it
    has computed; ``sent``: those that others have received. ``drawn``: of each sampler, what was
    drawn in this deal, and what of it others have received."""

    deal: int
    step: int
    sent: int
    drawn: tuple[tuple[int, int], ...]

    @classmethod
    def unpack(cls, text: str, samplers: int) -> Heard | None:
        """From any text; None if it is not that of a run with so many ``samplers``."""
        try:
            match json.loads(text):
                case [int(deal), int(step), int(sent), [*drawn]] if len(drawn) == samplers:
                    pairs = tuple((max(int(d), int(c), 0), max(int(c), 0)) for d, c in drawn)
                    return cls(deal, step, sent, pairs)
        except (TypeError, ValueError, RecursionError):
            pass
        return None


class _Sending(NamedTuple):
    """What a round under way sends: the ``step`` after which it began, and what was ``drawn`` of
    each sampler until then. ``complete()``: whether others have received it."""

    step: int
    drawn: list[int]
    complete: Callable[[], bool]


class Reports:
    """Those of this worker, and what follows from those of all. ``samplers``: the same on all
    workers, by name."""

    def __init__(self, samplers: Mapping[str, ElasticSampler]) -> None:
        self._names = sorted(samplers)
        self._samplers = [samplers[name] for name in self._names]
        self._lock = threading.Lock()
        self._deal, self._ids = 0, list[str]()
        self._received = [0] * len(self._samplers)
        """How many samples of this deal, of each sampler, others have received."""
        self._step = self._sent = 0
        self._sending: deque[_Sending] = deque()
        """What rounds under way send, oldest first."""
        self.workers_lost = self.steps_lost = 0
        """Over the whole run: workers that are gone, and those of their steps that no other worker
        has received, as far as they were heard of."""
        self.heard: Mapping[str, str] = {}
        """What this worker has heard of others, by id."""
        self.record: Callable[[dict[str, Any]], None] = lambda event: None
        """Told of each deal (`laconic.Trace`)."""

    # -- this worker ----

    def note(self) -> str:
        """How far this worker is, to be sent with signs of life."""
        with self._lock:
            return self._own()

    def _own(self) -> str:
        drawn = zip(self._drawn(), self._received, strict=True)
        return json.dumps(Heard(self._deal, self._step, self._sent, tuple(drawn)))

    def _drawn(self) -> list[int]:
        return [sampler.drawn for sampler in self._samplers]

    def after_step(self, complete: Callable[[], bool] | None) -> None:
        """A step was computed. ``complete``: whether the round that was begun after it is complete,
        now or later; None if none was."""
        with self._lock:
            self._step += 1
            if complete is not None:
                self._send(complete)
            self._receive()

    def finish(self, *, mean: bool) -> None:
        """All rounds that were begun are complete: this worker leaves by itself, or
        `Synchronizer.finish` is complete. With ``mean``, all steps are in the consensus."""
        with self._lock:
            if mean:
                self._send(lambda: True)
            self._receive(everything=True)

    def _send(self, complete: Callable[[], bool]) -> None:
        self._sending.append(_Sending(self._step, self._drawn(), complete))

    def _receive(self, *, everything: bool = False) -> None:
        """Record what others have received: of ``everything`` that rounds send, or of those that
        are complete."""
        while self._sending and (everything or self._sending[0].complete()):
            oldest = self._sending.popleft()
            self._sent, self._received = oldest.step, oldest.drawn

    def release(self) -> None:
        """No deal will come: the run has failed here."""
        for sampler in self._samplers:
            sampler.release()

    def deal_again(self, drawn: Mapping[str, Sequence[int]], ids: Sequence[str], me: str) -> None:
        """The samplers have loaded states of workers that had ``drawn`` so many, by the sampler's
        name. Deal the rest to the workers ``ids``."""
        with self._lock:
            self._begin_deal(self._deal + 1, ids)
            for name, sampler in zip(self._names, self._samplers, strict=True):
                if name in drawn:
                    sampler.deal(drawn[name], self._ids.index(me), len(self._ids))

    def _begin_deal(self, deal: int, ids: Iterable[str]) -> None:
        self._deal, self._ids = deal, list(ids)
        self._received = [0] * len(self._samplers)
        self._sending.clear()

    def follow(self, events: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Repeat the deals that a run has recorded."""
        for event in events:
            for sampler, values in zip(self._samplers, event, strict=True):
                sampler.follow([Recorded(*values)])

    # -- all workers ----

    def report(self) -> dict[str, Any]:
        """This worker's report for a new view. Nothing is drawn until `hear`."""
        for sampler in self._samplers:
            sampler.freeze()
        with self._lock:
            return {
                "ids": self._ids,
                "own": self._own(),
                "deals": [sampler.state_dict() for sampler in self._samplers],
                "heard": {id: self.heard[id] for id in self._ids if id in self.heard},
                "lost": [self.workers_lost, self.steps_lost],
            }

    def hear(self, reports: Mapping[str, Mapping[str, Any]], me: str) -> None:
        """Deal the samples to the workers with these ``reports``, by id in the order of their
        view. The latest deal counts before: others may not know of it."""
        known = {id: Heard(*json.loads(report["own"])) for id, report in reports.items()}
        deal = max(heard.deal for heard in known.values())
        base = next(reports[id] for id, heard in known.items() if heard.deal == deal)
        gone = [id for id in base["ids"] if id not in reports]
        last = {id: self._last(id, deal, reports) for id in gone}
        deals = list[Recorded]()
        with self._lock:
            self.workers_lost, self.steps_lost = base["lost"]
            self.workers_lost += len(gone)
            self.steps_lost += sum(max(h.step - h.sent, 0) for h in last.values())
            self._begin_deal(deal + 1, reports)
            for index, sampler in enumerate(self._samplers):
                state = base["deals"][index]
                counts = [0] * state["workers"]
                for id in gone:  # what others have received
                    counts[base["ids"].index(id)] = last[id].drawn[index][1]
                for id, heard in known.items():
                    if heard.deal == deal:  # else it has drawn nothing of this deal
                        own = reports[id]["deals"][index]
                        counts[own["worker"]] = own["drawn"]
                place = self._ids.index(me), len(reports)
                deals.append(Recorded(sampler.drawn, state, counts, *place))
                sampler.load_state_dict(state)
                sampler.deal(*deals[-1][2:])
        if deals:
            self.record({"deals": deals})

    def _last(self, id: str, deal: int, reports: Mapping[str, Mapping[str, Any]]) -> Heard:
        """What any worker has heard last of ``id``."""
        texts = [report["heard"].get(id, "") for report in reports.values()]
        found = [Heard.unpack(text, len(self._samplers)) for text in texts]
        nothing = ((0, 0),) * len(self._samplers)
        best = max((h for h in found if h is not None), default=Heard(deal, 0, 0, nothing))
        return best if best.deal == deal else best._replace(drawn=nothing)
