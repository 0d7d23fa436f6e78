"""Race laconic's recipes and other libraries on slow networks; the figures of docs/race.md.

    python -m benchmarks.race [--rows ROW ...] [--networks NETWORK ...] [--seeds SEED ...] ...
    python -m benchmarks.race table
    python -m benchmarks.race compare [--networks NETWORK ...]

The first form runs every row on every network with every seed, and appends each run to the journal
when it has finished. Runs in the journal are not repeated, so an interrupted race resumes with the
same command. Several commands with a part of the rows each may add to one journal. The other forms
run nothing. ``table`` writes the table and the plot from the journal. ``compare`` prints how far
each row is from ``auto()``, and from ``auto()`` on a network of the same rate without latency and
loss.

A network is a rate, and may have a latency, jitter and loss: 50mbit, 50mbit/80ms/0.1%.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import laconic
from benchmarks.race import page, summary
from benchmarks.race.networks import EXAMPLES, Network, parse_network
from benchmarks.race.rows import NETWORKS, NONE, SEEDS, chosen, is_peer
from benchmarks.race.runs import Entry, Job, comparable, journal
from benchmarks.study import DOCS, Parser, command, machine
from laconic.lab.emulation import network as lab
from laconic.lab.emulation.cluster import Cluster
from laconic.lab.emulation.jobs import terminate_as_exit
from laconic.lab.race import runner, workloads
from laconic.lab.race.result import Result, Row
from laconic.lab.race.wording import reason

JOURNAL = Path("laconic-race", "journal.jsonl")


def parser() -> Parser:
    description = (__doc__ or "").partition("\n")[0]
    top = Parser(prog="benchmarks.race", description=description)
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    run = commands.add_parser("run", help="run what is missing in the journal (the default)")
    run.add_argument(
        "--rows", nargs="+", metavar="ROW", help="rows, or patterns such as 'torchft*'"
    )
    run.add_argument(
        "--networks",
        nargs="+",
        metavar="NETWORK",
        default=list(NETWORKS),
        help=f"such as {EXAMPLES.replace('%', '%%')} (default: {' '.join(NETWORKS)})",
    )
    run.add_argument("--seeds", nargs="+", metavar="SEED", type=int, default=list(SEEDS))
    run.add_argument(
        "--seconds", type=float, default=280.0, help="training time per run (%(default)g)"
    )
    run.add_argument("--hosts", type=int, default=4, help="default: %(default)s")
    run.add_argument(
        "--validations",
        type=int,
        default=12,
        metavar="N",
        help="spread evenly over a run, with the clock stopped; at 1 Mbit/s each takes 42 s "
        "(%(default)s)",
    )
    run.add_argument(
        "--data", type=Path, metavar="FILE", help="training text (Python's standard library)"
    )
    run.add_argument("--again", action="store_true", help="repeat runs in the journal")
    table = commands.add_parser("table", help="write the table and the plot from the journal")
    table.add_argument(
        "--page", type=Path, metavar="FILE", default=DOCS / "race.md", help="%(default)s"
    )
    compare = commands.add_parser("compare", help="print how far each row is from auto()")
    compare.add_argument(
        "--networks", nargs="+", metavar="NETWORK", help="default: all of the journal"
    )
    for each in (table, compare):
        each.add_argument("--key", help="the settings to use, if the journal has several")
    for each in (run, table, compare):
        each.add_argument("--journal", type=Path, metavar="FILE", default=JOURNAL)
    return top


def shared(hosts: int, seconds: float, data: Path | None, validations: int) -> dict[str, object]:
    """Return the settings, including the machine, that comparable runs must share."""
    text = workloads.standard_library() if data is None else data.read_bytes()
    return {
        "workload": "text",
        "data": "Python's standard library" if data is None else data.name,
        "sha256": hashlib.sha256(text).hexdigest()[:16],
        "hosts": hosts,
        "seconds": seconds,
        "validations": validations,
        **machine(),
    }


def commit() -> str:
    """Return the repository's commit, or "unknown"."""
    argv = ["git", "-C", str(DOCS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ended.stdout.strip()


def jobs(rows: Sequence[str], networks: Sequence[Network], seeds: Sequence[int]) -> list[Job]:
    """Return the jobs seed by seed, so that a machine that slows down affects all rows equally."""
    return [
        Job(row, network, seed)
        for seed in seeds
        for network in (None, *networks)
        for row in rows
        if (row == NONE) == (network is None)
    ]


def settings_from(
    options: Any, rows: Sequence[str], networks: Sequence[Network]
) -> runner.Settings:
    """Return the lab's settings for all jobs. Raises ``ValueError`` before anything is started."""
    everything = runner.Settings(
        recipes=tuple(row for row in rows if row != NONE and not is_peer(row)),
        rivals=tuple(row for row in rows if is_peer(row)),
        baseline=NONE in rows,
        network=lab.Network(options.hosts),
        data=None if options.data is None else str(options.data.resolve()),
        seconds=options.seconds,
        seeds=tuple(options.seeds),
        validations=options.validations,
    )
    for network in networks:
        on(everything, network).check()
    return everything


def on(settings: runner.Settings, network: Network, seed: int = 0) -> runner.Settings:
    """Return the settings on a network. ``seed`` is that of jitter and loss."""
    return replace(settings, network=network.of(settings.network.hosts, seed))


def try_networks(hosts: int, networks: Sequence[Network]) -> None:
    """Raise ``OSError`` if one of the networks cannot be emulated here."""
    # Other libraries need emulated hosts, also in a race without a network.
    for network in networks or (Network(1e8),):
        with Cluster(network.of(hosts)):
            pass


def part(everything: runner.Settings, job: Job) -> runner.Settings:
    """Return the settings of one job."""
    none, peer = job.row == NONE, is_peer(job.row)
    one = replace(
        everything,
        recipes=() if none or peer else (job.row,),
        rivals=(job.row,) if peer else (),
        baseline=none,
        seeds=(job.seed,),
    )
    # With the network's seed, every row with a seed loses packets alike, and other seeds others.
    return one if job.network is None else on(one, job.network, job.seed)


def run(options: Any) -> int:
    """Return 0 if all runs are in the journal, 1 if a run failed or diverged."""
    rows = chosen(options.rows)
    networks = list(dict.fromkeys(map(parse_network, options.networks)))
    everything = settings_from(options, rows, networks)
    try_networks(options.hosts, networks)
    common = shared(options.hosts, options.seconds, options.data, options.validations)
    todo = jobs(rows, networks, options.seeds)
    lost = 0
    known = journal(options.journal)
    with terminate_as_exit(), known.opened() as append:
        recorded = [e for e in known.load() if e.shared == common]
        done = {e.job for e in recorded if e.run.status != "failed" and not options.again}
        missing = [job for job in todo if job not in done]
        hours = len(missing) * options.seconds / 3600
        print(f"{len(todo)} runs, {len(missing)} to run: more than {hours:.1f} h", flush=True)
        for number, job in enumerate(missing, 1):
            print(f"{number}/{len(missing)} {job_text(job)}: ", end="", flush=True)
            entry = Entry(common, job, single(part(everything, job)))
            append(entry)
            lost += entry.run.status != "ok"
            print(outcome(entry.run), flush=True)
    return 1 if lost else 0


def single(one: runner.Settings) -> Result:
    """Return the lab's result of a single run, without data that tables and plot do not need."""
    # Journals may be shared, so they must not contain paths of this machine.
    (result,) = runner.run(one, "python -m benchmarks.race", lambda name, event: None)
    if result.settings["reason"] is not None:
        raise OSError(f"the network namespaces were lost: {result.settings['reason']}")
    data = None if one.data is None else Path(one.data).name
    return replace(
        result,
        settings={**result.settings, "data": data},
        versions={**result.versions, "laconic": laconic.__version__, "commit": commit()},
    )


def job_text(job: Job) -> str:
    where = "" if job.network is None else f"{job.network}, "
    return f"{where}seed {job.seed}, {job.row}"


def outcome(row: Row) -> str:
    if row.status != "ok":
        return reason(row)
    return f"{row.steps} steps, {row.seconds_per_step:.3g} s each, loss {row.loss:.4f}"


def chosen_entries(options: Any) -> list[Entry]:
    """Return the runs of one key. Raises ``ValueError`` if there is a choice and none is given."""
    groups = comparable(journal(options.journal).load())
    if not groups:
        raise ValueError(f"no runs in {options.journal}")
    if (options.key is None and len(groups) > 1) or options.key not in (None, *groups):
        choices = "; ".join(
            f"{name} ({page.task(entries)}: {len(entries)} runs)"
            for name, entries in groups.items()
        )
        raise ValueError(
            f"the journal has runs of several settings: --key must be one of {choices}"
        )
    return groups[options.key] if options.key else next(iter(groups.values()))


def table(options: Any) -> int:
    """Write the page and return 0."""
    paths = page.write(options.page, chosen_entries(options))
    print("written: " + ", ".join(map(str, paths)))
    return 0


def compare(options: Any) -> int:
    """Print the summaries and return 0."""
    networks = None if options.networks is None else list(map(parse_network, options.networks))
    for line in summary.lines(chosen_entries(options), networks):
        print(line)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] not in (["run"], ["table"], ["compare"], ["-h"], ["--help"]):
        arguments.insert(0, "run")
    commands = {"run": run, "table": table, "compare": compare}

    def begin() -> int:
        options = parser().parse_args(arguments)
        return commands[options.command](options)

    return command("benchmarks.race", begin)


if __name__ == "__main__":
    sys.exit(main())
