"""One coordinator at a round trip of 80 ms, with TLS: workers that join after many earlier ones,
and many at once. The coordinator is a real one, alone on its host. The workers are light: each
holds a lease, renews it as a worker that trains does, hears of views, and does not train.

    python -m tests.elastic.test_many_workers 10000
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.chaos.__main__ import turn_tls_on
from benchmarks.chaos.network import within

from laconic.lab.emulation.cluster import Cluster, Network, job_environment
from laconic.links.addresses import Address
from laconic.links.elastic.client import Client, CoordinatorError
from laconic.links.elastic.coordinator import PORT
from laconic.links.elastic.leases import GONE, Beat, Need
from laconic.links.elastic.view import Member, View, new_id

from tests.lab.test_lab import with_namespaces
from tests.support import job_keys

pytestmark = pytest.mark.hosts

FEW, MANY, JOINS, IDLE_SECONDS, RENEW = 4, 64, 9, 20.0, 0.5
AT, BESIDE = 0, 1
"""The hosts: the coordinator's, and that of the workers."""


class Light:
    """A worker. ``ids``: those of the latest view that it has heard of, at the time ``at``. It
    connects from the host that this thread is on."""

    def __init__(self, host: str) -> None:
        self.id, self.begun, self.at, self.ids = new_id(), time.monotonic(), 0.0, list[str]()
        member, need = Member(self.id, *[str(Address(host, 1))] * 2), Need(FEW, FEW, 1)
        self.reports: dict[str, tuple[str, str]] = {}
        self.client = Client(host, PORT, "light", member, "{}", need)
        self.client.connect(None)
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        with contextlib.suppress(CoordinatorError):  # it is closed at the end
            while True:
                said = self.client.receive(60.0)
                if "view" in said:
                    self.at, self.ids = time.monotonic(), View.unpack(said["view"]).ids

    def say(self, **more: object) -> None:
        said: Any = {"founding": not self.ids, "note": str(time.monotonic()), **more}
        with contextlib.suppress(CoordinatorError):
            self.client.beat(Beat(reports=self.reports, **said))


class Workers:
    """Those of a run. The first one takes newcomers in."""

    def __init__(self, cluster: Cluster) -> None:
        self.host, self.all = cluster.addresses[AT], list[Light]()
        with within(cluster.entry(BESIDE).net):
            self.all += [Light(self.host) for _ in range(FEW - 1)]
        with within(cluster.entry(AT).net):
            self.local = Light(self.host)
        self.all.append(self.local)
        threading.Thread(target=self._renew, daemon=True).start()
        until(lambda: all(worker.ids for worker in self.all))

    def _renew(self) -> None:
        while self.all:
            for worker in list(self.all):
                worker.say()
            time.sleep(RENEW)

    def join(self, door: Light) -> Light:
        """A newcomer from this thread's host, which ``door`` takes in."""
        new = Light(self.host)
        door.say(ready=[new.id])
        until(lambda: new.id in new.ids)
        return new

    def leave(self, worker: Light, door: Light) -> None:
        worker.say(leaving=True)
        until(lambda: worker.id not in door.ids)
        worker.client.close()

    def seconds_of_a_join(self) -> float:
        """The median of some."""
        seconds = []
        for _ in range(JOINS):
            new = self.join(self.all[0])
            seconds.append(new.at - new.begun)
            self.leave(new, self.all[0])
        return statistics.median(seconds)

    def seconds_until_all_know(self, since: float, id: str, present: bool) -> float:
        """Whether ``id`` is a member."""
        until(lambda: all((id in worker.ids) == present for worker in self.all))
        return max(worker.at for worker in self.all) - since

    def close(self) -> None:
        gone, self.all = self.all, []
        for worker in gone:
            worker.client.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.001)


@contextlib.contextmanager
def coordinated() -> Iterator[tuple[Cluster, Callable[[], float]]]:
    """Two hosts, one with a coordinator; and how long that has computed."""
    with Cluster(Network(2, None, 0.08)) as cluster:
        at = f"{cluster.addresses[AT]}:{PORT}"
        command = [sys.executable, "-m", "laconic", "coordinator", "--address", at]
        process = psutil.Process(cluster.start(AT, command, env=job_environment(cluster, {})).pid)
        with within(cluster.entry(AT).net):
            until(lambda: Path("/proc/thread-self/net/tcp").read_text().count("\n") > 1)
        every = process.children(recursive=True)
        yield cluster, lambda: sum(sum(each.cpu_times()[:2]) for each in every)


def measure(earlier: int) -> dict[str, float]:
    """So many workers come and go. Returns a join's seconds before and after that, and with 64
    workers the coordinator's share of a core, and how long all need to hear of a change."""
    with coordinated() as (cluster, used), contextlib.closing(Workers(cluster)) as workers:
        with within(cluster.entry(BESIDE).net):
            before = workers.seconds_of_a_join()
        with within(cluster.entry(AT).net):
            for _ in range(earlier):
                workers.leave(workers.join(workers.local), workers.local)
        with within(cluster.entry(BESIDE).net):
            after = workers.seconds_of_a_join()
            while len(workers.all) < MANY:
                workers.all.append(workers.join(workers.local))
            begun = used()
            time.sleep(IDLE_SECONDS)
            share = (used() - begun) / IDLE_SECONDS
            lost, closed = workers.all.pop(), time.monotonic()
            lost.client.close()
            workers.all[0].reports[lost.id] = GONE, "nobody listens there"
            workers.all[0].say()
            left = workers.seconds_until_all_know(closed, lost.id, False)
            new = workers.join(workers.all[0])
            joined = workers.seconds_until_all_know(new.begun, new.id, True)
            new.client.close()
    return {"before": before, "after": after, "share": share, "left": left, "joined": joined}


@pytest.mark.slow
@with_namespaces
def test_a_coordinator_serves_64_workers_and_forgets_those_that_have_left(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    job_keys.turn_on(monkeypatch, jobs.one)
    found = measure(earlier=500)
    assert found["after"] < 1.2 * found["before"], found
    assert found["share"] < 0.05 and found["left"] < 2.0 and found["joined"] < 2.0, found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        turn_tls_on(Path(folder))
        print(measure(int(sys.argv[1])))
