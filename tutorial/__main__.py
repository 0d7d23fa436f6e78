"""Run chapters as plain Python: python -m tutorial 1 3 (all of them without a number)."""

import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    there = sorted(
        path.stem.removeprefix("chapter") for path in Path(__file__).parent.glob("chapter*.py")
    )
    chosen = sys.argv[1:] or there
    for number in chosen:
        if number not in there:
            sys.exit(f"python -m tutorial: no chapter {number!r}: choose from {', '.join(there)}")
    for number in chosen:
        import_module(f"tutorial.chapter{number}")


if __name__ == "__main__":  # the processes that chapters start import this file
    main()
