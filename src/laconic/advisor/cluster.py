"""Measure on emulated hosts, for `laconic advise --workload`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from laconic.advisor.worker import Spec
from laconic.lab.emulation.cluster import Cluster, Loopback, emulate, launch
from laconic.lab.race.runner import Settings

SECONDS = 300.0
"""A measurement that takes longer has failed."""
TIMEOUT = 60.0
"""Seconds after which a rank that does not answer is an error on the others."""


def check(settings: Settings) -> None:
    """Raise ``ValueError`` for settings that would fail later. Starts nothing."""
    if settings.network.hosts == 1:
        raise ValueError("one worker cannot communicate: give --workers 2 or more")
    settings.check()


def advise_on_hosts(
    settings: Settings, recipes: Sequence[str], steps: int, form: str
) -> tuple[str, str | None]:
    """Measure the workload of ``settings`` on its hosts, with ``recipes`` in addition to the
    advisor's and ``steps`` per timing. Return the advice as text, see `show.text`, and if hosts
    could not be emulated, the reason."""
    network = settings.network
    spec = Spec(
        workload=settings.workload,
        data=settings.data,
        recipes=list(recipes),
        steps=steps,
        seed=settings.seeds[0],
        timeout=TIMEOUT,
        paces=[settings.slow_hosts.get(host, 1.0) for host in range(network.hosts)],
        form=form,
    )
    with emulate(network) as (cluster, reason):
        if not cluster.emulated:  # ranks share their host's throttled link
            spec = replace(
                spec,
                bandwidths=[rate / settings.per_host for rate in network.each("bandwidth")],
                latencies=network.each("latency"),
            )
        argv = ["-m", "laconic.advisor.worker", spec.to_json()]
        line = output_lines(cluster, argv, settings.per_host)[-1]
        return json.loads(line)["advice"], reason


def output_lines(
    cluster: Cluster | Loopback, argv: Sequence[str], per_host: int, seconds: float = SECONDS
) -> list[str]:
    """Run a Python program on all hosts and return the JSON lines that rank 0 printed.

    Raises ``ValueError`` if a rank failed.
    """
    env = {"PYTHONSAFEPATH": "1"}  # files in the user's directory may have names of modules
    job = launch(cluster, [sys.executable, *argv], per_host=per_host, env=env)
    try:
        outcomes = job.wait(timeout=seconds)
    except TimeoutError as error:
        job.kill()
        raise ValueError(f"the measurement did not end: {error}; try fewer --steps") from None
    failed = [o for o in outcomes if o.failed or o.signal]
    lines = [line for line in job.stdout(0).splitlines() if line.startswith("{")]
    if failed or not lines:
        last = failed[0].stderr.strip().splitlines()[-1:] if failed else ["it printed no result"]
        raise ValueError(": ".join(["the measurement failed", *last]))
    return lines
