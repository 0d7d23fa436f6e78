"""Run every trap on this source, and optionally on that of an earlier commit for comparison.

python -m benchmarks.traps [--before COMMIT] [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import benchmarks.traps
from benchmarks.traps import TRAPS, Trapped, earlier

ROOT = Path(__file__).parents[2]


def find() -> None:
    """Import the modules of this package, which register their traps."""
    earlier.provide()
    for module in sorted(m.name for m in pkgutil.iter_modules(benchmarks.traps.__path__)):
        if module not in ("__main__", "earlier"):
            importlib.import_module(f"benchmarks.traps.{module}")


def run_here(name: str) -> int:
    """Run one trap in this process. The last line of its output gives the result."""
    try:
        result = TRAPS[name].run()
    except Trapped as trapped:
        print(f"TRAP: {trapped}")
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"ERROR: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return 2
    print(f"ok: {result}")
    return 0


def run_isolated(name: str, source: Path, *, show: bool) -> str:
    """Run one trap in a process of its own on the laconic in ``source``. Return its last line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    argv = [sys.executable, "-m", "benchmarks.traps", "--here", name]
    limit = TRAPS[name].seconds
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return f"TRAP: it did not end within {limit:g} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    result = lines[-1] if lines else ""
    if not result.startswith(("ok: ", "TRAP: ", "ERROR: ")):
        result = f"ERROR: the process ended with {done.returncode}"
    if show and result.startswith("ERROR: "):
        print(done.stderr, file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traps", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="traps to run (default: all)")
    parser.add_argument("--before", metavar="COMMIT", help="also run them on this commit's source")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    find()
    if options.here:
        raise SystemExit(run_here(options.here))
    unknown = [name for name in options.names if name not in TRAPS]
    if unknown:
        raise SystemExit(f"no trap {unknown[0]!r}: choose from {', '.join(TRAPS)}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        before = None
        if options.before:
            archive = subprocess.run(
                ["git", "archive", options.before, "src", "tutorial"],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            before = Path(folder, "src")
        for name in options.names or TRAPS:
            print(f"{name}: {TRAPS[name].title}")
            if before is not None:
                print(f"  before  {run_isolated(name, before, show=False)}", flush=True)
            result = run_isolated(name, ROOT / "src", show=True)
            print(f"  now     {result}", flush=True)
            failed += not result.startswith("ok: ")
    print(f"{failed} of {len(options.names or TRAPS)} traps are open")
    raise SystemExit(min(failed, 1))


if __name__ == "__main__":
    main()
