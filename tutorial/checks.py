"""Checks of the exercises: each says whether an answer is right, and why.

Change an exercise in a notebook and run its cell, or from the shell::

    python -m tutorial start 3        write the exercises of chapter 3 into my_chapter3.py
    python -m tutorial check 3        check all of them as they are in this file
    python -m tutorial check 3.2      check one

A check tries the answer on cases, and compares it with what this repository computes or measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from laconic.policy.predict import predict
from tutorial.averaging import MOMENTUM, Task, Team, by_laconic
from tutorial.full_ddp import share_of
from tutorial.naive_ddp import partition_dataset
from tutorial.slow_network import on_paper
from tutorial.toy import SEED, FFNet, ToyDataset, count_parameters, train_epoch

CHOSEN: set[str] | None = None
"""The exercises that `check` checks. None: all."""
WRONG: list[str] = []
"""The exercises whose last check said "not yet"."""


class NotYetError(ValueError):
    """What is wrong with an answer."""


def check(number: str, answer: Any) -> None:
    """Print whether ``answer`` is right for exercise ``number``, and why."""
    if CHOSEN is not None and number not in CHOSEN:
        return
    right, why = verdict(number, answer)
    WRONG[:] = [each for each in WRONG if each != number] + [number] * (not right)
    print(f"Exercise {number}: {'right' if right else 'not yet'}. {why}")


def verdict(number: str, answer: Any) -> tuple[bool, str]:
    """Whether ``answer`` is right, and why. An error that it raises makes it wrong."""
    if number not in CHECKS:
        raise ValueError(f"no exercise {number!r}: choose from {', '.join(CHECKS)}")
    try:
        return True, CHECKS[number](answer)
    except NotYetError as error:
        return False, str(error)
    except Exception as error:
        return False, f"Your answer raised {type(error).__name__}: {error}"


def same(name: str, arguments: tuple[Any, ...], got: Any, expected: Any, why: str) -> None:
    """Raise `NotYetError` unless two numbers, lists or tensors are equal up to rounding."""
    close = dict(rtol=1e-6, atol=1e-9, check_dtype=False)
    try:
        torch.testing.assert_close(got, expected, **close)
    except (AssertionError, TypeError, ValueError):
        call = f"{name}({', '.join(map(short, arguments))})"
        raise NotYetError(
            f"{call} is {short(got)}, but should be {short(expected)}. {why}"
        ) from None


def short(value: Any) -> str:
    """A number with few digits, anything else as it is."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


# --- 1. one CPU process --------------------------------------------------------------------------


def parameters(answer: Callable[[int, int, int], int]) -> str:
    why = "A layer with m inputs and k outputs has m*k weights and k biases."
    for sizes in ((100, 0, 10), (100, 3, 100), (7, 1, 5)):
        same("parameters", sizes, answer(*sizes), count_parameters(FFNet(*sizes)), why)
    return "It agrees with PyTorch's count for three networks."


def steps(answer: Callable[[int, int], int]) -> str:
    left = "If samples are left after the last full batch, they make one more step."
    none = "The last full batch is the last step, because no samples are left after it."
    for samples, batch in ((1024, 8), (1024, 64), (1003, 24), (5, 8)):
        expected = len(DataLoader(ToyDataset(4, samples), batch))
        why = left if samples % batch else none
        same("steps", (samples, batch), answer(samples, batch), expected, why)
    return "It agrees with PyTorch's DataLoader, which does not drop the last batch."


def learning_rate(answer: float) -> str:
    small, large = loss_after_ten_epochs(8, 0.001), loss_after_ten_epochs(64, answer)
    measured = f"After ten epochs: batch 8 has loss {small:.3f}, batch 64 has {large:.3f}"
    if math.isnan(large) or large > 1:
        raise NotYetError(f"{measured}. Steps this long overshoot, so the loss grows: go lower.")
    if large > small:
        raise NotYetError(
            f"{measured}. An epoch has an eighth of the steps, and yours are too short."
        )
    return f"{measured}. An eighth of the steps needs steps that are several times as long."


def loss_after_ten_epochs(batch: int, lr: float) -> float:
    torch.manual_seed(SEED)
    model, data = FFNet(100, 0, 10), ToyDataset(100, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loader = list(zip(data.x.split(batch), data.y.split(batch), strict=True))
    return [train_epoch(model, loader, optimizer) for _ in range(10)][-1]


# --- 2. growing ----------------------------------------------------------------------------------


def accumulation(answer: Callable[[Sequence[int]], Sequence[float]]) -> str:
    torch.manual_seed(SEED)
    model, data = FFNet(10, 0, 8).double(), ToyDataset(10, 64)
    x, y = data.x.double(), data.y.double()
    whole = gradient(model, x, y)
    for sizes in ((16, 16, 16, 16), (30, 30, 4)):
        parts = zip(x.split(sizes), y.split(sizes), answer(sizes), strict=True)
        added = sum(weight * gradient(model, px, py) for px, py, weight in parts)
        off = float((added - whole).norm() / whole.norm())
        if off > 1e-9:
            raise NotYetError(
                f"With parts of {sizes} samples, the sum is off by {off:.0%} of the gradient's"
                " length. Each sample should count the same, whichever part it is in."
            )
    return "Equal and unequal parts add up to the gradient of the whole batch."


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    return nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).clone()


def noise(answer: int) -> str:
    torch.manual_seed(SEED)
    model, data = FFNet(100, 0, 10), ToyDataset(100, 4096)
    whole, found = gradient(model, data.x, data.y), []
    for batch in (8, answer):
        off = []
        for _ in range(300):
            drawn = torch.randint(len(data), (batch,))
            off.append((gradient(model, data.x[drawn], data.y[drawn]) - whole).square().sum())
        found.append(float(torch.stack(off).mean().sqrt()))
    share = found[1] / found[0]
    measured = f"The noise of batch {answer} is {share:.2f} of that of batch 8"
    if not 0.31 < share < 0.36:
        raise NotYetError(
            f"{measured}, not a third. Noise falls with the square root of the batch."
        )
    return f"{measured}: a third of the noise takes nine times the batch."


def travel(answer: Callable[[float, int, float], float]) -> str:
    why = "A rate is in bits per second, so count the bits of all gradients."
    for case in ((175e9, 16, 100e9), (1e6, 32, 1e9)):
        elements, bits, rate = case
        same("travel", case, answer(*case), elements * bits / rate, why)
    return f"GPT-3's gradients take {answer(175e9, 16, 100e9):.0f} s at 100 Gbit/s."


# --- 3. data-parallel training by hand -----------------------------------------------------------


def shares(answer: Callable[[int, int], list[int]]) -> str:
    for samples, ranks in ((8, 4), (1003, 4), (3, 4)):
        got = answer(samples, ranks)
        call = f"shares({samples}, {ranks}) is {got}"
        if sum(got) != samples:
            raise NotYetError(f"{call}: {sum(got)} samples in all, not {samples}.")
        if len(got) != ranks or max(got) - min(got) > 1:
            raise NotYetError(
                f"{call}: give each of {ranks} ranks as many as any other, or one more."
            )
    return "No sample is lost, and no rank has more than one sample more than another."


def unweighted(answer: Callable[[int, int, int], bool]) -> str:
    for case in ((1008, 24, 2), (1003, 24, 2), (1004, 24, 2), (1010, 24, 4), (1012, 24, 4)):
        samples, batch, ranks = case
        by_rank = [
            [share for _, _, share in partition_dataset(ToyDataset(1, samples), ranks, i, batch)]
            for i in range(ranks)
        ]
        equal = all(math.isclose(share, 1 / ranks) for row in by_rank for share in row)
        last = [round(row[-1] * ((samples - 1) % batch + 1)) for row in by_rank]
        why = f"In the last step the ranks have {last} samples."
        same("equal_without_weights", case, bool(answer(*case)), equal, why)
    return "The plain mean is right exactly if the ranks share the last batch equally, too."


def saved(answer: Callable[[float, float, int, int], float]) -> str:
    why = "n processes still compute 1/n of the work each, and pay for every message."
    for case in ((200e-6, 90e-6, 4, 2), (0.1, 1e-4, 4, 4)):
        computing, message, messages, ranks = case
        expected = computing - (computing / ranks + messages * message)
        same("saved", case, answer(*case), expected, why)
    return "If it is negative, messages cost more than the other processes save."


# --- 4. why it is slow ---------------------------------------------------------------------------


def all_reduce_bytes(answer: Callable[[int, int], float]) -> str:
    for n in (2, 4, 8):
        rows = torch.arange(float(n * n)).reshape(n, n)
        summed, sent = ring_all_reduce(rows)
        assert torch.equal(summed, rows.sum(0).expand_as(rows))
        size = 1_000 * n
        why = f"A ring of {n} ranks was run, and each sent {sent} chunks of {size // n} bytes."
        same("all_reduce_bytes", (n, size), answer(n, size), sent * size / n, why)
    return "2(n-1)/n of the bytes: an all-reduce of many ranks costs each about two tensors."


def ring_all_reduce(rows: Tensor) -> tuple[Tensor, int]:
    """Sum over n ranks in a ring. Row i is rank i's tensor, one element per chunk.

    Returns the rows afterward, and how many chunks each rank sent.
    """
    n, rows, sent = len(rows), rows.clone(), 0
    ranks = torch.arange(n)
    for step in range(2 * (n - 1)):
        # For n - 1 steps reduce-scatter, then all-gather: rank i sends chunk i - step.
        chunk = (ranks - step) % n
        received = rows[ranks, chunk]
        after = (ranks + 1) % n
        rows[after, chunk] = received + (rows[after, chunk] if step < n - 1 else 0)
        sent += 1
    return rows, sent


def first_bucket(answer: Callable[[list[int], int, int], list[list[int]]]) -> str:
    for sizes, first, most in (([3, 3, 3, 3, 3, 3], 3, 9), ([2, 5, 4, 4, 1, 9, 2], 4, 8)):
        got = answer(sizes, first, most)
        call = f"split({sizes}, {first}, {most}) is {got}"
        if [size for bucket in got for size in bucket] != sizes:
            raise NotYetError(f"{call}: every tensor belongs in one bucket, in the order given.")
        for number, bucket in enumerate(got):
            limit = most if number else first
            if len(bucket) > 1 and sum(bucket) > limit:
                raise NotYetError(f"{call}: bucket {number + 1} has more than {limit} bytes.")
            if number + 1 < len(got) and sum(bucket) + got[number + 1][0] <= limit:
                raise NotYetError(f"{call}: bucket {number + 1} has room for another tensor.")
    return "The first bucket is small and leaves early; the others are large."


def may_leave(answer: Callable[[list[bool], int], int]) -> str:
    why = "Buckets leave in one order on every rank, so an incomplete one holds back the rest."
    for complete, sent, expected in (
        ([True, False, True, True], 0, 1),
        ([False, True, True], 0, 0),
        ([True, True, True, False], 1, 2),
        ([True, True], 2, 0),
    ):
        same("may_leave", (complete, sent), answer(complete, sent), expected, why)
    return "All ranks send the same buckets in the same order, so sums match."


def last_arrival(answer: Callable[[list[float], list[float]], float]) -> str:
    why = "A bucket leaves when it is ready and the network is free, whichever comes later."
    for ready, travel, expected in (
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], 4.0),
        ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 7.0),
        ([1.0, 5.0], [1.0, 0.5], 5.5),
    ):
        same("last_arrival", (ready, travel), answer(ready, travel), expected, why)
    return "On a fast network only the last bucket shows; on a slow one, almost everything."


# --- 5. full DDP that works ----------------------------------------------------------------------


def global_rank(answer: Callable[[int, int, int], int]) -> str:
    for nodes, per_node in ((2, 4), (3, 2)):
        got = [answer(node, local, per_node) for node in range(nodes) for local in range(per_node)]
        if got != list(range(nodes * per_node)):
            raise NotYetError(
                f"{nodes} nodes with {per_node} processes have the ranks {got}: "
                f"they must be 0 to {nodes * per_node - 1}, each once."
            )
    return "Every process has a rank of its own, and a node's ranks are consecutive."


def repeated(answer: Callable[[int, int], int]) -> str:
    why = "The sampler adds samples until all ranks have the same number."
    for samples, ranks in ((1002, 2), (1003, 2), (1001, 4), (1003, 4)):
        data = ToyDataset(1, samples)
        dealt = [i for rank in range(ranks) for i in DistributedSampler(data, ranks, rank)]
        same("repeated", (samples, ranks), answer(samples, ranks), len(dealt) - samples, why)
    return "It agrees with DistributedSampler."


def loss_of_rank(answer: Callable[[Tensor, int, int], Tensor]) -> str:
    torch.manual_seed(SEED)
    model, data = FFNet(10, 0, 8).double(), ToyDataset(10, 20)
    x, y = data.x.double(), data.y.double()
    ranks, batch = 2, 16
    for name, start, stop in (("a full batch", 0, 16), ("the last batch, of 4", 16, 20)):
        rows = []
        for rank in range(ranks):
            own = slice(start + rank, stop, ranks)
            model.zero_grad()
            answer((model(x[own]) - y[own]).square(), batch, ranks).backward()
            rows.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]))
        averaged = torch.stack(rows).mean(0)  # what DDP does
        share = float(averaged.norm() / gradient(model, x[start:stop], y[start:stop]).norm())
        if not math.isclose(share, 1, rel_tol=1e-6):
            raise NotYetError(
                f"With {name}, the averaged gradient is {share:.2f} of the right one."
            )
    return "The gradient is right with full batches and with the smaller one at an epoch's end."


def checkpoint(answer: set[str]) -> str:
    choices = {"model", "optimizer", "epoch"}
    if not set(answer) <= choices:
        raise NotYetError(f"Choose from {', '.join(sorted(choices))}.")
    whole, saved = Run(), Run()
    whole.train(4)
    saved.train(2)
    resumed = Run()
    for name in answer:
        part = deepcopy(getattr(saved, name))
        if name == "epoch":
            resumed.epoch = part
        else:
            getattr(resumed, name).load_state_dict(part.state_dict())
    resumed.train(2)
    off = float((vector(resumed.model) - vector(whole.model)).abs().max())
    if off:
        raise NotYetError(
            f"After 2 + 2 epochs, parameters differ from those of 4 epochs by {off:.1e}."
        )
    return "2 + 2 epochs equal 4 epochs, bit for bit."


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


class Run:
    """A small training that can be stopped."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model, self.epoch = FFNet(10, 0, 8), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def train(self, epochs: int) -> None:
        loader, sampler = share_of(ToyDataset(10, 64), 16, rank=0, world_size=1)
        for _ in range(epochs):
            sampler.set_epoch(self.epoch)
            train_epoch(self.model, loader, self.optimizer)
            self.epoch += 1


# --- 6. parameter averaging ----------------------------------------------------------------------


def period(answer: int) -> str:
    sent = by_laconic(Task(), laconic.local_sgd(answer), 2 * answer).sent
    measured = f"With a period of {answer}, a worker sends {sent:.3f} models per step"
    if sent > 1.02 * 0.1:  # messages are padded by a little
        raise NotYetError(f"{measured}. A round sends 2(n-1)/n = 1.5 models.")
    if answer > 15:
        raise NotYetError(f"{measured}, but a shorter period is enough.")
    return f"{measured}: 1.5 models per round, one round in 15 steps."


def elastic(answer: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]) -> str:
    x = torch.tensor([[0.0], [3.0], [9.0]], dtype=torch.float64)
    a, beta = torch.tensor([1.0], dtype=torch.float64), 0.9
    pulled, center = answer(x, a, beta)
    before, after = float(x.sum() + a), float(pulled.sum() + center)
    if not math.isclose(before, after):
        raise NotYetError(
            f"The sum of all workers and the center was {before:.2f} and is now {after:.2f}. What"
            " the workers give up, the center must gain: use x as it was before the pull."
        )
    same(
        "elastic", (x.tolist(), a.tolist(), beta), pulled, x - beta / 3 * (x - a), "Check the pull."
    )
    return "What the workers give up, the center gains: their sum stays the same."


def post_local(answer: Callable[[Team, int, int, int], None]) -> str:
    task, start, period, steps = Task(MOMENTUM), 10, 4, 21
    team = Team(task)
    answer(team, steps, start, period)
    expected = by_laconic(task, laconic.post_local_sgd(start, period), steps).x
    off = float((team.x - expected).abs().max())
    if off > 1e-12:
        raise NotYetError(
            f"It differs from laconic.post_local_sgd({start}, {period}) by {off:.1e}. Until step "
            f"{start}, average gradients and not parameters, so that momenta are equal, too. After "
            f"that, average parameters whenever t is a multiple of {period}."
        )
    return f"It equals laconic.post_local_sgd({start}, {period})."


def slowmo_as_diloco(answer: dict[str, float]) -> str:
    def trained(recipe: laconic.Recipe) -> Tensor:
        return by_laconic(Task(), recipe, 48).model

    slow = laconic.slowmo(laconic.local_sgd(16), 16, answer["beta"], answer["alpha"])
    off = float((trained(slow) - trained(laconic.diloco(16, lr=0.7, momentum=0.0))).abs().max())
    if off > 1e-12:
        raise NotYetError(
            f"After 48 steps the two models differ by {off:.1e}. Without momentum, both formulas"
            " move a by a factor times a - mean(x)."
        )
    return "Without momentum both move the anchor by a fixed share of the way to the mean."


# --- 7. a slow network ---------------------------------------------------------------------------


def equal_rate(answer: Callable[[int, int, float], float]) -> str:
    why = "Each host sends 2(n-1)/n of the gradients' bytes, at 8 bits each."
    for case in ((865_280, 2, 0.1), (865_280, 4, 0.1), (1_000_000, 8, 0.05)):
        elements, hosts, compute = case
        expected = 8 * 2 * (hosts - 1) / hosts * 4 * elements / compute
        same("equal_rate", case, answer(*case), expected, why)
    return "At this rate sending takes as long as computing; below it the network decides."


def most_progress(answer: Callable[[dict[str, float], dict[str, float]], str]) -> str:
    needed = {"ddp": 1.0, "ddp int4": 1.02, "streaming": 1.5}
    for seconds, best in (
        ({"ddp": 0.13, "ddp int4": 0.11, "streaming": 0.10}, "ddp int4"),
        ({"ddp": 2.85, "ddp int4": 0.41, "streaming": 0.09}, "streaming"),
        ({"ddp": 0.10, "ddp int4": 0.11, "streaming": 0.09}, "ddp"),
    ):
        got = answer(seconds, needed)
        if got != best:
            loss = {name: seconds[name] * needed[name] for name in seconds}
            each = ", ".join(f"{name} {value:.3f} s" for name, value in loss.items())
            raise NotYetError(
                f"For {seconds} the answer is {best!r}, not {got!r}. Same loss: {each}."
            )
    return "A recipe wins by the seconds to the same loss, not by the seconds per step."


def long_enough(answer: Callable[[float, float], int]) -> str:
    for compute, rate in ((0.1, 1e7), (0.1, 1e8), (0.02, 1e7)):
        facts = on_paper(rate, compute)
        round_time = predict(laconic.local_sgd(1), facts).seconds - compute
        got = answer(compute, round_time)
        call = f"A step of {compute} s and a round of {round_time:.3f} s: period {got}"
        speed = compute / predict(laconic.local_sgd(got), facts).seconds
        if speed < 10 / 11 - 1e-9:
            raise NotYetError(f"{call} reaches {speed:.0%} of the speed without communication.")
        if got > 1 and compute / predict(laconic.local_sgd(got - 1), facts).seconds > 10 / 11:
            raise NotYetError(f"{call} is longer than needed.")
    return "It is the shortest period with which rounds add at most a tenth to a step."


CHECKS: dict[str, Callable[[Any], str]] = {
    "1.1": parameters,
    "1.2": steps,
    "1.3": learning_rate,
    "2.1": accumulation,
    "2.2": noise,
    "2.3": travel,
    "3.1": shares,
    "3.2": unweighted,
    "3.3": saved,
    "4.1": all_reduce_bytes,
    "4.2": first_bucket,
    "4.3": may_leave,
    "4.4": last_arrival,
    "5.1": global_rank,
    "5.2": repeated,
    "5.3": loss_of_rank,
    "5.4": checkpoint,
    "6.1": period,
    "6.2": elastic,
    "6.3": post_local,
    "6.4": slowmo_as_diloco,
    "7.1": equal_rate,
    "7.2": most_progress,
    "7.3": long_enough,
}
