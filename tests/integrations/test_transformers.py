"""The Trainer of Transformers with laconic, beside the same training written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forked

RUNS = ["diloco-2", "ddp-2", "delayed-4"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return forked.results_of("transformers_runs", tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("run", RUNS)
def test_it_does_what_a_loop_by_hand_does_to_the_bit(found: Any, run: str) -> None:
    """50 steps of two batches each, with clipping, a schedule, evaluation and checkpoints."""
    hand = [each["flat"] for each in found[run]["hand"]]
    for rank, each in enumerate(found[run]["trainer"]):
        assert np.array_equal(each["flat"], hand[rank]), f"rank {rank}"
        assert np.array_equal(each["flat"], hand[0]), f"rank {rank} differs from rank 0"
        assert not each["attached"] and each["step"] == 50
    assert np.isfinite(hand[0]).all() and len(hand[0]) > 1000


@pytest.mark.parametrize("run", RUNS)
def test_it_resumes_to_the_bit_in_new_processes(found: Any, run: str) -> None:
    for own, other in zip(found[run]["trainer"], found[run]["resumed"], strict=True):
        assert np.array_equal(own["flat"], other["flat"])
        steps = [row["step"] for row in other["history"] if "train_runtime" not in row]
        assert min(steps) == 10 and max(steps) == 50


@pytest.mark.parametrize("run", RUNS)
def test_it_sends_what_the_loop_by_hand_sends(found: Any, run: str) -> None:
    for own, other in zip(found[run]["trainer"], found[run]["hand"], strict=True):
        assert own["rounds"] == other["rounds"] and own["rounds"]


@pytest.mark.parametrize("run", RUNS)
def test_it_evaluates_and_saves_the_consensus(found: Any, run: str) -> None:
    hand = found[run]["hand"][0]
    for each in found[run]["trainer"]:
        assert each["evaluated"].keys() == hand["validated"].keys() == {10, 20, 30, 40, 50}
        for step, weights in hand["validated"].items():
            assert np.array_equal(each["evaluated"][step], weights), f"after step {step}"
        losses = [row["eval_loss"] for row in each["history"] if "eval_loss" in row]
        others = [
            row["eval_loss"] for row in found[run]["trainer"][0]["history"] if "eval_loss" in row
        ]
        assert losses == others and len(losses) == 5
    for name, weights in hand["saved"].items():
        assert torch.equal(found[run]["shipped"][name], weights), name


@pytest.mark.parametrize("run", RUNS)
def test_each_checkpoint_has_every_ranks_state(found: Any, run: str) -> None:
    ranks = len(found[run]["hand"])
    files = [Path(name).name for name in found[run]["files"] if name.startswith("laconic/")]
    assert sum(name.startswith("rank-") for name in files) == ranks


def test_its_log_has_what_was_sent(found: Any) -> None:
    rows = [r for r in found["diloco-2"]["trainer"][0]["history"] if "loss" in r]
    sent = [row["laconic_bytes_sent"] for row in rows]
    assert len(rows) == 5 and sent == sorted(set(sent)) and sent[0] > 0
    assert rows[-1]["laconic_rounds"] == 12


def test_a_callback_alone_does_the_same(found: Any) -> None:
    hand = found["diloco-2"]["hand"][0]["flat"]
    assert all(np.array_equal(each, hand) for each in found["callback"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("callback", "use laconic.integrations.transformers.LaconicTrainer"),
        ("batch size", "set per_device_train_batch_size"),
        ("checkpoint", "laconic stores the state of all ranks in"),
    ],
)
def test_what_cannot_work_is_one_line_on_every_rank(found: Any, what: str, words: str) -> None:
    for text in found["refused"][what]:
        assert words in text and "\n" not in text
