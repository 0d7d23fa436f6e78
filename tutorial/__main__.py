"""The course on the command line.

python -m tutorial 1 3          run chapters 1 and 3
python -m tutorial all          run all chapters
python -m tutorial start 1      write the exercises of chapter 1 into my_chapter1.py
python -m tutorial check 1      check your answers in my_chapter1.py
python -m tutorial check 1.2    check one of them
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tutorial import cells


def main() -> None:
    command, *chosen = sys.argv[1:] or ["help"]
    if command in ("help", "-h", "--help"):
        print(usage())
    elif command in ("start", "check"):
        if not chosen:
            sys.exit(f"python -m tutorial: {command} needs the number of a chapter\n\n{usage()}")
        if command == "start":
            for number in chosen:
                start(number)
        elif not all([check(number) for number in chosen]):
            sys.exit(1)
    else:
        numbers = [command, *chosen]
        for path in map(chapter, cells.titles() if numbers == ["all"] else numbers):
            cells.run(path)


def usage() -> str:
    rows = [
        f"  {number}. {title:36}{minutes:>6} minute{'s' if minutes != 'one' else ''}"
        for number, (title, minutes) in cells.titles().items()
    ]
    return "\n".join([str(__doc__), "Chapters, and how long they run:", "", *rows])


def chapter(number: str) -> Path:
    """Its file. Ends the program if there is none."""
    there = cells.titles()
    if number not in there:
        sys.exit(f"python -m tutorial: no chapter {number!r}: choose from {', '.join(there)}")
    return cells.HERE / f"chapter{number}.py"


def start(number: str) -> None:
    """Write the exercises of a chapter into a file in this folder, unless it exists."""
    text, path = cells.exercises(chapter(number)), answers(number)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        sys.exit(f"{path} exists. Delete it, or rename it, to start again")
    print(f"{path}: change it, then run {python()} -m tutorial check {number}")


def python() -> str:
    """How a shell in this folder starts this interpreter."""
    try:
        return str(Path(sys.prefix).relative_to(Path.cwd()) / "bin" / "python")
    except ValueError:
        return "python"


def answers(number: str) -> Path:
    return Path(f"my_chapter{number}.py")


def check(exercise: str) -> bool:
    """Check the answers of a chapter, such as "1", or one of them, such as "1.2". Return whether
    all are right."""
    number = exercise.partition(".")[0]
    chapter(number)
    path = answers(number)
    if not path.exists():
        sys.exit(f"{path} does not exist: python -m tutorial start {number} writes it")
    from tutorial import checks  # imports laconic: only now

    there = [each for each in checks.CHECKS if each.startswith(f"{number}.")]
    if exercise not in (number, *there):
        sys.exit(f"python -m tutorial: no exercise {exercise!r}: choose from {', '.join(there)}")
    checks.CHOSEN = {exercise} if exercise in there else None
    runpy.run_path(str(path))
    return not checks.WRONG


if __name__ == "__main__":  # the processes that chapters start import this file
    main()
