"""`auto` where workers come and go: all make the same choices at the same steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic import probe
from laconic.auto import Chooser
from laconic.probe import Probed

STEPS = 150
module = importlib.import_module("laconic.auto")  # not the function of this name


def rates(monkeypatch: pytest.MonkeyPatch, *given: float) -> None:
    """Let the measurements find these rates in bit/s, one after the other, and again."""

    def found(self: Chooser) -> Probed:
        self._world.gather(torch.tensor([1.0]))
        speeds = [0.0] * self._link.size
        return Probed(given[len(self.choices) % len(given)], 1e-4, 0, 0, speeds)

    monkeypatch.setattr(Chooser, "_probe", found)


def program() -> Any:
    """What a simulated worker runs: returns what it has chosen, and where it is then."""

    def train(number: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(number)
        sync = laconic.attach(model, optimizer, laconic.auto(), elastic=laconic.Elastic())
        begun = sync.step
        while sync.step < STEPS:
            x = torch.randn(8, 40, generator=generator)
            optimizer.zero_grad()
            (model(x) - x[:, :30].sin()).square().mean().backward()
            optimizer.step()
        policy = sync.driver.session.policy
        assert policy is not None
        state = sync.state_dict()
        outer = [
            (name, tensor.clone())
            for running in sync.driver.run.rounds
            for channel in running.channels
            for name, tensor in sorted(channel.state.items())
        ]
        return {
            "begun": begun,
            "choices": [(c.step, c.text, c.facts.workers) for c in sync.choices],
            "place": {k: v for k, v in policy.handover().items() if k != "outputs"},
            "recipe": sync.driver.run.text(chosen=True),
            "outer": outer,
            "step": state["step"],
        }

    return train


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review the choice often, with steps that all take as long."""
    monkeypatch.setattr(module, "REVIEW", 10)
    monkeypatch.setattr(module, "LATER", 4)
    monkeypatch.setattr(module, "WARMUP", 1)
    monkeypatch.setattr(module, "WINDOW", 3)
    monkeypatch.setattr(
        module, "usual", lambda spans, cycle: (0.01, 0.005) if spans else (0.0, 0.0)
    )


@pytest.mark.parametrize("join", [2, 3, 4, 5, 17, 21, 24, 25, 26, 33])
def test_newcomers_choose_as_the_others(
    join: int, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a worker joins: before the first choice, while paces are compared, and after a
    change of recipe."""
    rates(monkeypatch, 3e5, 1e12)
    plan = laconic.Faults(start=3, kill=((1, 60), (2, 90)), join=(join, join + 1, 70))
    found = [r for r in laconic.simulate(program(), faults=plan) if r is not None]
    assert len(found) == 4
    begun = sorted(r["begun"] for r in found)
    assert all(was >= planned for was, planned in zip(begun[1:], (join, join + 1, 70), strict=True))
    first = found[0]
    assert first["step"] == STEPS
    assert len({text for _, text, _ in first["choices"]}) > 1, "the recipe has changed"
    for other in found[1:]:
        for key in ("choices", "place", "recipe", "step"):
            assert other[key] == first[key], key
        for (name, own), (_, tensor) in zip(first["outer"], other["outer"], strict=True):
            assert torch.equal(own, tensor), name


def test_it_measures_again_when_the_number_of_workers_has_changed(
    often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates(monkeypatch, 3e5)
    seen: list[int] = []
    rests = Chooser._rests
    monkeypatch.setattr(
        Chooser, "_rests", lambda self, facts: seen.append(facts.workers) or rests(self, facts)
    )
    laconic.simulate(program(), faults=laconic.Faults(start=3, kill=((0, 50), (1, 100))))
    assert list(dict.fromkeys(seen)) == [3, 2, 1], "and the last one has nothing to choose"


def test_a_worker_that_is_alone_goes_on(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses nothing, until another one joins."""
    rates(monkeypatch, 3e5)
    found = laconic.simulate(program(), faults=laconic.Faults(start=1, join=(60,)))
    assert found[0]["choices"][0][2] == 2
    assert all(step > 60 for step, _, _ in found[0]["choices"])
    assert found[0]["choices"] == found[1]["choices"]


def test_a_worker_that_is_alone_sends_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would do so after every few steps."""
    sizes: list[int] = []
    monkeypatch.setattr(probe, "timed", lambda link, device, size: sizes.append(size) or 0.0)
    laconic.simulate(program(), faults=laconic.Faults(start=1))
    assert sizes == []


def test_a_trace_cannot_repeat_it(tmp_path: Path) -> None:
    (tmp_path / "00.jsonl").write_text('{"unit": 1, "call": "", "workers": ["00"]}\n')
    with pytest.raises(ValueError, match=r"a trace cannot repeat auto\(\)"):
        laconic.simulate(program(), faults=laconic.Trace(tmp_path))
