"""The lab's workloads: what they promise a race about data, models and learning rates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from laconic.lab.race import workloads
from laconic.lab.race.workloads import Batch, Workload, load, lr_factor

TEXT = b"".join(b"line %d of a text that repeats itself, nearly\n" % i for i in range(2000))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(TEXT)
    return load("text", data=path)


@pytest.fixture(scope="module", params=["digits", "text"])
def workload(request: pytest.FixtureRequest, text: Workload) -> Workload:
    return text if request.param == "text" else load("digits")


def first(batches: Iterator[Batch], count: int = 3) -> list[Batch]:
    return list(islice(batches, count))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_transformer_has_the_stated_size() -> None:
    model = workloads.ByteTransformer()
    assert sum(p.numel() for p in model.parameters()) == 865_280


def test_transformer_never_looks_ahead() -> None:
    model = workloads.ByteTransformer()
    before = torch.randint(256, (2, workloads.CONTEXT))
    after = before.clone()
    after[:, 40:] = (after[:, 40:] + 1) % 256
    with torch.no_grad():
        a, b = model(before), model(after)
    torch.testing.assert_close(a[:, :40], b[:, :40])
    assert not torch.allclose(a[:, 40:], b[:, 40:])


def test_text_decays_matrices_only(text: Workload) -> None:
    model = text.model()
    decayed, kept = text.optimizer(model).param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_model_follows_the_seed(workload: Workload) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(workload.model().state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_batches_are_a_function_of_worker_and_seed(workload: Workload) -> None:
    once = first(workload.batches(1, 4, 7))
    torch.manual_seed(123)  # the global generator has no say
    assert same(once, first(workload.batches(1, 4, 7)))
    assert not same(once, first(workload.batches(2, 4, 7)))
    assert not same(once, first(workload.batches(1, 4, 8)))


@pytest.mark.parametrize(("worker", "workers"), [(-1, 2), (2, 2), (0, 0)])
def test_batches_refuse_a_worker_that_is_none(
    workload: Workload, worker: int, workers: int
) -> None:
    with pytest.raises(ValueError, match="worker must be from 0 to"):
        workload.batches(worker, workers, 0)


def test_digits_are_scikit_learns() -> None:
    pictures, classes = load_digits(return_X_y=True)
    table = workloads._digits_table()
    assert torch.equal(table[:, :-1], torch.from_numpy(pictures))
    assert torch.equal(table[:, -1], torch.from_numpy(classes).double())


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_digits_are_dealt_out_without_loss_or_overlap(workers: int) -> None:
    digits = load("digits")
    pictures = [_one_epoch(digits, worker, workers) for worker in range(workers)]
    assert len(set().union(*pictures)) == sum(len(own) for own in pictures)
    assert len(set().union(*pictures)) == len(_one_epoch(digits, 0, 1))
    held_out = {_key(x, y) for batch in digits.validation for x, y in zip(*batch, strict=True)}
    assert not held_out & set().union(*pictures)
    assert len(held_out) + len(set().union(*pictures)) == 1797


def _key(picture: torch.Tensor, target: torch.Tensor) -> tuple[float, ...]:
    return (*picture.tolist(), float(target))


def _one_epoch(digits: Workload, worker: int, workers: int) -> set[tuple[float, ...]]:
    share = len(range(worker, 1797 - 360, workers))
    stream = (
        _key(x, y)
        for batch in digits.batches(worker, workers, 0)
        for x, y in zip(*batch, strict=True)
    )
    epoch = list(islice(stream, share))
    assert len(set(epoch)) == share  # each picture of the share once before any comes again
    return set(epoch)


def test_digits_come_in_another_order_in_every_epoch() -> None:
    digits = load("digits")
    batches = digits.batches(0, 1797 - 360 - 1, 0)  # two pictures: a batch holds four epochs
    orders = {tuple(next(batches)[0].sum(1).tolist()) for _ in range(20)}
    assert len(orders) > 1


def test_digits_refuse_more_workers_than_pictures() -> None:
    with pytest.raises(ValueError, match="too many"):
        load("digits").batches(0, 2000, 0)


def test_text_batches_are_crops_and_what_follows(text: Workload) -> None:
    train = TEXT[: len(TEXT) * 9 // 10]
    for inputs, targets in islice(text.batches(0, 2, 0), 40):
        assert inputs.shape == targets.shape == (workloads.TEXT_BATCH, workloads.CONTEXT)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert bytes([*x, y[-1]]) in train


def test_validation_batches_are_fixed_equal_and_held_out(workload: Workload) -> None:
    assert len({len(inputs) for inputs, _ in workload.validation}) == 1
    assert len(workload.validation) >= 8  # workers can share the work
    if workload.name == "text":
        held_out = TEXT[len(TEXT) * 9 // 10 :]
        crops = [crop for inputs, _ in workload.validation for crop in inputs.tolist()]
        assert all(bytes(crop) in held_out for crop in crops)
        assert len({tuple(crop) for crop in crops}) == len(crops)


def test_loss_falls(workload: Workload) -> None:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    with torch.no_grad():
        before = workload.loss(model, workload.validation[0]).item()
    for batch in islice(workload.batches(0, 1, 0), 25):
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model, batch))
        optimizer.step()
    with torch.no_grad():
        assert workload.loss(model, workload.validation[0]).item() < 0.7 * before


def test_standard_library_is_the_default_and_is_python() -> None:
    source = workloads.standard_library()
    assert source == workloads.standard_library()
    assert 1_000_000 < len(source) <= 4_000_000
    assert b"\ndef " in source
    assert len(load("text").validation) == 40


@pytest.mark.parametrize(("step", "factor"), [(1, 0.1), (5, 0.5), (10, 1.0), (55, 0.6), (100, 0.2)])
def test_lr_factor_rises_then_falls_along_a_cosine(step: int, factor: float) -> None:
    schedule = _schedule(warmup=0.1, final=0.2)
    assert lr_factor(step, 100, schedule) == pytest.approx(factor)


def test_lr_factor_falls_throughout_and_stays_at_the_end() -> None:
    factors = [lr_factor(step, 50, _schedule()) for step in range(3, 51)]
    assert factors == sorted(factors, reverse=True)
    assert lr_factor(51, 50, _schedule()) == lr_factor(50, 50, _schedule()) == pytest.approx(0.1)
    assert lr_factor(1, 1, _schedule()) > 0
    assert lr_factor(1, 50, _schedule(warmup=0.0)) == pytest.approx(1.0, abs=0.01)
    assert lr_factor(9, 9, _schedule(warmup=1.0)) == 1.0
    assert lr_factor(12.5, 50.0, _schedule()) == lr_factor(25, 100, _schedule())


def _schedule(warmup: float = 0.05, final: float = 0.1) -> Workload:
    digits = load("digits")
    return Workload(
        digits.name,
        digits.model,
        digits.optimizer,
        digits.batches,
        digits.loss,
        digits.validation,
        warmup,
        final,
    )


@pytest.mark.parametrize(("step", "steps"), [(0, 10), (-1, 10), (1, 0)])
def test_lr_factor_refuses_what_is_no_step(step: int, steps: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        lr_factor(step, steps, _schedule())


def test_load_names_the_choices() -> None:
    with pytest.raises(
        ValueError, match="no workload 'words': choose from digits, text, text-small"
    ):
        load("words")


def test_text_small_is_text_with_fewer_crops(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    small, large = load(workloads.SMALL, data=path), load("text", data=path)
    ((inputs, _),) = first(small.batches(0, 4, 0), 1)
    assert inputs.shape == (workloads.SMALL_BATCH, workloads.CONTEXT)
    assert (small.name, small.model, small.loss) == (workloads.SMALL, large.model, large.loss)
    assert 0 < sum(len(x) for x, _ in small.validation) <= sum(len(x) for x, _ in large.validation)


def test_load_refuses_files_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere.txt: No such file"):
        load("text", data=tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="cannot read"):
        load("text", data=tmp_path)
    (tmp_path / "small.txt").write_bytes(b"too little")
    with pytest.raises(ValueError, match="too short: it has 10 bytes"):
        load("text", data=tmp_path / "small.txt")
    with pytest.raises(ValueError, match="omit --data"):
        load("digits", data=tmp_path / "small.txt")


def test_the_smallest_file_that_is_taken_works(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_bytes(TEXT[:650])
    smallest = load("text", data=path)
    assert len(smallest.validation) == 1
    assert next(smallest.batches(0, 1, 0))[0].shape == (workloads.TEXT_BATCH, workloads.CONTEXT)


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="scikit-learn"):
        load("digits")
