"""The changes that `make mutations` tries can be made, and the tests that must fail exist."""

from __future__ import annotations

from tests.mutate import MUTATIONS, unusable


def test_every_change_can_be_made() -> None:
    problems = [problem for change in MUTATIONS if (problem := unusable(change))]
    assert not problems, "\n".join(problems)
