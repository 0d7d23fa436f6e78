"""Run chapters as plain Python: python -m tutorial 1 3 (all of them without a number).

python -m tutorial check 3        check the exercises of chapter 3 as they are in its file
"""

import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    there = sorted(path.stem.removeprefix("chapter") for path in HERE.glob("chapter*.py"))
    checking = sys.argv[1:2] == ["check"]
    chosen = sys.argv[1 + checking :] or there
    for number in chosen:
        if number not in there:
            sys.exit(f"python -m tutorial: no chapter {number!r}: choose from {', '.join(there)}")
    for number in chosen:
        if checking:
            run_cells(number, "exercise")
        else:
            import_module(f"tutorial.chapter{number}")


def run_cells(number: str, tag: str) -> None:
    """Run the cells of chapter ``number`` that have ``tag``, and only these."""
    path = HERE / f"chapter{number}.py"
    names: dict[str, object] = {"__name__": f"tutorial.chapter{number}"}
    line = 0
    for cell in path.read_text().split("\n# %%"):
        head, _, code = cell.partition("\n")
        if f'"{tag}"' in head:  # empty lines before the code, so that errors name its lines
            exec(compile("\n" * (line + 1) + code, path, "exec"), names)
        line += cell.count("\n") + 1


if __name__ == "__main__":  # the processes that chapters start import this file
    main()
