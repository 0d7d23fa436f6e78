"""Strangers call all processes of an elastic run while it trains, and while a worker joins."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from laconic.links import connect, health
from laconic.links.addresses import Address
from laconic.links.elastic import relay
from laconic.links.elastic.registry import Registry
from laconic.links.elastic.view import View

from tests.support import job_keys
from tests.support import strangers as s
from tests.support.elastic_runs import MANY, Run
from tests.support.strangers import RAW, Attack, Stranger, Usage


def members_of(run: Run) -> View:
    registry = Registry(run.address, "default")
    view = registry.latest()
    registry.close(time.monotonic() + 5)
    assert view is not None
    return view


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_run_goes_on(
    encrypted: bool, monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """No process holds more afterward, each reason is in its log once, a worker joins among
    strangers, and all hold the same model."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    contexts = s.contexts_of(jobs) if encrypted else {}
    who = (RAW, RAW, "one", "none", "expired") if encrypted else (RAW,)
    with Run("laconic.local_sgd(2)", count=2, steps=MANY) as run:
        ids = [worker.wait_for("ready")["id"] for worker in run.workers]
        pids = [worker.process.pid for worker in run.workers]
        members = {m.id: m for m in members_of(run).members}
        genuine = [s.recorded(bytes(32), p, bytes(8), 1) for p in (health.PURPOSE, relay.PURPOSE)]
        genuine += [s.recorded(bytes(32), connect.PURPOSE, bytes(8), 1), s.client_hello()]
        visits: list[Callable[[Stranger], None]] = []
        attacks = []
        for id in ids:
            for text in (members[id].beacon, members[id].service, members[id].mesh):
                attacks.append(Attack(Address.parse(text).port, contexts))
                visits.append(attacks[-1].visit)
            # nobody accepts connections there before the next view
            at_mesh = visits.pop()
            visits.append(lambda each, at=at_mesh: at(each._replace(end="reset", certificate=RAW)))
        strategy, count = s.strangers(genuine, who), 0

        def visit(stranger: Stranger) -> None:
            nonlocal count
            count += 1
            visits[count % len(visits)](stranger)

        s.drawn(strategy, 100, visit)
        before = [Usage.of(pid) for pid in pids]
        s.drawn(strategy, 600, visit)
        for each in attacks:
            each.close()
        for pid, usage in zip(pids, before, strict=True):
            s.nothing_is_left(usage, pid, mebibytes=8)
        s.drawn(strategy, 100, visit)
        newcomer = run.add()
        newcomer.wait_for("ready")
        digests = run.digests()
        statuses = [worker.end() for worker in run.workers]
    assert statuses == [0] * 3 and len(set(digests)) == 1
    for each in attacks:
        each.close()
    for worker in run.workers[:2]:
        said = worker.errors.replace("WARNING:laconic:", "").splitlines()
        refused = [line for line in said if line.startswith("refused")]
        assert "Traceback" not in worker.errors and "Error" not in worker.errors
        s.check_lines(refused, "does not speak TLS" if encrypted else "not a hello of laconic")
