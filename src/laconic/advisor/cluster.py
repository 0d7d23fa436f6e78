"""Measure on emulated hosts, for `laconic advise --workload`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from laconic.advisor.measure import Measured
from laconic.advisor.worker import Spec, measured_of
from laconic.lab.emulation.cluster import Cluster, Loopback, check_hosts, check_rate, launch
from laconic.lab.race import user_files, workloads
from laconic.lab.race.runner import Settings, network

SECONDS = 300.0
"""A measurement that takes longer has failed."""
TIMEOUT = 60.0
"""Seconds after which a rank that does not answer is an error on the others."""


def check(spec: Spec, hosts: int, per_host: int, bandwidth: float) -> None:
    """Raise ``ValueError`` for settings that would fail later. Starts nothing."""
    check_hosts(hosts)
    check_rate(bandwidth)
    if hosts * per_host < 2:
        raise ValueError("one process cannot communicate: give --hosts 2 or more")
    data = None if spec.data is None else Path(spec.data)
    if user_files.is_workload(spec.workload):
        user_files.try_out(
            user_files.workload(spec.workload, data), spec.workload, hosts * per_host, spec.seed
        )
    else:
        workloads.load(spec.workload, data=data)


def measure_on_hosts(
    spec: Spec, hosts: int, per_host: int, bandwidth: float
) -> tuple[Measured, str | None]:
    """Return the measurement, and if hosts could not be emulated, the reason."""
    settings = Settings(recipes=(), hosts=hosts, per_host=per_host, bandwidth=bandwidth)
    with network(settings) as (cluster, reason):
        if not cluster.emulated:
            spec = replace(spec, bandwidth=bandwidth / per_host)
        argv = ["-m", "laconic.advisor.worker", spec.to_json()]
        return measured_of(output_lines(cluster, argv, per_host)[-1]), reason


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
