"""What the ranks of a race record: spans of time and bytes of rounds."""

from __future__ import annotations

import functools
import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import laconic
from laconic.lab.emulation.cluster import Cluster, NamespacesUnavailable, launch
from laconic.lab.race import timeline
from laconic.lab.race.result import Rounds, Span
from laconic.lab.race.timeline import (
    RecordedLink,
    Recorder,
    on_common_clock,
    progressions,
    subtract,
    transmissions,
)
from laconic.links import cost
from laconic.links.calls import GRADIENTS, Call
from laconic.links.simulated import current_link

from tests.lab.test_cluster import refusal

# -- pieces ----


def test_without_cuts_holes_out_of_intervals() -> None:
    assert subtract([(0, 10), (20, 30)], []) == [(0, 10), (20, 30)]
    assert subtract([(0, 10), (20, 30)], [(25, 27), (2, 3), (8, 22)]) == [
        (0, 2), (3, 8), (22, 25), (27, 30),
    ]  # fmt: skip
    assert subtract([(0, 10)], [(0, 4), (3, 10)]) == []
    assert subtract([(0, 10)], [(-5, 0), (10, 12)]) == [(0, 10)]


def test_rounds_that_follow_regularly_are_one() -> None:
    assert progressions({}) == []
    assert progressions({5: 8}) == [Rounds(5, 5, 0, 8)]
    assert progressions({1: 8, 2: 8, 3: 8, 10: 8, 20: 8}) == [
        Rounds(1, 3, 1, 8), Rounds(10, 20, 10, 8),
    ]  # fmt: skip
    sent = {step: 100 if step % 12 == 0 else 8 for step in range(3, 61, 3)}
    assert progressions(sent)[1] == Rounds(12, 60, 12, 100)
    assert sent == {s: r.bytes for r in progressions(sent) for s in r.steps()}


def test_spans_of_ranks_are_put_on_one_clock_without_its_pauses() -> None:
    ran = [[(100.0, 101.0), (105.0, 106.0)], [(100.1, 102.0), (104.0, 107.0)]]
    spans: list[list[Span]] = [
        [(100.0, 101.0, "compute"), (105.0, 106.0, "wait")],
        [(101.5, 103.0, "send"), (104.0, 107.0, "compute")],
    ]
    assert on_common_clock(ran, spans) == (
        ((0.0, 1.0, "compute"), (3.0, 4.0, "wait")),
        ((1.5, 2.0, "send"), (2.0, 5.0, "compute")),
    )
    assert on_common_clock([[], []], [[], []]) == ((), ())


def test_a_pause_between_data_is_seen_however_slow_the_network() -> None:
    assert transmissions(0.0, []) == []
    fast = [0.004 * k for k in range(1, 6)]
    assert transmissions(0.0, fast) == [(0.0, 0.02)]
    later = [1 + at for at in fast]
    first, second = transmissions(0.0, [*fast, *later])
    assert first == (0.0, 0.02)
    assert second == pytest.approx((1.0, 1.02))
    slow = [0.2 * k for k in range(1, 6)]
    assert transmissions(0.0, slow) == [(0.0, 1.0)]


# -- the recorder ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that is set by hand."""
    now = [0.0]
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])
    yield now


def test_computing_is_what_is_neither_waiting_nor_paused(clock: list[float]) -> None:
    recorder = Recorder()
    recorder.add_wait(-2.0, -1.0)  # before the start
    recorder.resume()
    clock[0] = 4.0
    recorder.add_wait(1.0, 2.0)
    with recorder.sending(7, cost.mean(1000, 4)):
        clock[0] = 6.0
    recorder.add_wait(6.0, 6.00001)  # too short to be seen
    recorder.pause()
    with recorder.sending(None, cost.mean(1000, 4)):
        clock[0] = 9.0
    recorder.resume()
    clock[0] = 10.0
    recorder.pause()
    assert recorder.spans() == [
        (0.0, 1.0, "compute"), (1.0, 2.0, "wait"), (2.0, 6.0, "compute"), (4.0, 6.0, "send"),
        (9.0, 10.0, "compute"),
    ]  # fmt: skip
    assert recorder.rounds() == [Rounds(7, 7, 0, 1500)]


def test_a_long_run_keeps_its_beginning_and_its_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 3)
    recorder = Recorder()
    recorder.resume()
    for second in range(100):
        recorder.add_wait(second, second + 0.5)
    clock[0] = 100.0
    recorder.pause()
    spans = recorder.spans()
    waits = [start for start, _, kind in spans if kind == "wait"]
    assert waits == [0, 1, 2, 97, 98, 99]
    computed = [(start, end) for start, end, kind in spans if kind == "compute"]
    # what lies between the kept waits is not taken for computing
    assert computed == [(0.5, 1), (1.5, 2), (97.5, 98), (98.5, 99), (99.5, 100)]


# -- the link ----


def train(
    recipe: laconic.algorithms.round.Recipe, steps: int, rank: int
) -> tuple[dict[int, int], int, float, float]:
    """Bytes by step as recorded, the ledger's, and waiting as recorded and as booked."""
    link = current_link.get()
    assert link is not None
    recorder = Recorder()
    waits: list[float] = []
    torch.manual_seed(0)
    model = nn.Linear(30, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = laconic.attach(model, optimizer, recipe, link=RecordedLink(link, recorder))
    sync.observe_waiting(lambda start, end: waits.append(end - start))
    before = sync.stats()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 30) + rank).square().mean().backward()
        optimizer.step()
    after = sync.stats()
    sent = {step: r.bytes for r in recorder.rounds() for step in r.steps()}
    booked = after.seconds_waiting - before.seconds_waiting
    return sent, after.bytes_sent - before.bytes_sent, sum(waits), booked


MODEL = 4 * -(-217 // 3) * 3  # bytes, padded for three workers
MEAN = 2 * 2 * MODEL // 3  # reduce-scatter and all-gather, to two others each


@pytest.mark.parametrize(
    ("recipe", "steps", "payload"),
    [
        (laconic.ddp(), list(range(1, 13)), MEAN),
        (laconic.local_sgd(4), [4, 8, 12], MEAN),
        (laconic.slowmo(laconic.local_sgd(3), period=6), [3, 6, 9, 12], MEAN),
        (laconic.local_sgd(5, delay=2), [5, 10], MEAN),
        (laconic.easgd(4), [4, 8, 12], MEAN),
        (laconic.sgp(), list(range(1, 13)), MODEL + 8),  # to one other, with the push weight
        (laconic.d_psgd(), list(range(1, 13)), 2 * MODEL),
    ],
)
def test_bytes_are_booked_to_the_round_that_sends_them(
    recipe: laconic.algorithms.round.Recipe, steps: list[int], payload: int
) -> None:
    for sent, ledger, recorded, booked in laconic.simulate(
        functools.partial(train, recipe, 12), workers=3
    ):
        assert list(sent) == steps
        first_step = 8 * 2 + cost.gather(24, 3).bytes  # its call, and the ranks' fingerprints
        assert ledger - sum(sent.values()) == first_step
        assert set(sent.values()) == {payload}
        assert recorded == pytest.approx(booked)


def test_announcements_that_take_messages_belong_to_their_round() -> None:
    recorder = Recorder()
    spoken = SimpleNamespace(size=3, begin_call=lambda call, wait: True)
    link = RecordedLink(spoken, recorder)  # type: ignore[arg-type]
    for name, wait in (("average", False), (GRADIENTS, False), ("mean()", True)):
        assert link.begin_call(Call(4, name), wait=wait)
    each = cost.gather(8, 3).bytes
    assert recorder.rounds() == [Rounds(4, 5, 1, each)]  # gradients: before their step; no call's


# -- on hosts ----


def seconds_of(rank: Sequence[Span], kind: str) -> float:
    return sum(end - start for start, end, which in rank if which == kind)


PROGRAM = """
import json, os, torch
from datetime import timedelta
from laconic import init
from laconic.lab.race.timeline import Recorder, RecordedLink
from laconic.links import cost, world_link

init()
recorder = Recorder("eth0")
link = RecordedLink(world_link(torch.device("cpu"), timedelta(seconds=60)), recorder)
x = torch.ones(600_000)
link.mean(x)
recorder.resume()
for _ in range(4):
    link.mean(x)
recorder.pause()
link.gather(torch.zeros(1))
print(json.dumps(recorder.spans()), flush=True)
os._exit(0)
"""


def test_a_slowed_host_is_seen() -> None:
    """Its data leave all the time; those of the others have left, and they wait for it."""
    if refusal() is not None:
        with pytest.raises(NamespacesUnavailable):  # nor are there cards to be looked at
            Cluster(3)
        return
    with Cluster(3, bandwidth=200e6, host_bandwidth={1: 40e6}) as cluster:
        job = launch(cluster, [sys.executable, "-c", PROGRAM])
        assert [outcome.exit_code for outcome in job.wait(timeout=200)] == [0, 0, 0]
        ranks = [json.loads(job.stdout(rank)) for rank in range(3)]
    sent = 4 * cost.mean(4 * 600_000, 3).bytes * 8  # bits
    sending = [seconds_of(spans, "send") for spans in ranks]
    for rank, seconds in enumerate(sending):
        assert seconds > 0.6 * sent / (40e6 if rank == 1 else 200e6)
        assert rank == 1 or seconds < 0.6 * sending[1]  # a fifth, on an idle machine


def test_a_card_that_is_still_looking_while_its_sights_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = timeline.InterfaceMonitor("none")
    card._seen = [1.0, 2.0]

    def last_look(gaps: Sequence[float]) -> float:
        card._seen.append(3.0)
        return 1.0

    monkeypatch.setattr(timeline, "median", last_look)
    assert card.stop(0.0) == [(0.0, 2.0)]


def test_data_is_seen_to_leave_through_a_card() -> None:
    card = timeline.InterfaceMonitor("lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            start = time.perf_counter()
            card.start()
            while time.perf_counter() < start + 0.3:
                sender.sendall(bytes(50_000))
                receiver.recv(50_000, socket.MSG_WAITALL)
            found = card.stop(start)
    assert found[0][0] >= start and found[-1][1] <= time.perf_counter()
    assert sum(end - begin for begin, end in found) > 0
