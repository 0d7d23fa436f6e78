"""Work that every rank does in one call, with errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from laconic.links.agreement import in_words

T = TypeVar("T")
_MAX_LETTERS = 400


class AllRanks:
    """Runs work on all ranks as part of one call, which error messages name ``call``. After each
    piece of work, the ranks exchange the outcomes with ``gather``."""

    def __init__(self, call: str, gather: Callable[[Any], list[Any]]) -> None:
        self.call = call
        self._gather = gather

    def do(self, work: Callable[[], T]) -> T:
        """Run ``work``. If it fails on any rank, raise one error on all ranks: `OSError` if every
        failure is one, else ``ValueError``."""
        return self._run(work, lambda _: None)[0]

    def share(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` like `do`, and return all ranks' results (JSON data), by rank."""
        return self._run(work, lambda result: result)[1]

    def error(self, text: str) -> ValueError:
        """Make the error for a problem that all ranks have found alike."""
        return ValueError(f"{self.call}: {text}")

    def _run(self, work: Callable[[], T], shared: Callable[[T | None], Any]) -> tuple[T, list[Any]]:
        result: T | None = None
        caught: Exception | None = None
        try:
            result = work()
        except Exception as error:  # of any kind: the other ranks would wait for this one
            caught = error
        problem = None if caught is None else [isinstance(caught, OSError), one_line(caught)]
        outcomes = self._gather([problem, shared(result)])
        failed = {rank: problem for rank, (problem, _) in enumerate(outcomes) if problem}
        if failed:
            kind = OSError if all(is_os_error for is_os_error, _ in failed.values()) else ValueError
            problems = in_words({rank: text for rank, (_, text) in failed.items()})
            raise kind(f"{self.call}: {problems}") from caught
        return result, [value for _, value in outcomes]  # type: ignore[return-value]


def one_line(error: Exception) -> str:
    """The message of ``error`` on one line of limited length, with its type if unusual."""
    text = " ".join(str(error).split()) or "no details"
    if not isinstance(error, (OSError, ValueError)) or isinstance(error, UnicodeError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]} ..."
