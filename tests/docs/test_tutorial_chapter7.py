"""Chapter 7 of the tutorial, which emulates hosts: its module, and the chapter itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from laconic import ddp, local_sgd
from laconic.lab.race.result import Result, Rounds, Row
from laconic.lab.race.workloads import ByteTransformer
from laconic.predict import predict
from tutorial import slow_network
from tutorial.slow_network import HOSTS, ONE_WAY, on_paper, sent, train
from tutorial.toy import count_parameters

from tests.docs.test_tutorial import python

ROW = Row("local_sgd(4)", "ok", None, 10, 5.0, 0.5, 3.0, math.nan, None, 0.0, ())


def test_the_chapter_runs_and_says_that_it_is_scaled() -> None:
    ended = python("-m", "tutorial", "7")
    assert ended.returncode == 0, ended.stderr
    assert "scaled to 0.01 of the work" in ended.stdout
    assert "2 hosts × 1 process, 1 Gbit/s, " in ended.stdout


def test_on_paper_a_round_takes_its_bytes_and_messages() -> None:
    size = 4 * count_parameters(ByteTransformer())
    law = 2 * (HOSTS - 1) * size / HOSTS
    facts = on_paper(1e7, 0.1)
    assert predict(ddp(), facts).bytes == law
    assert predict(local_sgd(8), facts).bytes == law / 8
    seconds = predict(local_sgd(1), facts).seconds
    assert seconds == pytest.approx(0.1 + 2 * ONE_WAY + 8 * law / 1e7)


def test_sent_adds_up_rounds_and_divides_by_steps() -> None:
    rounds = Rounds(first=4, last=8, every=4, bytes=300), Rounds(10, 10, 0, 100)
    assert sent(replace(ROW, rounds=rounds)) == (2 * 300 + 100) / 10
    assert sent(ROW) == 0


def test_training_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(ROW, recipe="ddp()", status="failed", error="rank 1: exit code 3")

    def run(*_: Any) -> Iterator[Result]:
        for row in (ROW, failed):
            yield Result((row,), {}, {}, {}, "")

    monkeypatch.setattr(slow_network.runner, "run", run)
    results = train(["local_sgd(4)", "ddp()"], 1e8, steps=1)
    assert next(results).rows == (ROW,)
    with pytest.raises(RuntimeError, match=r"ddp\(\) failed: rank 1: exit code 3"):
        next(results)


@pytest.mark.parametrize(
    ("recipe", "rate", "said"), [("dpp()", 1e8, "no recipe 'dpp'"), ("ddp()", 1.0, "bandwidth")]
)
def test_training_refuses_what_cannot_be(recipe: str, rate: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        next(train([recipe], rate, steps=1))
