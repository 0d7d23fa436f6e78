"""Run what needs a GPU, the most important first, and go on where the last run stopped.

    python -m benchmarks.cuda [--seconds 780] [--only NAME ...] [--again]
    python -m benchmarks.cuda page

A part whose figures are known is not repeated; checks are, with other code. What has failed with
the same code comes last. Each part has a process of its own, is ended when it takes too long, and
is kept when it ends; then the table of docs/gpu.md is written from the files in
benchmarks/cuda/results, which is also what ``page`` does. Without a GPU, it says what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from time import monotonic as clock

import torch

import laconic
from benchmarks.cuda import Part, page
from benchmarks.cuda.running import Row, run_apart, run_part
from benchmarks.cuda.tuning import PARTS

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]
OF_ROW = "commit", "torch", "date"
"""What each row says of the run that it is from."""


def commit() -> str:
    """Return the last commit that has changed code, with "-dirty" if it was changed since; or
    "unknown". Results are not code: to keep them does not make them old."""
    results = RESULTS.relative_to(ROOT)

    def git(*argv: str) -> str:
        command = ["git", "-C", str(ROOT), *argv, "--", "src", "benchmarks", f":!{results}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        last = git("log", "-1", "--abbrev=12", "--format=%h")
        return f"{last}-dirty" if git("status", "--porcelain", "-uall") else last or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def missing(parts: Sequence[Part], known: dict[str, Row], at: str) -> list[Part]:
    """The parts to run at the commit ``at``: not those that are ok and whose figures are known, or
    that were checked there. Those that have failed there are last, so that others get their turn.
    """

    def at_hand(part: Part) -> bool:
        return known[part.name]["commit"] == at != "unknown"

    def done(part: Part) -> bool:
        ok = part.name in known and not known[part.name]["error"]
        return ok and (part.figures or at_hand(part))

    todo = [part for part in parts if not done(part)]
    return sorted(todo, key=lambda part: part.name in known and at_hand(part))


def run_all(
    parts: Sequence[Part],
    device: torch.device,
    out: Path,
    about: Row,
    seconds: float,
    run: Callable[[Part, torch.device], Row] = run_part,
) -> list[Part]:
    """``run`` the parts that fit into the ``seconds``, and write each to ``out``. Return the rest.
    ``about``: on what they run."""
    end, left = clock() + seconds, []
    for number, each in enumerate(parts, 1):
        lacking = each.lacks()
        if lacking or clock() + each.most > end:
            print(f"[{number}/{len(parts)}] not run: {each.text}: {lacking or 'no time'}")
            left.append(each)
            continue
        print(f"[{number}/{len(parts)}] {each.text}", flush=True)
        row = run(each, device)
        for name, value in row["numbers"].items():
            print(f"      {name}: {value:.4g}")
        said = f"FAILED: {row['error']}" if row["error"] else "ok"
        print(f"      {said} ({row['seconds']:.1f} s)", flush=True)
        known = read(out)
        known[each.name] = {**row, **{key: about[key] for key in OF_ROW}}
        whole = json.dumps({**about, "parts": list(known.values())}, indent=1) + "\n"
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_suffix(".part")
        draft.write_text(whole)
        draft.replace(out)
    return left


def read(out: Path) -> dict[str, Row]:
    """The parts that have run, by name."""
    if not out.exists():
        return {}
    whole = json.loads(out.read_text())
    older = {**whole, "commit": "unknown"}  # these files say it once, but for the commit
    of_all = {key: older[key] for key in OF_ROW}
    return {row["name"]: {**of_all, **row} for row in whole["parts"]}


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the part under way, too
    left = run_all(todo, device, out, about, options.seconds, run_apart)
    if options.out is None:
        page.write(RESULTS)
    rows = read(out)
    failed = [each.name for each in parts if rows.get(each.name, {}).get("error")]
    print(f"{len(left)} parts are left, {len(failed)} have failed; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
