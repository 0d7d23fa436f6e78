"""Run the tests marked ``fault`` on this source, and on that of an earlier commit beside it.

    python -m benchmarks.faults [--before COMMIT] [PYTEST ARGUMENT ...]

Prints one line for each fault: whether its test passes there and here. A test that needs a name
which the earlier source lacks fails there, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


class Titles:
    """Has pytest report the title of each fault with its test's result."""

    def pytest_runtest_setup(self, item) -> None:  # type: ignore[no-untyped-def]
        """Record the title, for ``--junitxml``."""
        for mark in item.iter_markers("fault"):
            item.user_properties.append(("fault", mark.args[0]))


def run(source: Path, arguments: list[str]) -> dict[str, list[bool]]:
    """Whether the tests of each fault pass on the laconic in ``source``, by title."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
        argv = [sys.executable, "-m", "pytest", "-q", "-m", "fault", "-p", "benchmarks.faults"]
        argv += [f"--junitxml={report}", *(arguments or ["-n", "2"])]
        subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=False)
        results: dict[str, list[bool]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            failed = case.find("failure") is not None or case.find("error") is not None
            for each in case.iter("property"):
                if each.get("name") == "fault":
                    results.setdefault(str(each.get("value")), []).append(not failed)
        return results


def pytest_configure(config) -> None:  # type: ignore[no-untyped-def]
    """Register this module's hooks."""
    config.pluginmanager.register(Titles())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--before", metavar="COMMIT", help="also run them on this commit's source")
    options, arguments = parser.parse_known_args()
    before: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.before:
            files = subprocess.run(
                ["git", "archive", options.before, "src"], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "x", "-C", folder], input=files.stdout, check=True)
            for built in (ROOT / "src").rglob("*.so"):
                shutil.copy(built, Path(folder, built.relative_to(ROOT)))
            before = run(Path(folder, "src"), arguments)
        after = run(ROOT / "src", arguments)

    def word(passed: list[bool] | None) -> str:
        return "-" if passed is None else "ok" if all(passed) else "fault"

    print("before  after")
    for title in sorted(after.keys() | before.keys()):
        print(f"{word(before.get(title)):7} {word(after.get(title)):6} {title}")
    raise SystemExit(not all(map(all, after.values())))


if __name__ == "__main__":
    main()
