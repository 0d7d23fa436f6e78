"""What `laconic.advise` and ``laconic advise`` recommend, and why."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic as la
from laconic.advisor import advice_on
from laconic.advisor.numbers import facts_from
from laconic.algorithms.auto import Auto
from laconic.algorithms.parse import parse_recipe
from laconic.cli import main
from laconic.policy.choice import TIE, choose
from laconic.policy.facts import Facts, Net
from laconic.policy.predict import predict

TEXT = Facts(4, ((845, 1024),), 4, 0.15, 100e6, 1e-3)
OWN_STEPS = (
    "outer_step(streaming_diloco(12, delay=3, merge='loscar'), 4, outer='muon', average=False)"
)
MODEL = facts_from(params=125 * 10**6, step_time=0.9, bandwidth=1e8, one_way=5e-3, workers=8)
SLOW = replace(TEXT, compute=0.45, rate=20e6, computes=(0.15, 0.15, 0.15, 0.45))


def test_ddp_is_kept_where_another_gains_little_and_left_on_a_slow_network() -> None:
    rates = [1e6, *(10 ** (k / 5) for k in range(42, 56, 3))]
    found = [advice_on(replace(TEXT, rate=rate, one_way=1e-5)) for rate in rates]
    for a in found:
        measured = [row for row in a.rows if not row.steps_from.startswith("assumed")]
        best = min(row.seconds * row.steps for row in measured)
        assert a.row.seconds * a.row.steps <= (1 + TIE) * best
        assert (a.recommendation == "ddp()") == (a.rows[0].seconds <= (1 + TIE) * best)
    assert found[0].recommendation.startswith("streaming_diloco(")
    assert found[-1].recommendation == "ddp()"
    for a in (found[0], found[-1]):  # the code can be pasted

        def pasted(rank: int, code: str = a.code) -> la.Synchronizer:
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            known: dict[str, la.Synchronizer] = {}
            exec(code, {"laconic": la, "model": model, "optimizer": optimizer}, known)
            return known["sync"]

        assert la.simulate(pasted, workers=4)[0].recipe == parse_recipe(a.recommendation)


def grid() -> Iterator[Facts]:
    """Facts of many models and networks: of all that can be combined, one in 23."""
    known = product(
        *((2, 4, 16), (10**5, 10**7, 10**9), (0.05, 1.0)),
        *((1e6, 3e7, 1e9, 1e11), (1e-5, 5e-2), (0, 1e-3)),
    )
    for workers, elements, compute, rate, latency, loss in islice(known, 0, None, 23):
        yield Facts(workers, ((elements // 1000, 1000),), 4, compute, rate, latency, loss)
    yield replace(MODEL, ranks=8)
    yield SLOW
    yield replace(TEXT, rate=2e6, rates=(2e7, 2e7, 2e6, 2e7))


def test_it_recommends_what_auto_would_choose_and_real_alternatives() -> None:
    chosen = set()
    for facts in grid():
        advice = advice_on(facts)
        assert advice.recommendation == choose(Auto(), facts, None, {})[0]
        chosen.add(advice.recommendation.partition("(")[0])
        assert "ddp()" in (advice.recommendation, advice.alternatives[0])
        rows = {row.recipe: row for row in advice.rows}
        assert {*advice.alternatives} <= {*rows} - {advice.recommendation}
        kinds = [(t.partition("(")[0], "codec=" in t) for t in advice.alternatives if t != "ddp()"]
        assert len(set(kinds)) == len(kinds), "the best of each kind"
        assert all(isinstance(parse_recipe(text), tuple) for text in rows)
    assert chosen == {"ddp", "local_sgd", "streaming_diloco", "outer_step"}
    own = ["power_sgd(1)", "power_sgd(2)"]
    assert advice_on(TEXT, own).alternatives[:3] == (*own, "ddp()")
    (row,) = (r for r in advice_on(TEXT, ["ddp()"]).rows if r.recipe == "ddp()")
    assert row.own, "an own recipe that is compared anyway is shown once"


def test_it_is_told_where_steps_are_from() -> None:
    """What was not measured is marked, and what is unknown is not guessed."""
    cases = {
        "ddp(codec='int4')": ("1.02", "measured (benchmarks.factors)"),
        OWN_STEPS: ("~1.00", "interpolated between measured"),
        "streaming_diloco(12, outer='muon')": ("~0.98", "interpolated between measured"),
        "outer_step(ddp(), 8, outer='muon')": ("~0.75", "a cautious number: 0.56 and 0.60"),
        "outer_step(ddp(), 4, outer='muon')": ("~0.70", "no gain on text in one of 3,072"),
        "outer_step(ddp(), 8)": ("?", ""),
        "streaming_diloco(256)": ("~1.82", "extrapolated from a period of 64"),
        "local_sgd(16)": ("~1.50", "assumed equal to streaming_diloco(16)"),
        "easgd(16)": ("?", ""),
    }
    for recipe, (steps, source) in cases.items():
        advice = advice_on(MODEL, [recipe])
        (row,) = (row for row in advice.rows if row.recipe == recipe)
        assert row.own and source in row.steps_from
        (line,) = (line for line in str(advice).splitlines() if line.startswith(f"{recipe} "))
        assert line.split()[-2] == steps
        assert "4 workers that train a transformer of 865,280 parameters on text" in str(advice)
        assert "the recipe nearest to DDP of those within 2% of the most progress" in str(advice)
    texts = [f"local_sgd({h})" for h in (4, 16, 64, 256)]
    found = [r.steps for t in texts for r in advice_on(MODEL, texts).rows if r.recipe == t]
    assert found[0] > 1 and found == sorted({*found}), "they grow with the period"


def test_the_example_of_the_page_on_choosing() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "choose.md").read_text().split())
    advice = advice_on(MODEL, ["streaming_diloco(8, delay=4, outer='muon')"])
    assert f"`{advice.recommendation}`, at 0.9 s a step" in page
    assert advice.row.seconds == pytest.approx(0.9)
    (short,) = (row for row in advice.rows if row.own)
    assert "With a period of 8, a step would take 1.6 s" in page
    assert short.seconds == pytest.approx(1.6, abs=0.05)


def test_a_slow_worker_rank_or_network_is_named_and_own_pace_is_compared() -> None:
    found = advice_on(SLOW, computes=SLOW.computes)
    (slow,) = found.slow
    assert slow.startswith("Rank 3 computes 3 times as long as the median rank")
    assert "2.5 times as many steps per second" in slow and slow in found.reason  # (3+3+3+1) / 4
    own = [row for row in found.rows if "pace='own'" in row.recipe]
    assert "diloco(16, quorum=3, grace=0.9, pace='own')" in [row.recipe for row in own]
    assert found.alternatives[0] == "ddp()" and "pace='own'" in found.alternatives[1]
    assert max(row.share for row in own) <= 1, "of the speed at which nobody waits"
    two = advice_on(replace(SLOW, workers=2, computes=(0.15, 0.45)))
    assert any("pace='own'" in row.recipe for row in two.rows)
    assert not any("quorum=1" in row.recipe for row in two.rows)
    equal = advice_on(replace(SLOW, computes=()), computes=(0.45, 0.4, 0.44, 0.45))
    assert not equal.slow and not any("quorum" in row.recipe for row in equal.rows)
    larger = replace(SLOW, workers=2, ranks=2, computes=())
    found = advice_on(larger, computes=SLOW.computes)
    assert "Rank 3 " in found.slow[0] and not any("quorum" in row.recipe for row in found.rows)
    with pytest.raises(ValueError, match="workers of one rank"):
        advice_on(larger, ["diloco(16, quorum=2)"])
    net = replace(TEXT, rate=2e6, nets={"workers": Net(2e6, 1e-3)}, rates=(20e6, 20e6, 2e6, 20e6))
    (slow,) = advice_on(net).slow
    assert slow.startswith("Rank 2 sends 10 times as slowly as the median rank")


# -- the command ----

NUMBERS = ["advise", "--params", "1.3B", "--step-time", "0.9s", "--bandwidth", "1gbit",
           "--latency", "60ms", "--workers", "8"]  # fmt: skip
KNOWN = {
    "params": 1_300_000_000, "step_time": 0.9, "bandwidth": 1e9, "one_way": 0.03, "workers": 8,
}  # fmt: skip


def test_the_answer_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        for name in ("matplotlib", "matplotlib.figure", "rich", "rich.console", "numpy"):
            patch.setitem(sys.modules, name, None)  # it needs torch alone
        assert main(NUMBERS) == 0
    short = capsys.readouterr().out
    advice = advice_on(facts_from(**KNOWN))  # type: ignore[arg-type]
    numbers = r"Use (.+): ([\d.]+) s per step, (\d+)% of the speed .*\(ddp\(\): ([\d.]+) s\)"
    match = re.match(numbers, short)
    assert match and match[1] == advice.recommendation
    assert float(match[2]) == pytest.approx(advice.row.seconds, rel=5e-3)
    assert float(match[3]) == round(100 * advice.row.share)
    assert float(match[4]) == pytest.approx(advice.rows[0].seconds, rel=5e-3)
    assert advice.code in short and all(f"\n{text} " in short for text in advice.alternatives)
    assert main([*NUMBERS, "power_sgd(2)", "--all", "--loss", "0.1%"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}(" in said for name in ("power_sgd", "diloco", "sgp"))
    assert main([*NUMBERS, "--ranks", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    row = next(row for row in told["rows"] if row["recipe"] == "local_sgd(16)")
    facts = facts_from(**KNOWN, ranks=8)  # type: ignore[arg-type]
    assert row["seconds"] == predict(la.local_sgd(16), facts).seconds
    assert {"megabytes", "memory", "steps", "steps_from", "quality"} <= {*row}
