"""Run everything that needs a GPU: ``python -m benchmarks.cuda [--only NAME ...]``.

Without a GPU it says what was not run. ``python -m benchmarks.cuda page`` writes the tables of
docs/gpu.md from the files in benchmarks/cuda/results.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

import torch

import laconic
from benchmarks.cuda import PARTS, FailedError, Part, checks, page, speed

RESULTS = Path(__file__).parent / "results"


def run_all(parts: list[Part], device: torch.device) -> list[dict[str, Any]]:
    """Run ``parts`` one after the other. A failure ends none of the others."""
    found = []
    for number, each in enumerate(parts, 1):
        start, error, numbers = time.perf_counter(), "", {}
        print(f"[{number}/{len(parts)}] {each.text}", flush=True)
        try:
            numbers = each.run(device)
        except FailedError as failed:
            error, numbers = str(failed), failed.numbers
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        seconds = time.perf_counter() - start
        for name, value in numbers.items():
            print(f"      {name}: {value:.4g}")
        print(f"      {'FAILED: ' + error if error else 'ok'} ({seconds:.1f} s)", flush=True)
        row = {"name": each.name, "text": each.text, "seconds": round(seconds, 2)}
        found.append({**row, "numbers": numbers, "error": error})
    return found


def main(arguments: list[str] | None = None) -> int:
    assert checks.PARTS is speed.PARTS, "both have added their parts"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to run")
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
    print(f"{name}, torch {torch.__version__}, laconic {laconic.__version__}")
    found = run_all(parts, device)
    result = {
        "gpu": name,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "laconic": laconic.__version__,
        "date": date.today().isoformat(),
        "parts": found,
    }
    out = options.out or RESULTS / f"{name.lower().replace(' ', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row["name"] for row in found if row["error"]]
    print(f"{len(found) - len(failed)} of {len(found)} parts ok; results in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
