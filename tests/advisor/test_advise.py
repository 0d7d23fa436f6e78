"""What `laconic.advise` and ``laconic advise`` recommend, why, and what they refuse."""

from __future__ import annotations

import json
import math
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
from laconic.algorithms.parse import parse_recipe, qualified
from laconic.auto import TIE, Auto, choose
from laconic.cli import main
from laconic.predict import BACKWARD, Facts, Net, predict

TEXT = Facts(4, ((845, 1024),), 4, 0.15, 100e6, 1e-3)
MODEL = facts_from(params=125 * 10**6, step_time=0.9, bandwidth=1e8, one_way=5e-3, nodes=8)
SLOW = replace(TEXT, compute=0.45, rate=20e6, computes=(0.15, 0.15, 0.15, 0.45))


def test_ddp_is_kept_where_another_gains_little_and_left_on_a_slow_network() -> None:
    fast = advice_on(replace(TEXT, rate=1e11, one_way=1e-5))
    assert fast.recommendation == "ddp()" and fast.reason.startswith("Keep ddp(): ")
    assert fast.code == "sync = laconic.attach(model, optimizer, laconic.ddp())"
    slow = advice_on(replace(TEXT, rate=1e6)).recommendation
    assert slow.startswith(("streaming_diloco(", "sparse_loco("))
    rates = [10 ** (k / 5) for k in range(42, 56)]
    found = [advice_on(replace(TEXT, rate=rate, one_way=1e-5)) for rate in rates]
    kept = [a for a in found if a.recommendation == "ddp()"]
    assert any(max(row.progress for row in a.rows) > 1 for a in kept)
    for a in found:
        measured = [row for row in a.rows if not row.steps_from.startswith("assumed")]
        best = min(row.seconds * row.steps for row in measured)
        assert a.row.seconds * a.row.steps <= (1 + TIE) * best
        assert (a.recommendation == "ddp()") == (a.rows[0].seconds <= (1 + TIE) * best)


def grid() -> Iterator[Facts]:
    """Facts of many models and networks: of all that can be combined, one in eleven."""
    known = product(
        *((2, 4, 16), (10**5, 10**7, 10**9), (0.05, 1.0)),
        *((1e6, 3e7, 1e9, 1e11), (1e-5, 5e-2), (0, 1e-3)),
    )
    for workers, elements, compute, rate, latency, loss in islice(known, 0, None, 11):
        yield Facts(workers, ((elements // 1000, 1000),), 4, compute, rate, latency, loss)
    yield facts_from(
        params=10**8, step_time=0.5, one_way=0.01, nodes=4, bandwidth=1e9, nprocs_per_node=8
    )
    yield SLOW
    yield replace(TEXT, rate=2e6, rates=(2e7, 2e7, 2e6, 2e7))


def test_it_recommends_what_auto_would_choose_and_real_alternatives() -> None:
    chosen = set()
    for facts in grid():
        advice = advice_on(facts)
        assert advice.recommendation == choose(Auto(), facts, None, {})[0]
        chosen.add(advice.recommendation.partition("(")[0])
        assert len(advice.alternatives) <= 5 and advice.recommendation not in advice.alternatives
        assert "ddp()" in (advice.recommendation, advice.alternatives[0])
        rows = {row.recipe: row for row in advice.rows}
        assert set(advice.alternatives) <= set(rows) and len(rows) == len(advice.rows)
        kinds = [(t.partition("(")[0], "codec=" in t) for t in advice.alternatives if t != "ddp()"]
        assert len(set(kinds)) == len(kinds), "the best of each kind"
        for text in rows:
            assert isinstance(parse_recipe(text), tuple)
    assert chosen == {"ddp", "local_sgd", "streaming_diloco"}
    own = ["power_sgd(1)", "power_sgd(2)"]
    assert advice_on(TEXT, own).alternatives[:3] == (*own, "ddp()")
    (row,) = (r for r in advice_on(TEXT, ["ddp()"]).rows if r.recipe == "ddp()")
    assert row.own, "an own recipe that is compared anyway is shown once"


def pasted(code: str) -> la.Synchronizer:
    model = nn.Linear(3, 2)
    known = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(code, {"laconic": la}, known)
    sync = known["sync"]
    assert isinstance(sync, la.Synchronizer)
    return sync


@pytest.mark.parametrize(
    ("code", "recipe"),
    [
        *(
            (a.code, a.recommendation)
            for a in (advice_on(TEXT), advice_on(replace(TEXT, rate=1e6)))
        ),
        *(
            (f"sync = laconic.attach(model, optimizer, {qualified(text)})", text)
            for text in ("power_sgd", " sgp ", "slowmo(sgp, 48)", advice_on(SLOW).alternatives[1])
        ),
    ],
)
def test_the_code_can_be_pasted(code: str, recipe: str) -> None:
    sync = la.simulate(lambda rank: pasted(code), workers=4)[0]
    assert sync.recipe == parse_recipe(recipe)


@pytest.mark.parametrize(
    ("own", "steps", "source"),
    [
        ("ddp(codec='int8')", "1.00", "measured (benchmarks.factors)"),
        ("ddp(codec='bfloat16')", "~1.00", "assumed equal to Int8 gradients"),
        ("ddp(codec='int4')", "1.02", "measured (benchmarks.factors)"),
        ("streaming_diloco(8, outer='muon')", "1.00", "measured (benchmarks.factors)"),
        ("streaming_diloco(16)", "~1.50", "taken from delay=1"),
        ("streaming_diloco(12, outer='muon')", "~1.03", "interpolated between measured"),
        ("streaming_diloco(256)", "~1.82", "extrapolated from streaming_diloco(64)"),
        ("local_sgd(16)", "~1.50", "assumed equal to streaming_diloco(16)"),
        ("diloco(16, pace='own')", "~1.50", "assumed equal to streaming_diloco(16)"),
        ("power_sgd(2)", "~1.47", "assumed equal to power_sgd(4, codec='int8')"),
        ("sparse_loco(16)", "~1.50", "assumed equal to streaming_diloco(16)"),
        ("easgd(16)", "?", "not known"),
    ],
)
def test_it_is_told_where_steps_are_from(own: str, steps: str, source: str) -> None:
    """What was not measured is marked, and what is unknown is not guessed."""
    advice = advice_on(MODEL, [own])
    (row,) = (row for row in advice.rows if row.recipe == own)
    assert row.own and (source in row.steps_from or steps == "?")
    lines = str(advice).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{own} "))
    assert lines[at].split()[-2] == steps and (lines[at].split()[-1] == "?") == (steps == "?")
    assert steps[0] != "~" or source.partition(" ")[0] in lines[at + 1]


def test_steps_grow_with_the_period() -> None:
    texts = [f"local_sgd({h})" for h in (4, 16, 64, 256)]
    rows = {row.recipe: row for row in advice_on(MODEL, texts).rows}
    found = [rows[text].steps for text in texts]
    assert found[0] > 1 and found == sorted(set(found))


def test_it_says_what_the_steps_were_measured_with() -> None:
    said = str(advice_on(MODEL))
    assert "4 workers that train a transformer of 865,280 parameters on text" in said
    assert "Your model is 144 times as large" in said
    assert "the outer step in Muon's direction" in said, "what is free is among the assumptions"
    assert "the outer step in Muon's" not in str(advice_on(replace(MODEL, muon=False)))
    quality = next(row.quality for row in advice_on(MODEL).rows if row.recipe == "diloco(256)")
    assert quality.startswith("in long runs as good as synchronous training")


@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("elements", [10**6, 125 * 10**6, 10**9])
def test_the_rule_of_the_page_on_choosing_is_what_it_recommends(elements: int, muon: bool) -> None:
    """``docs/choose.md``: the shortest period in which the model can be sent in four bits, and a
    delay that covers one of four fragments."""
    step, nodes = 0.9, 8
    periods = (8, 12, 16, 24, 32, 48, 64) if muon else (8, 16, 32, 64)
    for ratio in (25, 40, 50, 90, 100, 140, 220, 300, 420):  # of sending to backward
        sending = ratio * BACKWARD * step
        rate = 2 * (nodes - 1) / nodes * 32 * elements / sending
        facts = Facts(nodes, ((elements // 1000, 1000),), 4, step, rate, 1e-5, muon=muon)
        period = next(p for p in periods if p * step >= 1.4 * sending / 8)
        delay = math.ceil((1.25 * sending / 32 + step / 2) / step)
        recipe = advice_on(facts).recommendation
        assert recipe.startswith(f"streaming_diloco({period}, delay={delay}"), (ratio, recipe)


def test_the_example_of_the_page_on_choosing() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "choose.md").read_text().split())
    advice = advice_on(MODEL, ["streaming_diloco(8, delay=4, outer='muon')"])
    assert f"`{advice.recommendation}`, at 0.9 s a step" in page
    assert advice.row.seconds == pytest.approx(0.9)
    (short,) = (row for row in advice.rows if row.own)
    assert "With a period of 8, a step would take 1.6 s" in page
    assert short.seconds == pytest.approx(1.6, abs=0.05)


# -- unequal workers and networks ----


def test_a_slow_worker_is_named_and_recipes_at_own_pace_are_compared() -> None:
    found = advice_on(SLOW, computes=SLOW.computes)
    (slow,) = found.slow
    assert (slow.rank, slow.what) == (3, "steps") and slow.factor == pytest.approx(3)
    assert slow.gain == pytest.approx((3 + 3 + 3 + 1) / 4)
    assert slow.ddp == found.rows[0].seconds
    assert slow.ddp_without == pytest.approx(predict(la.ddp(), replace(SLOW, compute=0.15)).seconds)
    own = [row for row in found.rows if "pace='own'" in row.recipe]
    assert "diloco(16, quorum=3, grace=0.9, pace='own')" in [row.recipe for row in own]
    assert found.alternatives[0] == "ddp()" and "pace='own'" in found.alternatives[1]
    assert max(row.share for row in own) <= 1, "of the speed at which nobody waits"
    assert "Rank 3 computes 3 times as long as the median rank" in found.reason
    assert json.loads(found.to_json())["slow"][0]["rank"] == 3
    two = advice_on(replace(SLOW, workers=2, computes=(0.15, 0.45)))
    assert "Rank 1 computes 3 times as long as rank 0: " in two.reason
    assert any("pace='own'" in row.recipe for row in two.rows)
    assert not any("quorum=1" in row.recipe for row in two.rows)
    equal = advice_on(replace(SLOW, computes=()), computes=(0.45, 0.4, 0.44, 0.45))
    assert not equal.slow and not any("quorum" in row.recipe for row in equal.rows)


def test_a_slow_rank_of_a_larger_worker_or_a_slow_network_is_named() -> None:
    facts = replace(SLOW, workers=2, ranks=2, computes=())
    found = advice_on(facts, computes=(0.15, 0.15, 0.15, 0.45))
    assert found.slow[0].rank == 3 and not any("quorum" in row.recipe for row in found.rows)
    with pytest.raises(ValueError, match="workers of one rank"):
        advice_on(facts, ["diloco(16, quorum=2)"])
    with pytest.raises(ValueError, match="at most the number of workers, 4, not 5"):
        advice_on(TEXT, ["diloco(16, quorum=5)"])
    net = replace(TEXT, rate=2e6, nets={"workers": Net(2e6, 1e-3)}, rates=(20e6, 20e6, 2e6, 20e6))
    found = advice_on(net)
    (slow,) = found.slow
    assert (slow.rank, slow.what) == (2, "network") and slow.factor == pytest.approx(10)
    fast = replace(net, rate=20e6, rates=(), nets={"workers": Net(20e6, 1e-3)})
    assert slow.ddp_without == pytest.approx(predict(la.ddp(), fast).seconds) and slow.gain is None
    assert "The network of rank 2 is 10 times slower" in found.reason


# -- the command ----

NUMBERS = [
    "--params", "1.3B", "--step-time", "0.9s", "--bandwidth", "1gbit", "--latency", "60ms",
    "--nodes", "8",
]  # fmt: skip


def but(option: str, value: str) -> list[str]:
    """The same with another value of this option."""
    at = NUMBERS.index(option) + 1
    return [*NUMBERS[:at], value, *NUMBERS[at + 1 :]]


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["advise", *NUMBERS]) == 0
    short = capsys.readouterr().out
    lines = short.splitlines()
    facts = facts_from(params=1_300_000_000, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8)
    advice = advice_on(facts)
    match = re.match(
        r"Use (.+): ([\d.]+) s per step, (\d+)% of the speed without communication "
        r"\(ddp\(\): ([\d.]+) s\)\.",
        lines[0],
    )
    assert match and match[1] == advice.recommendation
    assert float(match[2]) == pytest.approx(advice.row.seconds, rel=5e-3)
    assert float(match[3]) == round(100 * advice.row.share)
    assert float(match[4]) == pytest.approx(advice.rows[0].seconds, rel=5e-3)
    assert "import laconic" in short and advice.code in short and "sync.finish()" in short
    assert all(f"\n{text} " in short for text in advice.alternatives)
    assert "sparse_loco" not in short, "more steps than twice as many: no alternative"
    picture = tmp_path / "advice.png"
    options = ["--plot", str(picture), "--recipe", "power_sgd(2)", "--all", "--loss", "0.1%"]
    assert main(["advise", *NUMBERS, *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1,300,000,000 parameters of 4 bytes" in said and "0.1% of packets lost" in said
    assert all(f" {name}(" in said for name in ("power_sgd", "sparse_loco", "sgp"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advice_needs_no_package_but_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "rich", "rich.console", "numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["advise", *NUMBERS, "--all"]) == 0
    assert capsys.readouterr().out.startswith("Use ")
    assert main(["advise", *NUMBERS, "--plot", "advice.png"]) == 2
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *NUMBERS, "--nprocs-per-node", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told)[:5] == ["facts", "rows", "guide", "recommendation", "code"]
    facts = facts_from(
        params=1_300_000_000, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8, nprocs_per_node=8
    )
    row = next(row for row in told["rows"] if row["recipe"] == "local_sgd(16)")
    assert row["seconds"] == predict(la.local_sgd(16), facts).seconds
    assert {"period", "megabytes", "memory", "steps", "steps_from", "quality"} <= set(row)
    assert told["guide"][0]["pays_here"] is True and told["peak"] is None
    assert told["facts"]["parameters"] == 1_300_000_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--params, --step-time, --bandwidth, --latency, --nodes"),
        (NUMBERS[2:], "needs --params"),
        (but("--params", "many"), "not a count: 'many'"),
        (but("--params", "1300000000B"), "params must be at most 1e+13"),
        (but("--step-time", "0.9x"), "not a duration"),
        (but("--bandwidth", "100"), "give a positive number with bit, kbit, mbit or gbit"),
        (but("--latency", "5"), "give 0, or a positive number with us, ms, s, min, h or d"),
        (but("--nodes", "1"), "nodes"),
        ([*NUMBERS, "--dtype", "int3"], "'float32'"),
        ([*NUMBERS, "--backward-share", "2"], "backward-share"),
        ([*NUMBERS, "--local-bandwidth", "1gbit"], "nprocs-per-node > 1"),
        ([*NUMBERS, "--hosts", "3"], "--hosts applies only to a measurement"),
        ([*NUMBERS, "--recipe", "nonsense"], "nonsense"),
        ([*NUMBERS, "--plot", "advice.docx"], "png"),
        ([*NUMBERS, "--loss", "100%"], "less than 1"),
        ([*NUMBERS, "--workload", "text"], "is measured with --workload"),
        (["--workload", "chess"], "digits"),
        (["--workload", "digits", "--hosts", "1"], "cannot communicate"),
        (["--workload", "digits", "--recipe", "nonsense"], "nonsense"),
        (["--workload", "digits", "--slow-host", "4=2"], "no host 4"),
        (["--workload", "digits", "--slow-host", "1=0.5"], "the factor of a slow host"),
        (["--workload", "digits", "--bandwidth-host", "1=fast"], "not a rate"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["advise", *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out
