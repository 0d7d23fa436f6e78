"""The studies of docs/evidence.md: their runs, what is chosen from them, and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.evidence import page, signals
from benchmarks.evidence.runs import Job, Outcome, factor, journal, train
from benchmarks.evidence.studies import (
    CELLS,
    FRESH,
    OUTER_MOMENTA,
    OUTER_RATES,
    TUNING,
    direction,
    muloco,
    outer,
)
from benchmarks.evidence.tasks import NAMES, task

JOB = Job("images, small", "diloco(5, momentum=0.6)", "adamw", 8e-3, 2, 12, 4, 7)


def invented(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
    """Losses by a formula, in place of training."""
    return {job: Outcome(loss(job), 0.1) for job in jobs}


def loss(job: Job) -> float:
    """Least at a learning rate of 0.008 and, for AdamW, a momentum of 0.8; for Muon, 0.6."""
    best = 0.6 if job.inner == "muon" else 0.8
    mu = float(job.recipe.partition("momentum=")[2].partition(",")[0].rstrip(")") or 0)
    worse = 0.1 * (job.lr != 8e-3) + abs(mu - best)
    more = 0.02 if job.inner == "muon" else 0.05
    return 2 + worse + more * job.workers + 0.01 * (job.seed % 5)


def test_a_run_is_determined_by_its_job(tmp_path: Path) -> None:
    first = train(JOB)
    assert first == train(JOB) != train(replace(JOB, seed=8))
    assert first.floats == pytest.approx(2 / 12, rel=0.3), "two rounds, and the start"
    muon = train(replace(JOB, recipe="muloco(5, outer='muon')", inner="muon"))
    assert 0 < muon.loss < 5 and muon != first
    known = journal(tmp_path / "runs.jsonl").outcomes([JOB], 1)
    assert known == {JOB: first} == journal(tmp_path / "runs.jsonl").load()


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [factor(step, 200) for step in range(1, 201)]
    assert max(rates) == rates[9] == 1 and rates[4] == 0.5
    assert rates[-1] == pytest.approx(0.1) and rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_batches_of_its_own(name: str) -> None:
    of = task(name)
    a, again, b, c = (
        next(of.batches(*at, 4)) for at in ((0, 2, 1), (0, 2, 1), (1, 2, 1), (0, 2, 2))
    )
    assert a[0].equal(again[0]) and not a[0].equal(b[0]) and not a[0].equal(c[0])
    assert of.loss(of.model(), a).isfinite() and of.loss(of.model(), of.evaluation).isfinite()
    assert len(a[0]) == 4


def test_the_large_models_have_eight_times_as_many_parameters() -> None:
    sizes = {name: sum(p.numel() for p in task(name).model().parameters()) for name in NAMES}
    for kind in ("text", "images"):
        assert sizes[f"{kind}, large"] / sizes[f"{kind}, small"] == pytest.approx(8, rel=0.05)
    written = Path(__file__).parents[2].joinpath("docs/evidence.md").read_text()
    assert all(f"{size:,}" in written for size in sizes.values())


def test_muon_and_adamw_are_tuned_by_themselves() -> None:
    rows = list(muloco(invented, NAMES[0]))
    plain = [r for r in rows if r.what == "DiLoCo"]
    assert [(r.job.inner, r.job.workers) for r in plain] == [
        (inner, n) for inner in ("adamw", "muon") for n in (1, 2, 4, 8)
    ]
    assert {r.job.lr for r in rows} == {8e-3} and not {*TUNING} & {*FRESH}
    assert all(("momentum=0.6" in r.job.recipe) == (r.job.inner == "muon") for r in rows)
    assert all(r.job.workers * r.job.batch == 32 for r in rows)
    up, error = page.gives_up(rows, plain[3])
    assert up == pytest.approx(0.05 * 7) and error == pytest.approx(0, abs=1e-9)
    written = page.muloco_table({NAMES[0]: rows})
    assert "| Muon, 8 workers | 0.008 | 0.6 | " in written and "+0.140 ± 0.000" in written
    assert page.muloco_picture({NAMES[0]: rows}).axes[0].get_title(loc="left") == NAMES[0]


def test_every_cell_has_the_best_of_its_settings() -> None:
    def runs(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
        best = {job: "0.7, 0.3" in job.recipe for job in jobs}
        return {job: Outcome(2.0 - best[job] + 0.01 * (job.seed % 5), 0.1) for job in jobs}

    rows = list(outer(runs, NAMES[2]))
    assert len(rows) == len(CELLS) * len(OUTER_RATES) * len(OUTER_MOMENTA)
    for cell in CELLS:
        assert page.best(rows, cell).job.recipe == f"diloco({cell[1]}, 0.7, 0.3)"
    written = page.outer_table({NAMES[2]: rows})
    assert written.count("**1.020** (0.3)") == len(CELLS)
    assert len(page.outer_picture({NAMES[2]: rows}).axes) == len(CELLS)


def test_nesterov_and_muon_outside_are_compared_on_the_same_seeds() -> None:
    rows = list(
        direction(lambda jobs: {j: Outcome(1.5 + 0.01 * j.seed, 0.1) for j in jobs}, NAMES[1])
    )
    assert [r.what for r in rows] == [
        "ddp()",
        *(f"{what}, {period}" for period in (8, 32) for what in ("Nesterov", "Muon", "Muon, int4")),
    ]
    assert {(r.job.inner, r.job.workers, r.job.steps) for r in rows} == {("adamw", 4, 512)}
    assert rows[2].job.recipe == "diloco(8, 0.7, 0.6, outer='muon')"
    found = {NAMES[1]: rows}
    assert "| Muon, 32 | 2.520 ± 0.007 |" in page.direction_table(found)
    assert len(page.direction_picture(found).axes[0].get_legend_handles_labels()[1]) == 3


def test_the_page_is_written_from_the_runs_that_are_there(tmp_path: Path) -> None:
    marks = "<!-- begin: muloco -->\nold\n<!-- end: muloco -->"
    (tmp_path / "evidence.md").write_text(f"before\n{marks}\nafter\n")
    asked: dict[Job, Outcome] = {}

    def runs(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
        asked.update(invented(jobs))
        return asked

    list(muloco(runs, NAMES[0]))
    page.write(tmp_path, asked)
    written = (tmp_path / "evidence.md").read_text()
    assert "old" not in written and written.startswith("before") and written.endswith("after\n")
    assert f"**{NAMES[0]}**" in written and f"**{NAMES[1]}**" not in written
    assert {p.name for p in tmp_path.iterdir()} == {"evidence.md", "evidence_muloco.png"}
    (tmp_path / "evidence.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="must have a line"):
        page.write(tmp_path, asked)


# -- signals ----


def test_the_share_that_vectors_have_in_common() -> None:
    """Four vectors of 10,000 elements: a common part of length 1, and independent parts of 2."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(10_000, generator=generator) / 100
    rows = [common + 2 * torch.randn(10_000, generator=generator) / 100 for _ in range(4)]
    own = sum(map(signals.squared, rows)) / 4
    found = signals.shared(signals.squared(torch.stack(rows).mean(0)), own, 4)
    assert found == pytest.approx(1 / 5, abs=0.02)
    assert signals.shared(1.0, 1.0, 4) == 1 and signals.shared(0.25, 1.0, 4) == 0


def test_to_watch_a_run_changes_nothing() -> None:
    job = Job("images, small", signals.recipe_of(32), "sgd", 0.05, 2, signals.STEPS, 2, 5)
    seen = signals.train(job)
    assert seen.loss == train(job).loss
    assert 0 < seen.agreement < 1.2 and -0.5 < seen.gradients < 0.5


def seen(job: Job) -> signals.Seen:
    """`ddp` loses 0.5 with every doubling of its steps. A period of H needs (H / 8) ** power steps
    for one of them, of which a half shows in the agreement."""
    number = signals.CASES.index((job.task, job.inner, job.lr, job.batch))
    power = number / 20
    if job.recipe == "ddp()":
        return signals.Seen(5 - 0.5 * math.log2(job.steps), math.nan, math.nan)
    period = int(job.recipe.partition("(")[2].partition(",")[0])
    steps = signals.STEPS / (period / 8) ** power
    return signals.Seen(5 - 0.5 * math.log2(steps), power / 2, (-1) ** number * 0.1)


def test_growth_is_that_of_steps() -> None:
    known = {job: seen(job) for job in signals.jobs()}
    found = signals.lines(known)
    assert [line.case for line in found] == list(signals.CASES)
    for number, line in enumerate(found):
        assert line.growth == pytest.approx(8 ** (number / 20))
        assert line.factors[8] == pytest.approx(1)
    agreement, gradients = signals.correlations(found)
    assert agreement == pytest.approx(1) and abs(gradients) < 0.2
    written = page.signals_table(found)
    assert (
        "| text, small | adamw, 0.008 | 2 | 0.00 | 0.10 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |"
        in (written)
    )
    assert "with the agreement is 1.00" in written
    assert len(page.signals_picture(found).axes[0].lines) == len(signals.CASES) + 1
    assert signals.lines({}) == []
