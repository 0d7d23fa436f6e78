"""Lost packets, and workers and networks of different speeds, in predictions and advice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import laconic as la
from laconic.advisor import advice_on, measure
from laconic.advisor.bench import Bench
from laconic.advisor.choices import choices
from laconic.advisor.numbers import facts_from
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.parse import parse_recipe, qualified
from laconic.cli import main
from laconic.links import Throttled
from laconic.links.cost import Cost
from laconic.links.link import Sent
from laconic.links.null import NullLink
from laconic.predict import Facts, Net, predict, work_key
from laconic.probe import own_rates, unequal_hosts, unequal_workers

from tests.support.clock import Clock, controlled

BITS = 32 * 1200
SLOW_WORKER = Facts(3, ((1200,),), 4, 2.0, BITS, 0.5, computes=(1.0, 1.0, 2.0))
"""A message takes a second, and rank 0's share of a round 4 s and two latencies: 5 s."""


def seconds(text: str, facts: Facts) -> float:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    return predict(recipe, facts).seconds


# -- predictions ----


def test_rank_0_carries_what_all_others_send() -> None:
    assert QuorumMean().busiest(1000, 4, 5) == Cost(2 * 4 * 4000, 2)
    assert QuorumMean().cost(1000, 4, 5) == Cost(2 * 4 * 4000 // 5, 2), "the mean over the ranks"
    equal = replace(SLOW_WORKER, compute=1.0, computes=())
    assert seconds("diloco(4, quorum=3)", equal) == pytest.approx(1 + 5 / 4)
    found = predict(la.diloco(4, quorum=3), equal)
    assert found.bytes == pytest.approx(2 * 2 * 4800 / 3 / 4) and found.hidden == 0
    assert found.exposed == pytest.approx(5 / 4) and found.busy == pytest.approx(5 / 9)


def test_at_own_pace_a_step_takes_the_harmonic_mean_and_the_round() -> None:
    # 4, 4 and 2 steps in 4 s, and then 5 s
    found = predict(la.diloco(4, pace="own"), SLOW_WORKER)
    assert found.seconds == pytest.approx(9 / (10 / 3))
    assert SLOW_WORKER.alone == pytest.approx(1.2) and found.exposed == pytest.approx(1.5)
    assert seconds("diloco(4)", SLOW_WORKER) == pytest.approx(2 + (8 / 6 + 1) / 4)
    long = seconds("diloco(40000, pace='own')", SLOW_WORKER)
    assert long == pytest.approx(SLOW_WORKER.alone, rel=1e-3)


def test_steps_at_own_pace_are_whole() -> None:
    # 4, 4 and 3 steps, not 3.33: in 4, 4 and 3.6 s
    facts = replace(SLOW_WORKER, compute=1.2, computes=(1.0, 1.0, 1.2))
    assert seconds("diloco(4, pace='own')", facts) == pytest.approx(9 / (11 / 3))


def test_a_round_closes_with_its_quorum_and_grace() -> None:
    # rank 2 arrives after 8 s, the others after 4
    late = 3 / (4 / 9 + 4 / 9 + 4 / 13)
    assert seconds("diloco(4, quorum=2)", SLOW_WORKER) == pytest.approx(late)
    a_little = 3 / (4 / 10 + 4 / 10 + 4 / 13)
    assert seconds("diloco(4, quorum=2, grace=1)", SLOW_WORKER) == pytest.approx(a_little)
    for text in ("diloco(4, quorum=2, grace=9)", "diloco(4, quorum=3)"):
        assert seconds(text, SLOW_WORKER) == pytest.approx(13 / 4)


def test_a_slow_network_is_waited_for_unless_the_quorum_is_reached() -> None:
    facts = Facts(3, ((1200,),), 4, 1.0, BITS / 10, 0.5, rates=(BITS, BITS, BITS / 10))
    # rank 2 sends and receives a message in 20 s, besides two latencies
    assert seconds("diloco(4, quorum=3)", facts) == pytest.approx((4 + 21) / 4)
    some = 3 / (4 / 9 + 4 / 9 + 4 / 25)
    assert seconds("diloco(4, quorum=2)", facts) == pytest.approx(some)
    first = replace(facts, rates=(BITS / 10, BITS, BITS))
    assert seconds("diloco(4, quorum=2)", first) == pytest.approx((4 + 41) / 4), "all need rank 0"


def test_waiting_and_work_are_part_of_a_round_with_a_quorum() -> None:
    recipe = la.diloco(4, quorum=2, grace=1.0)
    facts = replace(SLOW_WORKER, compute=1.0, computes=(), skew=0.5)
    work = {work_key(recipe[0]): 3.0}
    assert work_key(la.diloco(8, pace="own")[0]) in work, "the processors do the same"
    assert predict(recipe, replace(facts, work=work)).seconds == pytest.approx(1 + (5 + 3 + 1) / 4)


def test_lost_packets_from_numbers() -> None:
    known = {"params": 10**6, "step_time": 0.1, "bandwidth": 1e8, "one_way": 0.05, "nodes": 4}
    facts = facts_from(**known, loss=0.001)  # type: ignore[arg-type]
    # two messages of 3 MB: in its last round trip, 0.1 s, each rank sends 1.25 MB, 864 packets
    delay = 2 * (1.25 * 0.1 - 0.1 / 2) * (1 - 0.999 ** (4 * 864))
    without = facts_from(**known)  # type: ignore[arg-type]
    more = predict(la.local_sgd(1), facts).seconds - predict(la.local_sgd(1), without).seconds
    assert more == pytest.approx(delay)
    with pytest.raises(ValueError, match="loss must be from 0 to less than 1"):
        facts_from(**known, loss=1.0)  # type: ignore[arg-type]


# -- advice ----

TEXT = Facts(
    *(4, ((845, 1024),), 4, 0.45, 20e6, 1e-3),
    computes=(0.15, 0.15, 0.15, 0.45),
)


def test_a_slow_worker_is_named_and_recipes_at_own_pace_are_compared() -> None:
    found = advice_on(TEXT, computes=TEXT.computes)
    (slow,) = found.slow
    assert (slow.rank, slow.what, slow.factor) == (3, "steps", pytest.approx(3))
    assert slow.gain == pytest.approx((3 + 3 + 3 + 1) / 4)
    assert slow.ddp == found.rows[0].seconds
    assert slow.ddp_without == pytest.approx(seconds("ddp()", replace(TEXT, compute=0.15)))
    own = [row.recipe for row in found.rows if "pace='own'" in row.recipe]
    assert own[2] == "diloco(16, quorum=3, grace=0.9, pace='own')" and len(own) == 8
    assert own[3] == "diloco(16, quorum=3, grace=0.9, pace='own', codec='int4')"
    assert found.alternatives[0] == "ddp()" and found.alternatives[1] in own
    assert "Rank 3 computes 3 times as long as the median rank" in found.reason
    assert "all together would take 2.5 times as many steps per second" in found.reason
    quality = next(r.quality for r in found.rows if r.recipe == found.alternatives[1])
    assert quality.endswith("end the loop by time or by data")
    assert json.loads(found.to_json())["slow"][0]["rank"] == 3
    shares = [row.share for row in found.rows if row.recipe in own]
    assert max(shares) <= 1, "of the speed at which nobody waits"


def test_what_is_offered_at_own_pace_can_be_pasted() -> None:
    text = advice_on(TEXT).alternatives[1]
    code = f"sync = laconic.attach(model, optimizer, {qualified(text)})"

    def one(rank: int) -> la.Recipe:
        model = nn.Linear(3, 2)
        known = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        exec(code, {"laconic": la}, known)
        sync = known["sync"]
        assert isinstance(sync, la.Synchronizer)
        return sync.recipe

    assert la.simulate(one, workers=4)[0] == parse_recipe(text)


def test_two_workers_have_no_quorum_of_one() -> None:
    facts = replace(TEXT, workers=2, computes=(0.15, 0.45))
    own = [c.text for c in choices(facts) if "pace='own'" in c.text]
    assert own[0] == "diloco(4, pace='own')"
    reason = advice_on(facts).reason
    assert "Rank 1 computes 3 times as long as rank 0: " in reason and "median" not in reason


def test_nothing_is_said_of_equal_workers() -> None:
    found = advice_on(replace(TEXT, computes=()), computes=(0.45, 0.4, 0.44, 0.45))
    assert not found.slow and "Rank" not in found.reason
    assert not any("quorum" in row.recipe for row in found.rows)


def test_a_slow_rank_of_a_larger_worker_is_named_without_a_quorum() -> None:
    facts = replace(TEXT, workers=2, ranks=2, computes=())
    found = advice_on(facts, computes=(0.15, 0.15, 0.15, 0.45))
    assert found.slow[0].rank == 3
    assert not any("quorum" in row.recipe for row in found.rows)
    with pytest.raises(ValueError, match="workers of one rank"):
        advice_on(facts, ["diloco(16, quorum=2)"])
    with pytest.raises(ValueError, match="at most the number of workers, 4, not 5"):
        advice_on(TEXT, ["diloco(16, quorum=5)"])


def test_a_slow_network_is_named() -> None:
    nets = {"workers": Net(2e6, 1e-3)}
    facts = replace(TEXT, computes=(), compute=0.15, rate=2e6, nets=nets)
    found = advice_on(replace(facts, rates=(20e6, 20e6, 2e6, 20e6)))
    (slow,) = found.slow
    assert (slow.rank, slow.what, slow.factor) == (2, "network", pytest.approx(10))
    fast = replace(facts, rate=20e6, nets={"workers": Net(20e6, 1e-3)})
    assert slow.ddp_without == pytest.approx(seconds("ddp()", fast)) and slow.gain is None
    assert "The network of rank 2 is 10 times slower than the median rank's" in found.reason


# -- measured ----


def test_what_counts_as_unequal() -> None:
    assert unequal_workers(torch.tensor([1.0, 1.0, 1.25]))
    assert not unequal_workers(torch.tensor([1.0, 1.0, 1.2]))
    speeds = torch.tensor([[0.0, 5.0, 4.0], [5.0, 0.0, 4.0], [1.0, 1.0, 0.0]])
    assert own_rates(speeds).tolist() == [5.0, 5.0, 1.0]
    assert unequal_hosts(own_rates(speeds))
    assert not unequal_hosts(torch.tensor([2.0, 2.0, 1.0]))


def test_loss_is_what_was_sent_again_of_this_measurement() -> None:
    bench = Bench(NullLink(2), NullLink(2), NullLink(1), torch.device("cpu"))
    before = {1: Sent(100, 1, 0, 0.0)}
    after = {1: Sent(300, 5, 0, 0.0)}
    assert measure._loss(bench, before, after) == pytest.approx(4 / 200)
    assert measure._loss(bench, {}, {}) == 0.0, "the system does not report it"


def slower(rank: int, clock: Clock) -> la.Advice:
    torch.manual_seed(rank)
    model = nn.Linear(40, 30)

    def step() -> None:
        nn.functional.mse_loss(model(torch.randn(8, 40)), torch.ones(8, 30)).backward()
        clock.sleep(0.03 if rank == 1 else 0.01)

    return la.advise(model, step, steps=4)


def test_a_slow_worker_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = controlled(monkeypatch)
    found, *_ = la.simulate(
        lambda rank: slower(rank, clock),
        workers=3,
        link=lambda link: Throttled(link, "20mbit", 0.0),
    )
    assert found.computes is not None and found.facts.computes == found.computes
    assert found.slow[0].rank == 1
    assert found.slow[0].factor == pytest.approx(3, rel=0.01)
    (own, *_) = (c for c in choices(found.facts) if "pace='own'" in c.text)
    assert all(work_key(r) in found.facts.work for r in own.recipe)


# -- the command ----


def test_loss_is_an_option_from_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--params", "1M", "--step-time", "0.1s", "--bandwidth", "100mbit", "--nodes", "4"]
    assert main(["advise", *numbers, "--latency", "100ms", "--loss", "0.1%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["loss"] == 0.001
    assert main(["advise", *numbers, "--latency", "100ms", "--loss", "0.1%"]) == 0
    assert "0.1% of packets lost" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--loss", "2"], "not a share"),
        (["--loss", "100%"], "less than 1"),
        (["--slow-host", "4=2"], "no host 4"),
        (["--slow-host", "1"], "HOST=VALUE"),
        (["--slow-host", "1=0.5"], "the factor of a slow host"),
        (["--bandwidth-host", "1=fast"], "not a rate"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["advise", "--workload", "digits", *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out
