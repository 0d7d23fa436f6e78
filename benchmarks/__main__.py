"""Run the benchmarks and print their results next to the bounds that the project sets itself.

python -m benchmarks [NAME ...]
"""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figure
from laconic.lab.emulation.cluster import (
    Cluster,
    Loopback,
    NamespacesUnavailable,
    Network,
    launch,
)

STREAMING = "streaming_diloco(16, 4, 2, codec='int4', lr=0.4, momentum=0.6)"
MUON = "streaming_diloco(8, outer='muon')"
ALL = {
    # name: (processes, whether they need a 100 Mbit/s network, arguments, description)
    "step": (1, False, ["step"], "a step without a round, attached / bare, text model"),
    "metrics": (1, False, ["step", "0"], "the same, with a metrics record after every step"),
    "round": (4, False, ["round"], "a local_sgd round / a bare flat all-reduce of the same bytes"),
    "round2": (2, False, ["round"], "the same with two processes"),
    "ddp": (4, False, ["ddp"], "a step under ddp() / under torch's DistributedDataParallel"),
    "outer": (4, False, ["outer"], "outer_step(ddp(), 8, outer='muon') / ddp()"),
    "processor": (4, False, ["processor"], "processor time of the same, by codec"),
    "share": (4, True, ["share", STREAMING], "a step at 100 Mbit/s / without communication"),
    "share_slow": (4, True, ["share", STREAMING], "a step at 10 Mbit/s / without communication"),
    "share_muon": (4, True, ["share", MUON], "a step at 100 Mbit/s / without communication"),
    "share_muon_slow": (4, True, ["share", MUON], "a step at 10 Mbit/s / without communication"),
    "share_gradients": (
        4,
        True,
        ["share", "ddp(codec='int4')"],
        "a step at 100 Mbit/s / without communication",
    ),
    "elastic": (
        4,
        True,
        ["elastic", "local_sgd(8)"],
        "an elastic run at 100 Mbit/s / a static one",
    ),
    "elastic_ddp": (4, True, ["elastic", "ddp(codec='int4')"], "the same with a coded gradient"),
    "slow": (4, True, ["slow"], "a round at 100 Mbit/s / its bytes over the rate"),
    "far": (4, True, ["far"], "a round at 100 Mbit/s, 100 ms, 0.1% loss / its bytes over the rate"),
    "buckets": (4, True, ["buckets"], "a step at 100 Mbit/s, 100 ms with coded gradients"),
    "secured": (4, True, ["secured"], "a round at 100 Mbit/s with TLS / without"),
    "coded": (4, True, ["coded"], "an encoded round at 100 Mbit/s / its bytes over the rate"),
    "coded_large": (2, True, ["coded_large"], "the same with a bucket of 25 MiB, two processes"),
    "memory": (4, False, ["memory", "slowmo"], "extra memory / (8/n bytes each + two buckets)"),
    "memory2": (4, False, ["memory", "diloco"], "extra memory / (8/n bytes each + two buckets)"),
    "calls": (1, False, ["calls"], "a drop-in's call without a round / 50 us"),
}
LONG = {"far": (0.1, 0.001), "buckets": (0.1, 0.0)}
"""Seconds of a round trip, and the share of packets lost, where there is any."""
RATES = {"share_slow": 10e6, "share_muon_slow": 10e6}
"""Bit/s of networks of another rate than 100 Mbit/s."""
TIMEOUT = 600.0


def run(name: str) -> list[Figure]:
    """Run one benchmark in processes of its own and return its figures."""
    processes, slow, arguments, _ = ALL[name]
    latency, loss = LONG.get(name, (0.0, 0.0))
    network = Network(processes, RATES.get(name, 100e6), latency, loss=loss)
    cluster = Cluster(network) if slow else Loopback(Network(processes, None))
    with cluster:
        argv = [sys.executable, "-m", "benchmarks.measure", *arguments]
        # For memory benchmarks, make malloc return freed memory to the system.
        memory = arguments[0] == "memory"
        env = {"MALLOC_MMAP_THRESHOLD_": "1048576"} if memory else {}
        job = launch(cluster, argv, env=env)
        outcomes = job.wait(TIMEOUT)
        for outcome in outcomes:
            if outcome.failed:
                raise SystemExit(f"benchmark {name}: {outcome}\n{outcome.stderr}")
        lines = [line for line in job.stdout(0).splitlines() if line.startswith("{")]
    return [Figure(**json.loads(line)) for line in lines]


def main() -> None:
    names = sys.argv[1:] or list(ALL)
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise SystemExit(f"no benchmark {unknown[0]!r}: choose from {', '.join(ALL)}")
    table = Table(title="Overhead of laconic: medians of interleaved pairs")
    for column in ("benchmark", "median", "quartiles", "pairs", "bound", ""):
        table.add_column(column)
    for name in names:
        description = ALL[name][3]
        try:
            figures = run(name)
        except NamespacesUnavailable as error:
            table.add_row(description, "-", "-", "-", "-", str(error))
            continue
        for f in figures:
            quartiles = "" if f.low is None else f"{f.low:.3f} - {f.high:.3f}"
            within = "within" if f.median <= f.bound else "beyond"
            table.add_row(
                f"{description}{': ' if f.detail else ''}{f.detail}",
                f"{f.median:.3f}",
                quartiles,
                str(f.pairs),
                f"{f.bound:.2f}",
                within,
            )
    Console(width=None if Console().is_terminal else 140).print(table)


if __name__ == "__main__":
    main()
