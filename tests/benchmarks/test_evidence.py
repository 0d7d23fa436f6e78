"""The studies behind docs/evidence.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from benchmarks.evidence import tasks
from benchmarks.evidence.runs import Job, Outcome, train
from benchmarks.evidence.studies import at_best_rate

from tests.benchmarks.test_gpu import small_model


@pytest.mark.parametrize("least", [1e-4, 4e-3, 0.2])
def test_the_best_rate_is_between_two_that_were_tried(least: float) -> None:
    tried: dict[float, float] = {}

    def runs(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
        for job in jobs:
            far = abs(math.log(job.lr / least))
            tried[job.lr] = math.nan if job.lr > 4 * least else far
        return {job: Outcome(tried[job.lr], 0.0) for job in jobs}

    row = at_best_rate(runs, "", Job("", "ddp()", "adamw", 4e-3, 1, 1, 1, 0), 2.0)
    assert abs(math.log2(row.job.lr / least)) <= 0.5 + 1e-3
    assert min(tried) < row.job.lr < max(tried) and row.mean == tried[row.job.lr]


@pytest.fixture
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both tasks with little to do."""
    caches = tasks.task, tasks._pretrained, tasks._minilm, tasks._samples
    for cached in caches:
        cached.cache_clear()
    torch.manual_seed(5)  # a model that knows less than how frequent each library is
    monkeypatch.setenv("LACONIC_MODEL", str(small_model(tmp_path)))
    monkeypatch.setattr(tasks, "LIBRARIES", ("logging", "wsgiref"))
    monkeypatch.setattr(tasks, "SAMPLES_HELD_OUT", 64)
    monkeypatch.setattr(tasks, "PRETRAINING", (60, 8, 8e-3))
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", tasks.TUNED)
def test_a_trained_model_is_trained_on(name: str) -> None:
    of = tasks.task(name)
    one, other = of.model(), of.model()
    with torch.no_grad():
        before = float(of.loss(one, of.evaluation))
        trained = [p for p in one.parameters() if p.requires_grad]
        trained[0].add_(1.0)
    assert not torch.equal(trained[0], next(p for p in other.parameters() if p.requires_grad))
    assert before < math.log(tasks.VOCABULARY) - 1.0, "it has learned something before"
    job = Job(name, "outer_step(ddp(), 2, outer='muon')", "adamw", 3e-3, 1, 64, 8, 0)
    assert train(job).loss < before
