"""Change the source at random, one place at a time, and see whether a test fails.

    make mutations SAMPLE=100 SEED=1      # python -m tests.mutations --sample 100 --seed 1
    python -m tests.mutations --names FILE       # those of an earlier report, with other tests

mutmut makes the changes, in the copy ``mutants/``. It runs the tests once to see which of them call
each function; then, for each change, these alone, until one fails. ``[tool.mutmut]`` in
``pyproject.toml`` says what is changed and which tests it has: those of algorithms and codecs that
are not marked slow. Each change is made in a process of its own, forked before torch is imported or
has threads. The report lists the changes by verdict; ``mutmut show NAME`` shows one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "mutants"


def mutmut(*arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """``mutmut`` on the copy, which comes before the source in every process that tests start."""
    (COPY / "src").mkdir(parents=True, exist_ok=True)  # Python forgets a path that is not there
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(COPY / "src")}
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=quiet)


def verdicts() -> dict[str, str]:
    """What has become of every change: killed, survived, no tests, timeout, not checked..."""
    lines = mutmut("results", "--all", "true", quiet=True).stdout.splitlines()
    pairs = (line.strip().rsplit(": ", 1) for line in lines)
    return dict(sorted((pair[0], pair[1]) for pair in pairs if len(pair) == 2))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change the source and see whether a test fails.")
    parser.add_argument("--sample", type=int, default=0, help="how many changes; 0: all, hours")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", default="", help="of names with this text, such as .codecs.")
    parser.add_argument("--names", type=Path, help="those that an earlier report lists")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutations.json")
    given = parser.parse_args(arguments)
    mutmut("run", "none", quiet=True)  # makes the changes, and runs the tests once
    names = [name for name in verdicts() if given.of in name]
    if given.names:
        listed = json.loads(given.names.read_text()).values()
        names = sorted({name for group in listed for name in group} & set(names))
    elif given.sample:
        names = random.Random(given.seed).sample(names, min(given.sample, len(names)))
    if not names:
        print("there is nothing to change: `mutmut run` says why", file=sys.stderr)
        return 2
    code = mutmut("run", *names).returncode
    found = verdicts()
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(found.get(name, "not checked"), []).append(name)
    given.report.parent.mkdir(exist_ok=True)
    given.report.write_text(json.dumps(groups, indent=1, ensure_ascii=False) + "\n")
    for name in groups.get("survived", []):
        print(f"survived: {name}")
    print(f"{json.dumps({verdict: len(own) for verdict, own in groups.items()})}: {given.report}")
    return code or len(names) == len(groups.get("not checked", []))


if __name__ == "__main__":
    sys.exit(main())
