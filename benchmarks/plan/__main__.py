"""Check the planner.

    python -m benchmarks.plan published   # published numbers beside ours: minutes
    python -m benchmarks.plan scale       # up to 16,384 workers: minutes
    python -m benchmarks.plan emulated    # plans beside real runs on emulated hosts: half an hour

`emulated` appends each run to a journal, and the same command goes on where it was. It needs a
quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.plan import emulated, published, scale

JOURNAL = Path("laconic-plan", "journal.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("published", "scale", "emulated"))
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of settings")
    parser.add_argument("--table", action="store_true", help="run nothing, and print the table")
    parser.add_argument("--journal", type=Path, metavar="FILE", default=JOURNAL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "emulated":
        return emulated.main(options.journal, options.only, show=options.table)
    if options.what == "published":
        print("Gbit/s for 95% of the time in computing:\n")
        for line in published.bandwidths():
            print(line, flush=True)
        return 0
    for line in scale.timings():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
