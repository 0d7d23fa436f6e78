"""Run the tests that decide with other versions of Python and torch, each in a new environment.

make matrix                                                         # the oldest and the newest
make matrix MATRIX="--pair python3.12=2.9.1 --pair python3.13=2.14.1"
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAIRS = ["python3.10=2.7.1", "python3.13=2.14.1"]
MOST_SECONDS = 3600
DECIDING = [
    "tests/algorithms/test_contract.py",
    "tests/codecs",
    "tests/engine/test_compatibility.py",
    "tests/engine/test_golden.py",
    "tests/engine/test_loop.py",
    "tests/engine/test_mesh.py",
    "tests/engine/test_saving.py",
    "tests/integrations",
    "tests/links/test_links.py",
    "tests/links/test_init.py",
    "tests/test_package.py",
]


def run(*command, **more):
    """Run a command whose output is of no interest unless it fails."""
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, **more)
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{ended.stdout}{ended.stderr}")


def try_pair(python, torch, folder):
    """Run the tests, and return a line about them and whether they passed."""
    own = folder / "bin" / "python"
    run(python, "-m", "venv", folder)
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--upgrade", "pip", "setuptools", "wheel")
    run(*pip, f"torch=={torch}", "numpy")
    run(*pip, "--no-build-isolation", f"torch=={torch}", f"{ROOT}[dev]")
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    tests = [own, "-m", "pytest", "-q", "-n", os.cpu_count(), "-m", "", "-p", "no:cacheprovider"]
    tests += DECIDING
    ended = subprocess.run(
        [*map(str, tests)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )
    last = re.sub(r"^=+ | =+$", "", (ended.stdout.rstrip().splitlines() or ["no output"])[-1])
    if ended.returncode:
        print(ended.stdout)
    return f"{python}, torch {torch}: {last}", ended.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", action="append", metavar="PYTHON=TORCH", help="may be repeated")
    passed = []
    for pair in parser.parse_args().pair or PAIRS:
        python, _, torch = pair.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            said, well = try_pair(python, torch, Path(folder))
        print(said, flush=True)
        passed.append(well)
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
