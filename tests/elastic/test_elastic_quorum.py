"""Rounds with a quorum where workers come and go."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.links.elastic.faults import record
from laconic.links.polls import (
    ARRIVED,
    BUSY,
    CALLING,
    CALLS,
    POLL,
    Decision,
    Polls,
    Rules,
    Standing,
)

from tests.elastic.test_simulated_runs import left, only, plain, plan_at_random, program
from tests.support.elastic_runs import MANY, Run, train

OWN = "laconic.diloco(4, quorum=2, grace=0.5, pace='own', codec='int8')"
SECONDS = [1.0, 1.0, 1.0, 3.0, 1.0, 2.0]


def counted(quorum: int, ends: tuple[int, ...]) -> Any:
    """A worker whose steps each add the same to an element of its own. Returns where it begins, and
    how often that was added at the end, by element."""

    def worker(number: int) -> tuple[int, list[float]]:
        model = nn.Linear(len(ends), 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        recipe = laconic.diloco(2, 1.0, 0.0, quorum=quorum)
        sync = laconic.attach(model, optimizer, recipe, elastic=laconic.Elastic("simulated"))
        begun = sync.step
        while sync.step < ends[number]:
            model.zero_grad()
            x = torch.zeros(len(ends))
            x[number] = -1.0 - number  # equal gradients would be reported
            model(x).sum().backward()
            optimizer.step()
        sync.finish()
        counts = model.weight.flatten() / torch.arange(1.0, len(ends) + 1)
        return begun, counts.tolist()

    return worker


def test_a_worker_that_is_killed_counts_until_its_last_round() -> None:
    """Steps take the third worker three times as long. The second one ends when it arrives for the
    second time. Rounds: 2 s (first and second of 3), 6 s (first and third of 2); the first finishes
    then, and the third's last two steps make a round of its own."""
    plan, seconds = laconic.Faults(3, kill=((1, 4),)), [1.0, 1.0, 3.0]
    found = laconic.simulate(counted(2, (4, 4, 4)), faults=plan, step_seconds=seconds)
    assert found[1] is None and found[0] == found[2]
    assert found[0][1] == pytest.approx([2 / 3 + 2 / 2, 2 / 3, 2 / 2 + 2 / 2])


def test_a_newcomer_counts_from_its_first_round_on() -> None:
    """The first worker's state after 2 steps goes to a third one, whose first gradients count as
    zero: it takes part from the round at 4 s on, with the result of that before, and its one step
    that counts comes with the others' at 6 s."""
    plan, seconds = laconic.Faults(2, join=(2,)), [1.0, 1.0, 1.0]
    found = laconic.simulate(counted(2, (6, 6, 4)), faults=plan, step_seconds=seconds)
    assert [begun for begun, _ in found] == [0, 0, 2]
    values = only([{"x": x} for _, x in found], "x")
    assert values == pytest.approx([2 / 2 + 2 / 3 + 2 / 3] * 2 + [1 / 3])


@pytest.mark.parametrize(
    "recipe",
    [
        "laconic.diloco(4, quorum=2)",
        OWN,
        "laconic.streaming_diloco(4, 2, delay=0, quorum=1, grace=0.5)",
    ],
)
def test_workers_come_and_go(recipe: str) -> None:
    plan = laconic.Faults(4, kill=((2, 9), (0, 14)), join=(6, 13))
    found = laconic.simulate(program(recipe), faults=plan, step_seconds=SECONDS)
    assert [number for number, result in enumerate(found) if result is None] == [0, 2]
    present = left(found)
    assert [result["begun"] for result in present] == [0, 0, 6, 13]
    only(present, "values")
    assert only(present, "lost") == 2
    drawn = [sample for result in present for sample in result["drawn"]]
    assert len(drawn) == len(set(drawn)), "no sample twice among those that are left"
    assert found == laconic.simulate(program(recipe), faults=plan, step_seconds=SECONDS)


@pytest.mark.parametrize("seeds", [[1], pytest.param(range(20), marks=pytest.mark.slow)])
def test_plans_at_random(seeds: Any) -> None:
    for seed in seeds:
        plan = plan_at_random(seed)
        seconds = [1.0 + 0.3 * (number % 4) for number in range(plan.workers)]
        for recipe in ("laconic.diloco(8, quorum=2)", OWN):
            run = program(recipe, steps=80)
            found = laconic.simulate(run, faults=plan, step_seconds=seconds)
            killed = {worker for worker, _ in plan.kill}
            assert killed and all(found[w] is not None for w in range(4) if w not in killed)
            if left(found):  # a plan at random may kill them all
                only(left(found), "values")


@pytest.mark.parametrize("codec", ["", ", codec='int8'"])
def test_a_quorum_of_all_gives_the_bits_of_the_plain_recipe(codec: str) -> None:
    runs = []
    for quorum in ("", ", quorum=4"):
        train = program(f"laconic.diloco(4{codec}{quorum})", plain, steps=12)
        found = left(laconic.simulate(train, faults=laconic.Faults(4)))
        runs.append(only(found, "values"))
    assert runs[0] == runs[1]


def test_what_follows_from_a_poll() -> None:
    polls = Polls([Rules(2, 1.0)], [lambda speeds, ranks: [3] * len(ranks)])

    def say(*workers: tuple[int, float]) -> dict[str, Standing]:
        each = [Standing(s, 0, waited, 7, 1.0, (0.1,)) for s, waited in workers]
        found = [Standing.of(standing.row().tolist()) for standing in each]
        assert found == each
        return {str(number): standing for number, standing in enumerate(found)}

    one = say((ARRIVED, 9.0), (BUSY, 99.0), (BUSY, 0.0))
    assert polls.next_closing(one) is None
    assert polls.overdue(one, 8.0) == ["1"] and not polls.overdue(one, 10.0)
    two = say((ARRIVED, 9.0), (BUSY, 0.0), (ARRIVED, 0.25))
    assert polls.next_closing(two) == (0.75, 0), "the grace after the second"
    assert not polls.overdue(two, 8.0), "the round will close"
    assert polls.close(two, 0, 0.0).roster == ("0", "2")
    assert polls.next_closing(say((ARRIVED, 9.0), (CALLING, 0.5))) == (-0.5, 0), "nobody is missing"
    assert polls.next_closing(say((ARRIVED, 2.0))) == (-2.0, 0), "fewer are left than the quorum"
    assert polls.next_closing(say((CALLING, 2.0), (CALLING, 1.0))) == (-1.0, CALLS)


def test_recorded_closings_are_for_workers_that_stay() -> None:
    with pytest.raises(ValueError, match="neither come nor go"):
        laconic.simulate(counted(1, (2,)), faults=laconic.Faults(1), closings=[])


@pytest.mark.parametrize("how", [SIGKILL, pytest.param(SIGTERM, marks=pytest.mark.slow)])
def test_a_trace_repeats_processes_bit_for_bit(how: Any, tmp_path: Path) -> None:
    """One worker pauses, and holds up nobody; it is killed meanwhile, or leaves; another joins."""
    recipe, options = OWN, {"samples": 5000}
    with Run(recipe, 3, trace=str(tmp_path), **options) as run:
        gone = run.ready()[1]
        run.progress(2, 1)  # all wait for all in the first step
        paused = run.ask("pause", 2)
        run.progress(1, 12)
        if how == SIGTERM:
            paused.unlink()
        gone.send(how)
        run.workers[0].wait_for("view", workers=2)
        run.add()
        ids = [w.wait_for("ready")["id"] for w in run.workers if w is not gone]
        run.workers[0].wait_for("view", workers=3)
        run.progress(4, 12)
        events = run.done(gone)
    done = dict(zip(ids, events, strict=True))
    assert len({event["digest"] for event in events}) == 1
    trace = laconic.Trace(tmp_path)

    def repeat(number: int) -> str:
        said: list[dict[str, Any]] = []
        steps = done[trace.ids[number]]["step"] if trace.ids[number] in done else MANY
        at = recipe, steps, laconic.Elastic("simulated"), options, number, 0
        train(lambda event, **more: said.append(more), *at)
        return str(said[-1]["digest"])

    for id, digest in zip(trace.ids, laconic.simulate(repeat, faults=trace), strict=True):
        assert digest == (done[id]["digest"] if id in done else None)


def two_buckets(number: int, folder: Path | None) -> list[float]:
    """A worker with two buckets, whose steps each add (1 + number) / 64 to both. Records its trace
    in ``folder``. Returns the result of the latest round."""
    model = nn.ParameterList([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe, elastic = laconic.diloco(2, 1.0, 0.5, quorum=2), laconic.Elastic("simulated")
    sync: Any = laconic.attach(model, optimizer, recipe, elastic=elastic)
    if folder is not None:
        units = sync.driver.session.elastic.units
        units.note = partial(record, folder / f"{number}.jsonl")
        units.note({"unit": 1, "workers": ["0", "1", "2"]})
        if sync.step:
            units.note({"donor": "0", "step": sync.step})
    while sync.step < (1 if number == 1 else 4):
        for x in model:
            x.grad = torch.full_like(x, -(1.0 + number) / 64)
        optimizer.step()
    sync.finish(mean=False)
    return [float(x.detach()) for x in model]


def lose(folder: Path, worker: str, unit: int) -> None:
    """Change the trace of a run of three workers and a newcomer: the ``worker`` is killed after the
    first ``unit`` of a round."""
    (folder / f"{worker}.jsonl").write_text('{"unit": 1, "workers": ["0", "1", "2"]}\n')
    for file in folder.glob("[!2].jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        events.insert(1, {"unit": unit + 1, "workers": ["0", "1", "2"]})
        for event in events:
            if event.get("unit", 0) > unit:
                event["workers"].remove(worker)
            if event.get("serial", 0) > unit and worker in event["round"]["roster"]:
                event["round"]["roster"].remove(worker)
                event["round"]["paces"].pop()
        file.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.fault("a contributor that was killed between two buckets counted in the second one")
def test_a_worker_is_killed_between_two_buckets_of_a_round(tmp_path: Path) -> None:
    """The first bucket has the changes of two workers out of three; the second that of one out of
    two, so its momentum is due one contribution later. A newcomer counts alike."""
    plan, seconds = laconic.Faults(3, join=(1,)), [1.0, 9.0, 1.0, 1.0]
    laconic.simulate(partial(two_buckets, folder=tmp_path), faults=plan, step_seconds=seconds)
    events = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    lose(tmp_path, "2", next(event["serial"] for event in events if "round" in event))
    again = partial(two_buckets, folder=None)
    found = laconic.simulate(again, faults=laconic.Trace(tmp_path), step_seconds=seconds)
    assert found[2] is None and found[0] == found[1] == found[3]
    # n = 3 in later rounds; by worker: 0, then 3, whose first change is zero, then 3 again
    first = (2 + 6) / 3 + 2 / 3 + 0.5 * ((2 + 6) / 3 + 2 / 3) + 0 + 8 / 3
    second = 2 / 2 + 2 / 3 + 0 + 0.5 * (2 / 2 + 2 / 3) + 8 / 3
    assert found[0][0] == pytest.approx(1 + first / 64)
    assert found[0][1] == pytest.approx(1 + second / 64, rel=2**-8)  # bfloat16


@pytest.mark.fault("a newcomer whose donor polled first repeated the decision of the round before")
def test_a_trace_repeats_a_newcomer_of_any_donor(tmp_path: Path) -> None:
    """It contributes in its first round, and so has one round less to come."""
    plan, seconds = laconic.Faults(3, join=(1,)), [1.0, 9.0, 1.0, 1.0]
    run, again = (partial(two_buckets, folder=folder) for folder in (tmp_path, None))
    laconic.simulate(run, faults=plan, step_seconds=seconds)
    found = []
    for donor in range(3):
        for file in tmp_path.glob("*.jsonl"):
            events = [json.loads(line) for line in file.read_text().splitlines()]
            (first,) = (event["unit"] for event in events if len(event.get("workers", ())) > 3)
            events = [event for event in events if event.get("serial", 0) < first + 4]
            for event in events:
                if "donor" in event:
                    event["donor"] = str(donor)
                if event.get("serial") == first:
                    event["round"] |= {"roster": ["0", "2", "3"], "paces": [0, 0, 0]}
            file.write_text("".join(json.dumps(event) + "\n" for event in events))
        trace = laconic.Trace(tmp_path)
        found += laconic.simulate(again, faults=trace, step_seconds=seconds)
    assert len(found) == 12 and all(each == found[0] for each in found)


@pytest.mark.fault("a trace could hold a lost worker's last unit, which the others did again")
def test_what_the_others_did_again_does_not_count(tmp_path: Path) -> None:
    """The worker "c" alone has completed unit 5, a round with it, with which "d" began."""
    begin = {"unit": 1, "workers": ["a", "b", "c"]}

    def closed(serial: int, *roster: str) -> dict[str, Any]:
        decision = Decision(0, 1, roster, (0,) * len(roster), 2, (0.1,))
        return {"round": vars(decision), "serial": serial}

    others = [begin, {"unit": 5, "workers": ["a", "b"]}, closed(6, "a")]
    others.append({"unit": 8, "workers": ["a", "b", "d"]})
    lost = [begin, {"unit": 5, "workers": ["a", "b", "c", "d"]}, closed(5, "a", "c")]
    for id, events in {"a": others, "b": others, "c": lost, "d": others[-1:]}.items():
        (tmp_path / f"{id}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    trace = laconic.Trace(tmp_path)
    assert trace.ids == ["a", "b", "c", "d"]
    present = {unit: trace.present(unit, POLL) for unit in (4, 5, 7, 8)}
    assert present == {4: [0, 1, 2], 5: [0, 1], 7: [0, 1], 8: [0, 1, 3]}
    decided = trace.decided(6)
    assert trace.decided(5) is None and decided is not None and decided.roster == ("0",)


def moved(recipe: laconic.Recipe, dtype: torch.dtype, workers: int = 4) -> float:
    """A weight that each worker moves by about one unit in bfloat16's last place in every step,
    after 12 steps, with unequal workers."""

    def run(number: int) -> float:
        model = torch.nn.Linear(3, 1, bias=False).to(dtype)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = laconic.attach(model, optimizer, recipe, elastic=laconic.Elastic("simulated"))
        x = torch.tensor([-0.0079, 0.0, float(number)], dtype=dtype)
        while sync.step < 12:
            model.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        sync.finish(mean=False)
        return float(model.weight.detach()[0, 0])

    seconds, faults = [1.0, 1.1, 1.3, 1.7][:workers], laconic.Faults(workers)
    return float(laconic.simulate(run, faults=faults, step_seconds=seconds)[0])


@pytest.mark.fault("workers that were late pulled a bfloat16 model back to where it began")
@pytest.mark.parametrize("codec", [None, "int8"])
def test_late_workers_keep_small_steps_of_a_bfloat16_model(codec: str | None) -> None:
    recipe = laconic.diloco(1, 1.0, 0.0, quorum=1, codec=codec)
    assert moved(recipe, torch.bfloat16) > 1.06


@pytest.mark.fault("a fragment without parameters ended all workers")
def test_fragments_may_be_empty() -> None:
    recipe = laconic.streaming_diloco(4, 4, delay=0, quorum=1)
    assert moved(recipe, torch.float32, 3) > 1.0


def test_states_of_different_moments_are_refused() -> None:
    """Else each worker's outer state would be another one for good."""
    states: dict[int, tuple[Any, Any]] = {}

    def go_on(number: int, load: bool) -> str:
        steps = 2 if number == 2 else 6
        model = torch.nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = laconic.diloco(2, quorum=1)
        sync = laconic.attach(model, optimizer, recipe, elastic=laconic.Elastic("simulated"))
        if load:
            model.load_state_dict(states[number][1])
            with pytest.raises(ValueError, match="continue from different rounds: load states"):
                sync.load_state_dict(states[number][0])
            return "refused"
        while sync.step < 8:
            if sync.step == steps and number not in states:
                states[number] = sync.state_dict(), copy.deepcopy(model.state_dict())
            model.zero_grad()
            model(torch.full((3,), 1.0 + number)).sum().backward()
            optimizer.step()
        sync.finish()
        return str(model.weight.tolist())

    for load in (False, True):
        faults, seconds = laconic.Faults(3), [1.0, 1.0, 3.0]
        run = partial(go_on, load=load)
        found = laconic.simulate(run, faults=faults, step_seconds=seconds)
        assert len(set(found)) == 1
