"""What the integrations have in common: each library's run beside the same training by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.by_hand import EVALUATED, RUNS, STEPS

PROGRAMS = ["transformers", "accelerate", "lightning"]
REFUSED = {
    "transformers": {
        "callback": "use laconic.integrations.transformers.LaconicTrainer",
        "batch size": "set per_device_train_batch_size",
        "checkpoint": "laconic stores the state of all ranks in",
    },
    "accelerate": {
        "model": "pass the plain model, before accelerator.prepare",
        "optimizer": "pass the plain optimizer",
        "checkpoint": "laconic stores the state of all ranks in",
    },
    "lightning": {
        "options": "leave find_unused_parameters out",
        "checkpoint": "laconic stores the state of all ranks in",
    },
}
NEWEST = ["epoch=1-step=12", "epoch=2-step=18"]
Results = Callable[[str], Any]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_does_what_a_loop_by_hand_does_to_the_bit(
    results: Results, program: str, run: str
) -> None:
    """25 steps of two batches each, with clipping, a schedule, evaluation and a checkpoint."""
    found = results(program)[run]
    hand = found["hand"]
    for own, other in zip(found["trainer"], hand, strict=True):
        assert np.array_equal(own["flat"], other["flat"])
        assert np.array_equal(own["flat"], hand[0]["flat"]), "alike on all ranks"
        assert own["rounds"] == other["rounds"] and own["rounds"], "what is sent"
        assert own["step"] == STEPS
    assert np.isfinite(hand[0]["flat"]).all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_evaluates_and_saves_the_consensus(results: Results, program: str, run: str) -> None:
    found = results(program)[run]
    for own, other in zip(found["trainer"], found["hand"], strict=True):
        assert own["evaluated"].keys() == set(range(EVALUATED, STEPS + 1, EVALUATED))
        for step, weights in other["evaluated"].items():
            assert np.array_equal(own["evaluated"][step], weights), f"after step {step}"
    for name, weights in found["hand"][0]["saved"].items():
        assert torch.equal(found["shipped"][name], weights), name


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_resumes_to_the_bit_in_new_processes(results: Results, program: str, run: str) -> None:
    found = results(program)[run]
    for own, other in zip(found["trainer"], found["resumed"], strict=True):
        assert np.array_equal(own["flat"], other["flat"])
        assert min(other["evaluated"]) > EVALUATED, "it did not begin again"


@pytest.mark.parametrize(
    ("program", "what"), [(program, what) for program in REFUSED for what in REFUSED[program]]
)
def test_what_cannot_work_is_one_line_on_every_rank(
    results: Results, program: str, what: str
) -> None:
    for text in results(program)["refused"][what]:
        assert REFUSED[program][what] in text and "\n" not in text


@pytest.mark.parametrize("program", ["transformers", "accelerate"])
def test_random_numbers_of_the_model_go_on_where_they_were(results: Results, program: str) -> None:
    for whole, resumed in zip(*results(program)["dropout"], strict=True):
        assert np.array_equal(whole, resumed)


# -- each library's own ----


@pytest.mark.parametrize("where", ["in an epoch", "after an epoch"])
def test_random_numbers_go_on_in_lightning(results: Results, where: str) -> None:
    found = results("lightning")["dropout"][where]
    for (whole, _), (resumed, _) in zip(found["whole"], found["after"], strict=True):
        assert np.array_equal(whole, resumed)


def test_lightning_removes_the_state_of_old_checkpoints(results: Results) -> None:
    """Also that of a run that was resumed."""
    found = results("lightning")["dropout"]["after an epoch"]
    kept = [f"{name}{end}" for name in NEWEST for end in (".ckpt", ".ckpt.laconic")]
    for _, files in found["after"]:
        assert files == sorted(kept)


def test_hosts_without_the_best_model_receive_it(results: Results) -> None:
    (first, best), (second, _) = results("transformers")["best"]
    assert np.array_equal(first, best) and np.array_equal(second, best)


def test_resuming_on_some_hosts_only_is_an_error_on_all(results: Results) -> None:
    first, second = results("transformers")["one host"]
    assert first == second and first.startswith("ranks [1] do not have the checkpoint")


def test_a_later_trainer_wraps_the_model_again(results: Results) -> None:
    for (kind, first), (_, second) in results("transformers")["followed"]:
        assert kind == "DistributedDataParallel" and np.array_equal(first, second)


def test_a_saved_adapter_is_the_consensus(results: Results) -> None:
    for saved, kept in results("transformers")["adapter"]:
        assert saved.keys() == kept.keys()
        assert all(torch.equal(saved[name], kept[name]) for name in kept)


@pytest.mark.parametrize("run", RUNS)
def test_each_checkpoint_of_the_trainer_has_every_ranks_state(results: Results, run: str) -> None:
    files = results("transformers")[run]["files"]
    own = [name for name in files if name.startswith("laconic/rank-")]
    assert len(own) == RUNS[run][0]


def test_the_trainers_log_has_what_was_sent(results: Results) -> None:
    history = results("transformers")["diloco-2"]["trainer"][0]["history"]
    rows = [row for row in history if "loss" in row]
    sent = [row["laconic_bytes_sent"] for row in rows]
    assert len(rows) == 5 and sent == sorted(set(sent)) and sent[0] > 0
    assert rows[-1]["laconic_rounds"] == 6


def test_ranks_of_the_trainer_report_the_same_losses(results: Results) -> None:
    first, *others = (
        [row["eval_loss"] for row in each["history"] if "eval_loss" in row]
        for each in results("transformers")["delayed-4"]["trainer"]
    )
    assert len(first) == 5 and all(losses == first for losses in others)


def test_a_callback_alone_does_the_same(results: Results) -> None:
    found = results("transformers")
    hand = found["diloco-2"]["hand"][0]["flat"]
    assert all(np.array_equal(each, hand) for each in found["callback"])


def test_several_optimizers_stepped_by_hand_in_lightning(results: Results) -> None:
    for own, other in zip(*results("lightning")["manual"], strict=True):
        assert np.array_equal(own, other)


def test_mixed_precision_in_lightning_leaves_all_ranks_alike(results: Results) -> None:
    first, second = results("lightning")["bfloat16"]
    assert np.array_equal(first, second) and np.isfinite(first).all()


@pytest.mark.fault("with Lightning's WeightAveraging, every rank validated an average of its own")
def test_moving_averages_in_lightning_are_those_of_all_ranks(results: Results) -> None:
    for own, other in zip(*results("lightning")["averaged"], strict=True):
        assert np.array_equal(own, other)


def test_lightnings_loggers_receive_what_was_sent(results: Results) -> None:
    (text, *_) = results("lightning")["diloco-2"]["trainer"][0]["logged"]
    assert "laconic_bytes_sent" in text and "laconic_rounds" in text
