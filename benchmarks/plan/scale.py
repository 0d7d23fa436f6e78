"""How long plans take, and how that grows with the number of workers."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import laconic as la
from laconic.advisor.plan.cluster import Cluster, Failures, uniform
from laconic.advisor.plan.simulate import simulate_plan

WORKERS = (256, 1024, 4096, 16384)
STEPS = 10_000
MOST_SECONDS, MOST_BYTES = 60.0, 4e9


def cluster(workers: int) -> Cluster:
    """A failing cluster on 8 sites: a worker fails every 60 days."""
    failures = Failures(mtbf=60 * 86400.0)
    sites = uniform(workers, 8, bandwidth=10e9, latency=0.08, uplink=100e9)
    return Cluster(10**8, sites, latency=0.08, failures=failures)


def timings() -> Iterator[str]:
    """Yield the lines of the table."""
    recipes = {
        "ddp()": la.ddp(),
        "diloco(100)": la.diloco(100),
        "streaming_diloco(64)": la.streaming_diloco(64),
        "diloco(100, quorum=9n/10)": None,
    }
    yield f"Processor seconds of a plan of {STEPS:,} steps with failures, in one thread."
    yield ""
    yield f"| recipe | {' | '.join(f'{n:,} workers' for n in WORKERS)} |"
    yield "|---" * (len(WORKERS) + 1) + "|"
    for name, recipe in recipes.items():
        cells = []
        for workers in WORKERS:
            known = cluster(workers)
            if recipe is None:
                made = la.diloco(100, quorum=9 * workers // 10, grace=2.0)
                known = Cluster(known.params, known.sites, latency=known.latency)
            else:
                made = recipe
            begin = time.process_time()
            result = simulate_plan(made, known, STEPS)
            seconds = time.process_time() - begin
            lost = f", {result.failures} failures" if result.failures else ""
            cells.append(f"{seconds:.1f}{lost}")
            if workers == 4096 and seconds > MOST_SECONDS:
                cells[-1] += " (too long)"
        yield f"| `{name}` | {' | '.join(cells)} |"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield ""
    yield f"The process used at most {peak / 1e9:.2f} GB, of which importing torch takes most."
