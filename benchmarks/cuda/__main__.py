"""Run what needs a GPU, the most important first, and go on where the last run stopped.

    python -m benchmarks.cuda [--seconds 780] [--only NAME ...] [--again]
    python -m benchmarks.cuda page

A part whose figures are known is not repeated; checks are, at another commit. Each part is kept
when it ends. Without a GPU, it says what is missing. ``page`` writes the tables of docs/gpu.md from
the files in benchmarks/cuda/results.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from time import monotonic as clock
from typing import Any

import torch

import laconic
from benchmarks.cuda import FailedError, Part, page
from benchmarks.cuda.tuning import PARTS

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def commit() -> str:
    """Return the repository's commit, or "unknown"."""
    argv = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def missing(parts: Sequence[Part], known: dict[str, Row], at: str) -> list[Part]:
    """The parts to run at the commit ``at``: not those that are ok and whose figures are known, or
    that were checked there."""

    def done(part: Part) -> bool:
        row = known.get(part.name)
        return row is not None and not row["error"] and (part.figures or row["commit"] == at)

    return [part for part in parts if not done(part)]


def run_part(part: Part, device: torch.device) -> Row:
    """Run it. A failure is part of the result."""
    start, error, numbers = time.perf_counter(), "", {}
    try:
        numbers = part.run(device)
    except FailedError as failed:
        error, numbers = str(failed), failed.numbers
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    seconds = time.perf_counter() - start
    for name, value in numbers.items():
        print(f"      {name}: {value:.4g}")
    print(f"      {'FAILED: ' + error if error else 'ok'} ({seconds:.1f} s)", flush=True)
    row = {"name": part.name, "text": part.text, "seconds": round(seconds, 2)}
    return {**row, "numbers": numbers, "error": error}


def run_all(
    parts: Sequence[Part], device: torch.device, out: Path, about: Row, seconds: float
) -> list[Part]:
    """Run the parts that fit into the ``seconds``, and write each to ``out``. Return the rest."""
    end, left = clock() + seconds, []
    for number, each in enumerate(parts, 1):
        if clock() + each.most > end:
            left.append(each)
            continue
        print(f"[{number}/{len(parts)}] {each.text}", flush=True)
        known = read(out)
        known[each.name] = {**run_part(each, device), "commit": about["commit"]}
        whole = json.dumps({**about, "parts": list(known.values())}, indent=1) + "\n"
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_suffix(".part")
        draft.write_text(whole)
        draft.replace(out)
    return left


def read(out: Path) -> dict[str, Row]:
    """The parts that have run, by name."""
    rows = json.loads(out.read_text())["parts"] if out.exists() else []
    return {row["name"]: {"commit": "unknown", **row} for row in rows}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to run")
    parser.add_argument("--again", action="store_true", help="also what has run")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no part that may end later"
    )
    parser.add_argument("--out", type=Path, help="the result file (default: by the GPU's name)")
    options = parser.parse_args(arguments)
    if options.command == "page":
        page.write(RESULTS)
        return 0
    unknown = set(options.only or ()) - {each.name for each in PARTS}
    if unknown:
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    parts = [each for each in PARTS if not options.only or each.name in options.only]
    if not torch.cuda.is_available():
        print("There is no GPU, or this torch does not support it. Not run:")
        for each in parts:
            print(f"  {each.name}: {each.text}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    about = {
        "gpu": name,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "laconic": laconic.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }
    print(f"{name}, torch {torch.__version__}, laconic {laconic.__version__}, {about['commit']}")
    out = options.out or RESULTS / f"{name.lower().replace(' ', '-')}.json"
    todo = parts if options.again else missing(parts, read(out), str(about["commit"]))
    left = run_all(todo, device, out, about, options.seconds)
    rows = read(out)
    failed = [each.name for each in parts if rows.get(each.name, {}).get("error")]
    print(f"{len(left)} parts are left, {len(failed)} have failed; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
