"""Lightning's Trainer with laconic, beside the same training written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import forked

RUNS = ["diloco-2", "ddp-2", "delayed-4"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return forked.results_of("lightning_runs", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("run", RUNS)
def test_it_does_what_a_loop_by_hand_does_to_the_bit(found: Any, run: str) -> None:
    """50 steps of two batches each, with clipping, a schedule, validation and checkpoints."""
    hand = found[run]["hand"]
    for each, other in zip(found[run]["trainer"], hand, strict=True):
        assert np.array_equal(each["flat"], other["flat"])
        assert np.array_equal(each["flat"], hand[0]["flat"])
        assert each["rounds"] == other["rounds"] and each["rounds"]
        assert each["step"] == 50 and not each["attached"]


@pytest.mark.parametrize("run", RUNS)
def test_it_validates_the_consensus(found: Any, run: str) -> None:
    for each, other in zip(found[run]["trainer"], found[run]["hand"], strict=True):
        assert each["validated"].keys() == other["validated"].keys() == {10, 20, 30, 40, 50}
        for step, weights in other["validated"].items():
            assert np.array_equal(each["validated"][step], weights)


@pytest.mark.parametrize("run", RUNS)
def test_it_resumes_to_the_bit_in_new_processes(found: Any, run: str) -> None:
    for own, other in zip(found[run]["trainer"], found[run]["resumed"], strict=True):
        assert np.array_equal(own["flat"], other["flat"])


@pytest.mark.parametrize("run", RUNS)
def test_the_saved_model_is_the_consensus(found: Any, run: str) -> None:
    for name, weights in found[run]["hand"][0]["saved"].items():
        assert torch.equal(found[run]["shipped"][name], weights), name


def test_several_optimizers_stepped_by_hand(found: Any) -> None:
    for own, other in zip(*found["manual"], strict=True):
        assert np.array_equal(own, other)


def test_mixed_precision_leaves_all_ranks_alike(found: Any) -> None:
    first, second = found["bfloat16"]
    assert np.array_equal(first, second) and np.isfinite(first).all()


def test_the_loggers_hear_what_was_sent(found: Any) -> None:
    (text, *_) = found["diloco-2"]["trainer"][0]["logged"]
    assert "laconic_bytes_sent" in text and "laconic_rounds" in text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("options", "leave find_unused_parameters out"),
        ("checkpoint", "laconic stores the state of all ranks in"),
    ],
)
def test_what_cannot_work_is_one_line_on_every_rank(found: Any, what: str, words: str) -> None:
    for text in found["refused"][what]:
        assert words in text and "\n" not in text
