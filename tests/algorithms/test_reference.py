"""The references checked: against finite differences, torch's optimizers, and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.references.reference import (
    GROUPS,
    HIDDEN,
    INPUT,
    NAMES,
    OUTPUT,
    SGD,
    SHAPES,
    AdamW,
    Optimizer,
    Rates,
    Recipe,
    Trace,
    Worker,
    adam_outer,
    bmuf,
    copy,
    ddp,
    diloco,
    gradient,
    heavy_ball_outer,
    initial,
    large_batch_momentum,
    local_sgd,
    lookahead,
    loss,
    make_data,
    max_difference,
    mean,
    post_local_sgd,
    run,
    slowmo,
)

n, steps = 3, 13
data, init = make_data(n, steps, seed=1), initial(n, seed=2)
rules: list[list[Optimizer]] = [
    [SGD(), SGD(weight_decay=0.1)],
    [SGD(0.9, weight_decay=0.01), SGD(0.5)],
    [SGD(0.9, nesterov=True), SGD(0.8, nesterov=True, weight_decay=0.02)],
    [AdamW(weight_decay=0.1), AdamW((0.8, 0.95), 1e-6, 0.0)],
]
plain, nesterov, adam = rules[0], rules[2], rules[3]
same = max_difference


def lr(group: int, t: int) -> float:
    return (0.2, 0.1)[group] / (1 + 0.1 * t)


def constant(group: int, t: int) -> float:
    return (0.2, 0.1)[group]


def agree(what: str, difference: float, limit: float = 1e-12) -> None:
    assert difference <= limit, what


def go(recipe: Recipe, optimizer: list[Optimizer] = nesterov, rate: Rates = lr) -> Trace:
    return run(recipe, n, steps, optimizer, rate, data, init)


def one(recipe: Recipe, optimizer: list[Optimizer] = nesterov) -> Trace:
    return run(recipe, 1, steps, optimizer, lr, data, init)


def test_gradient_against_finite_differences() -> None:
    g, worst, h = gradient(init[0], data[0][0]), 0.0, 1e-6
    for name in NAMES:
        for at in np.ndindex(SHAPES[name]):
            up, down = copy(init[0]), copy(init[0])
            up[name][at] += h
            down[name][at] -= h
            slope = (loss(up, data[0][0]) - loss(down, data[0][0])) / (2 * h)
            worst = max(worst, abs(slope - float(g[name][at])))
    agree("gradient against finite differences", worst, 1e-8)


@pytest.mark.parametrize("optimizer", rules, ids=["sgd", "heavy ball", "nesterov", "adamw"])
def test_local_optimizers_are_those_of_torch(optimizer: list[Optimizer]) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(INPUT, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUTPUT)
    ).double()
    tensors = dict(zip(NAMES, net.parameters(), strict=True))
    for name in NAMES:
        tensors[name].data.copy_(torch.from_numpy(init[0][name]))
    groups = [
        {"params": [tensors[k] for k in names], **vars(rule)}
        for names, rule in zip(GROUPS, optimizer, strict=True)
    ]
    theirs: torch.optim.Optimizer
    if isinstance(optimizer[0], AdamW):
        theirs = torch.optim.AdamW(groups, lr=1.0)
    else:
        theirs = torch.optim.SGD(groups, lr=1.0)
    trace, worst = run(Recipe(), 1, steps, optimizer, lr, data, init), 0.0
    for t in range(1, steps + 1):
        for group in (0, 1):
            theirs.param_groups[group]["lr"] = lr(group, t)
        theirs.zero_grad()
        x, target = (torch.from_numpy(part) for part in data[0][t - 1])
        torch.nn.MSELoss()(net(x), target).backward()
        theirs.step()
        for name in NAMES:
            mine = trace.workers[t - 1][0][name]
            worst = max(worst, float(np.abs(mine - tensors[name].detach().numpy()).max()))
    agree(f"torch, {optimizer}", worst)


def test_special_cases_agree() -> None:
    same = max_difference
    agree("local_sgd(1) is ddp, plain SGD", same(go(local_sgd(1), plain), go(ddp(), plain)))
    averaged = go(local_sgd(1, 0, "average"))
    agree("local_sgd(1, average) is ddp, Nesterov", same(averaged, go(ddp())))
    agree("post_local(T) is ddp", same(go(post_local_sgd(steps, 3)), go(ddp())))
    agree("post_local(0) is local", same(go(post_local_sgd(0, 3)), go(local_sgd(3))))
    for base in (None, local_sgd(3)):
        both = go(slowmo(base, 3, 0.0, 1.0), adam), go(local_sgd(3), adam)
        agree("slowmo(beta 0, alpha 1) is local_sgd", same(*both, consensus=False))
    outer = diloco(3, 1.0, 0.0)
    agree("diloco(1, 0) is local_sgd", same(go(outer), go(local_sgd(3)), consensus=False))
    nest, rate_one = (SGD(0.9, nesterov=True), 0.7), diloco(3)
    agree("diloco's formula is torch's SGD", same(go(diloco(3, outer=nest)), go(rate_one)))

    ahead = lookahead(4, 0.6, steps, adam, lr, data, init)
    agree("slowmo(n 1, beta 0) is Lookahead", same(one(slowmo(None, 4, 0.0, 0.6), adam), ahead))
    decay = 0.1
    sgd: list[Optimizer] = [SGD(weight_decay=decay)] * 2
    large = large_batch_momentum(n, steps, 0.6, 0.8, lr, data, init, decay)
    for inner in (None, ddp()):
        agree("slowmo(tau 1) is large-batch", same(go(slowmo(inner, 1, 0.6, 0.8), sgd), large))
    slow = go(slowmo(None, 3, 0.6, 0.8), nesterov, constant)
    settings = (n, steps, 3, 0.6, 0.8, nesterov, constant, data, init)
    agree("slowmo at constant lr is heavy ball", same(slow, heavy_ball_outer(*settings)))
    agree("slowmo at constant lr is BMUF", same(slow, bmuf(*settings)))
    agree("one worker: a delayed average is nothing", same(one(local_sgd(2, 5)), one(Recipe())))
    early = go(slowmo(local_sgd(2, 9), 3, 0.5, 1.0)), go(slowmo(None, 3, 0.5, 1.0))
    agree("a message settled at the slow step", same(*early))  # sent at 2, 4 and so on


def test_a_fold_without_local_progress_is_the_mean() -> None:
    # The delayed formula with nothing in between is the undelayed one, and keeps mean(x).
    workers = [Worker(copy(p)) for p in init]
    before, late = mean(init), local_sgd(2, 1)
    late.start(init[0], n)
    late.after_step(2, workers, lr)
    late.after_step(3, workers, lr)
    folded = max(float(np.abs(w.x[k] - before[k]).max()) for w in workers for k in NAMES)
    agree("a fold without local progress is the mean", folded)


def test_every_option_makes_a_difference() -> None:
    settled = heavy_ball_outer(n, steps, 3, 0.5, 1.0, nesterov, constant, data, init)
    pairs = {
        "delay": (go(local_sgd(3, 1)), go(local_sgd(3))),
        "delay beyond the period": (go(local_sgd(2, 5)), go(local_sgd(2, 3))),
        "average": (go(local_sgd(3, 0, "average")), go(local_sgd(3))),
        "reset": (go(local_sgd(3, 0, "reset")), go(local_sgd(3))),
        "no average": (go(slowmo(None, 3, average=False)), go(slowmo(None, 3))),
        "diloco delay": (go(diloco(3, delay=2)), go(diloco(3))),
        "outer Adam": (go(diloco(3, outer=adam_outer(0.05))), go(diloco(3))),
        "lr in u": (go(slowmo(None, 3)), settled),
    }
    for what, (one, other) in pairs.items():
        assert max_difference(one, other) > 1e-4, what


def test_at_learning_rate_zero_the_anchor_moves_alone() -> None:
    def zero(group: int, t: int) -> float:
        return 0.0 if t == 6 else lr(group, t)

    frozen = go(slowmo(None, 3, 0.9, 0.5), nesterov, zero)
    a, xbar = frozen.consensus[2], mean(frozen.workers[4])  # at lr 0 step 6 leaves x alone
    halves = {k: 0.5 * a[k] + 0.5 * xbar[k] for k in NAMES}
    gaps = [float(np.abs(frozen.consensus[5][k] - halves[k]).max()) for k in NAMES]
    agree("lr 0: only the anchor moves", max(gaps))
    assert all(np.isfinite(p[k]).all() for p in frozen.consensus for k in NAMES)
