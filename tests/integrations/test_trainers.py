"""What the integrations have in common: each library's run beside the same training by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import laconic as la
from laconic.integrations.common import averages_gradients

from tests.support import forked
from tests.support.by_hand import EVALUATED, RUNS, STEPS

QUICK = ("accelerate", "diloco-2")
PROGRAMS = ["transformers", "accelerate", "lightning"]
CHECKPOINT = {"checkpoint": "laconic stores the state of all ranks in"}
REFUSED = {
    "transformers": {
        "batch_size": "set per_device_train_batch_size",
        "one_host": "ranks [1] do not have the checkpoint",
        "options": "leave ddp_bucket_cap_mb out",
    },
    "accelerate": {
        "model": "pass the plain model, before accelerator.prepare",
        "optimizer": "pass the plain optimizer",
        "options": "leave DistributedDataParallelKwargs out",
    },
    "lightning": {"options": "leave find_unused_parameters out"},
}
NEWEST = ["epoch=1-step=12", "epoch=2-step=18"]
Results = Callable[..., Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of the program for a library, which runs once."""

    @cache
    def of(library: str, only: str = "") -> Any:
        folder = tmp_path_factory.mktemp(library) / "runs"
        return forked.results_of(f"{library}_runs", folder, only)

    return of


@pytest.mark.parametrize(
    ("program", "run", "only"),
    [
        (*QUICK, QUICK[1]),
        *(
            pytest.param(program, run, "", marks=pytest.mark.slow)
            for program in PROGRAMS
            for run in RUNS
        ),
    ],
)
def test_it_does_what_a_loop_by_hand_does_to_the_bit(
    results: Results, program: str, run: str, only: str
) -> None:
    """25 steps of two batches each, with clipping, a schedule, evaluation and a checkpoint; it
    evaluates and saves the consensus, and resumes in new processes."""
    found = results(program, only)[run]
    hand = found["hand"]
    assert np.isfinite(hand[0]["flat"]).all()
    for own, other, resumed in zip(found["trainer"], hand, found["resumed"], strict=True):
        assert np.array_equal(own["flat"], other["flat"])
        assert np.array_equal(own["flat"], hand[0]["flat"]), "alike on all ranks"
        assert own["rounds"] == other["rounds"] and own["rounds"], "what is sent"
        assert own["step"] == STEPS
        assert own["evaluated"].keys() == set(range(EVALUATED, STEPS + 1, EVALUATED))
        for step, weights in other["evaluated"].items():
            assert np.array_equal(own["evaluated"][step], weights), f"after step {step}"
        assert np.array_equal(own["flat"], resumed["flat"])
        assert min(resumed["evaluated"]) > EVALUATED, "it did not begin again"
    assert found["states"] == len(hand), "every rank's"
    for name, weights in hand[0]["saved"].items():
        assert torch.equal(found["shipped"][name], weights), name


def test_where_gradients_are_averaged_every_rank_may_validate_its_own_model() -> None:
    """Also where an outer step follows that is the same on all of them."""
    for recipe in (la.ddp(codec="int8"), la.outer_step(la.ddp(), 4)):
        assert averages_gradients(recipe)
    for other in (la.local_sgd(4), la.outer_step(la.local_sgd(2), 4), la.auto()):
        assert not averages_gradients(other)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_cannot_work_is_one_line_on_every_rank(results: Results, program: str) -> None:
    for what, expected in {**CHECKPOINT, **REFUSED[program]}.items():
        for text in results(program)["refused"][what]:
            assert expected in text and "\n" not in text


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_random_numbers_of_the_model_go_on_where_they_were(results: Results, program: str) -> None:
    for whole, resumed in zip(*results(program)["dropout"], strict=True):
        assert np.array_equal(whole, resumed)


# -- each library's own ----


@pytest.mark.slow
def test_what_else_the_trainer_of_transformers_does(results: Results) -> None:
    found = results("transformers")
    (one, best), (other, _) = found["best"]
    assert np.array_equal(one, best) and np.array_equal(other, best), "hosts without it receive it"
    hand = found["diloco-2"]["hand"][0]["flat"]
    (kind, trained, one), (_, _, other) = found["followed"]
    assert kind == "DistributedDataParallel" and np.array_equal(one, other), "wrapped again"
    assert np.array_equal(trained, hand)
    rows = [row for row in found["diloco-2"]["trainer"][0]["history"] if "loss" in row]
    sent = [row["laconic_bytes_sent"] for row in rows]
    assert len(rows) == 5 and sent == sorted(set(sent)) and sent[0] > 0
    assert rows[-1]["laconic_rounds"] == 6
    histories = [each["history"] for each in found["delayed-4"]["trainer"]]
    first, *others = ([r["eval_loss"] for r in rows if "eval_loss" in r] for rows in histories)
    assert len(first) == 5 and all(losses == first for losses in others), "that of all ranks"


@pytest.mark.slow
def test_several_optimizers_and_old_checkpoints_in_lightning(results: Results) -> None:
    """The state of old checkpoints is removed, also that of a run that was resumed."""
    found = results("lightning")
    for own, other in zip(*found["manual"], strict=True):
        assert np.array_equal(own, other)
    (text, *_) = found["diloco-2"]["trainer"][0]["logged"]
    assert "laconic_bytes_sent" in text and "laconic_rounds" in text
    kept = [f"{name}{end}" for name in NEWEST for end in (".ckpt", ".ckpt.laconic")]
    assert found["kept"] == sorted(kept)


@pytest.mark.slow
@pytest.mark.fault("with Lightning's WeightAveraging, every rank validated an average of its own")
def test_moving_averages_in_lightning_are_those_of_all_ranks(results: Results) -> None:
    """In mixed precision."""
    for own, other in zip(*results("lightning")["averaged"], strict=True):
        assert np.array_equal(own, other) and np.isfinite(own).all()
