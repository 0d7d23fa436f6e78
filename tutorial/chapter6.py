# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Parameter averaging
#
# Let each [worker](../glossary.md#worker) train by itself for a while, and average the *parameters*
# from time to time:
#
# ![One parameter of three workers: each takes three steps of its own, then all take the mean, and
# again](averaging.svg)
#
# This chapter shows what that breaks and gains, and compares six such algorithms, written from
# their papers' formulas, with laconic's recipes.
#
# **After this chapter you can**
#
# - say when averaging parameters equals averaging gradients, and when it does not;
# - write local SGD, SlowMo, EASGD, LSGD, gossip and DiLoCo as loops;
# - compute what each sends for a given [period](../glossary.md#period);
# - judge what a longer period costs when workers have different samples.
#
# **Before you start.** Read chapters [3](chapter3.md) to [5](chapter5.md). `python -m tutorial 6`
# runs for about three minutes. It measures only bytes and losses, so all workers live in one
# process.

# %%
from dataclasses import replace

import torch

import laconic
from tutorial import averaging
from tutorial.averaging import ADAM, MOMENTUM, SGD, TWICE, Task, Team, apart, by_laconic, remembered
from tutorial.toy import FULL, SEED, count_parameters, machine, scaled, show

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## Four workers
#
# The toy data, made harder: samples are distributed ordered by their target, so worker 0 sees only
# small ones and worker 3 only large ones.
#
# A `Team` is all workers together. `team.x` is a matrix with a row of parameters for each, `team.g`
# has their gradients, and `team.train()` takes a step of each:

# %% tags=["source"]
show(Team.train, averaging.gradient_averaging, averaging.local_sgd)

# %% [markdown]
# The first loop is data-parallel training, the second **local SGD**.
#
# ## Averaging at every step
#
# With a period of 1, all workers start every step equal. With plain SGD
#
#     mean(x - lr*g_i) = x - lr*mean(g_i)
#
# so averaging parameters is the same as averaging gradients. With an optimizer that has state, each
# worker now has *its own* state:


# %%
print("30 steps, a period of 1\n")
print(f"{'':12}{'parameters of the':>20}{'states differ between workers, averaging':>44}")
print(f"{'optimizer':12}{'two ways differ by':>20}{'gradients':>26}{'parameters':>18}")
differ, state = {}, {}
for name, optimizer, kept in (
    ("SGD", SGD, None),
    ("momentum", MOMENTUM, "momentum_buffer"),
    ("AdamW", ADAM, "exp_avg_sq"),
):
    gradients, parameters = Team(Task(optimizer)), Team(Task(optimizer))
    averaging.gradient_averaging(gradients, 30)
    averaging.local_sgd(parameters, 30, period=1)
    differ[name] = float((gradients.x - parameters.x).abs().max())
    line = f"{name:12}{differ[name]:20.1e}"
    if kept:
        state[name] = [remembered(team, kept) for team in (gradients, parameters)]
        line += "{:26.1e}{:18.1e}".format(*map(apart, state[name]))
    print(line if kept else f"{line}{'none':>26}{'none':>18}")
assert max(differ["SGD"], differ["momentum"]) < 1e-12
assert differ["AdamW"] > 1e-3
for name in ("momentum", "AdamW"):
    of_gradients, of_parameters = state[name]
    assert apart(of_gradients) == 0 < 1e-2 < apart(of_parameters)
of_gradients, of_parameters = state["momentum"]
torch.testing.assert_close(of_parameters.mean(0), of_gradients[0], rtol=0, atol=1e-12)

# %% [markdown]
# **What to notice.**
#
# - SGD and momentum: the same parameters, although the workers' momenta differ widely. Momentum is
#   a sum of gradients, and the mean of sums is the sum of means.
# - AdamW divides by the root of a mean of squares, and the mean of quotients is not the quotient of
#   means: it is a different algorithm.
#
# This state can be kept, averaged too (more bytes), or reset, as laconic's `optimizer_state=` says.
# For AdamW none of the three equals gradient averaging:

# %%
task = Task(ADAM)
team = Team(task)
averaging.gradient_averaging(team, 10)
sent = {}
for choice in ("keep", "average", "reset"):
    trained = by_laconic(task, laconic.local_sgd(1, optimizer_state=choice), 10)
    off = float((trained.x - team.x).abs().max())
    print(
        f"{choice:8} differs from gradient averaging by {off:.1e}, sends {trained.sent:.1f} models"
    )
    assert off > 1e-3
    sent[choice] = trained.sent
assert sent["average"] > 2 * sent["keep"]

# %% [markdown]
# ## Normalization
#
# A BatchNorm layer keeps a running mean and variance of its inputs. They are not parameters, so
# averaging parameters does not change them. After a round of local SGD the workers' losses
# therefore differ:

# %%
task = Task(norm=True)
team = Team(task)
averaging.local_sgd(team, steps=48, period=16)
losses = [task.loss(worker.model) for worker in team.workers]
print("parameters differ by", apart(team.x))
print("losses of the same parameters:", *[f"{loss:.4f}" for loss in losses])
assert apart(team.x) == 0
assert len(set(losses)) == 4

for buffers in ("keep", "average"):
    trained = by_laconic(task, laconic.local_sgd(16), 48, buffers=buffers)
    losses = [task.loss(worker.model) for worker in trained.workers]
    print(f"laconic, buffers={buffers!r}:", *[f"{loss:.4f}" for loss in losses])
    assert len(set(losses)) == (4 if buffers == "keep" else 1)

# %% [markdown]
# laconic averages them with every round, unless you choose to keep them.
#
# ## What it gains
#
# An all-reduce between n workers sends 2(n-1)/n models (chapter 4). With a period of H there is one
# every H steps. Measured, in models per step:

# %%
task, steps = Task(), 32
law = 2 * (task.workers - 1) / task.workers
print(f"{count_parameters(task.network())} parameters, {task.workers} workers, {steps} steps\n")
print(f"{'':16}{'sent per step':>16}{'2(n-1)/n / H':>16}")
for name, period, recipe in [
    ("ddp()", 1, laconic.ddp()),
    *[(f"local_sgd({period})", period, laconic.local_sgd(period)) for period in (1, 4, 16)],
]:
    sent = by_laconic(task, recipe, steps).sent
    print(f"{name:16}{sent:16.4f}{law / period:16.4f}")
    assert abs(sent * period / law - 1) < 0.02  # padded to a multiple of n, and some bytes once

# %% [markdown]
# ## Six algorithms
#
# Each loop is compared with laconic's recipe after 45 steps, five beyond the last round, when
# workers differ. Compared are the workers and *the model*, which you would validate and ship. The
# laconic side is always this; only the recipe changes:

# %% tags=["source"]
show(averaging.by_laconic, first="worker = Worker", last="sync.detach")

# %%
STEPS = 45


def the_same(loop, recipe, task, **options):
    team = Team(task)
    model = loop(team)
    trained = by_laconic(task, recipe, STEPS, **options)
    workers = float((trained.x - team.x).abs().max())
    shipped = float((trained.model - model).abs().max())
    print(f"workers are {apart(team.x):.1e} apart; laconic's differ by {workers:.1e}", end=", ")
    print(f"its model by {shipped:.1e}")
    assert workers < 1e-12 > shipped
    assert apart(team.x) > 1e-3


task = Task(MOMENTUM)
the_same(lambda team: averaging.local_sgd(team, STEPS, 8), laconic.local_sgd(8), task)

# %% [markdown]
# ### SlowMo: momentum for the average
#
# SlowMo treats `a - mean(x)`, the average's way back to the last *slow step*, as a gradient, and
# moves the [anchor](../glossary.md#anchor) a against it by a step with momentum, an [outer
# step](../glossary.md#outer-step) in laconic. Between slow steps any other algorithm may run, here
# local SGD.

# %% tags=["source"]
show(averaging.slowmo)

# %%
the_same(
    lambda team: averaging.slowmo(team, STEPS, base=4, period=8, beta=0.5, lr=0.02),
    laconic.slowmo(laconic.local_sgd(4), period=8, momentum=0.5),
    task,
)

# %% [markdown]
# ### EASGD: elastic averaging
#
# Workers never become equal. Each moves a part of the distance to a *center* a, and the center
# moves toward all.

# %% tags=["source"]
show(averaging.easgd)

# %%
the_same(lambda team: averaging.easgd(team, STEPS, period=8), laconic.easgd(8), task)

# %% [markdown]
# ### LSGD: follow the leader
#
# The mean of workers near different minima can have a higher loss than each. LSGD moves workers
# toward *leaders* instead, those with the lowest mean of their last ten losses: here the best of a
# worker's group, such as one host, every 2 steps, and the best of all every 8. Then workers move a
# tenth of the way toward the new leader, and at every step slightly toward both.

# %% tags=["source"]
show(averaging.lsgd)

# %%
the_same(
    lambda team: averaging.lsgd(team, STEPS, period=8, local_period=2, group=2),
    laconic.lsgd(8, local_period=2),
    task,
    group_size=2,
)

# %% [markdown]
# ### SGP: gossip
#
# All algorithms so far wait for the slowest worker. In [gossip](../glossary.md#gossip) each worker
# keeps a half of its x, sends the other half to one other, and adds what it receives. If every
# worker receives as much as it sends, all converge to the mean. A worker that receives more ends
# with too large an x.
#
# [Push-sum](../glossary.md#push-sum) corrects this. Each worker also has a number w, 1 at first,
# which is halved, sent, and added up exactly as x is, so x/w is the mean. Here are three workers in
# a row with the numbers 0, 3, and 9, whose mean is 4. The middle one receives from both sides:

# %% tags=["source"]
show(averaging.row_of_three)

# %%
x = torch.tensor([[0.0], [3.0], [9.0]], dtype=torch.float64)
w = torch.ones_like(x)
for k in range(40):
    shares = averaging.row_of_three(3, k)
    assert torch.equal(shares.sum(0), w.new_ones(3))  # nothing is lost
    x, w = shares @ x, shares @ w
for name, column in (("x", x), ("w", w), ("x / w", x / w)):
    print(f"{name:6}", *[f"{float(value):7.4f}" for value in column])
assert float((x - 4).abs().max()) > 1  # not the mean of 0, 3 and 9
assert float((x / w - 4).abs().max()) < 1e-6  # the mean

# %% [markdown]
# SGP trains with push-sum. The network's parameters are z = x/w. The gradient is computed at z, and
# the step made from it is added to x:

# %% tags=["source"]
show(averaging.sgp)

# %%
the_same(lambda team: averaging.sgp(team, STEPS, averaging.exponential), laconic.sgp(), task)
the_same(
    lambda team: averaging.sgp(team, STEPS, averaging.row_of_three),
    laconic.sgp("bipartite_linear"),
    replace(task, workers=3),
)

# %% [markdown]
# With `exponential` each of the 4 workers receives as much as it sends, so w stays 1. In the row of
# three it does not.
#
# ### DiLoCo: an outer optimizer
#
# DiLoCo is SlowMo's idea with AdamW as the [inner optimizer](../glossary.md#inner-optimizer),
# periods of hundreds of steps, and Nesterov momentum with its own learning rate as the [outer
# optimizer](../glossary.md#outer-optimizer).

# %% tags=["source"]
show(averaging.diloco)

# %%
the_same(
    lambda team: averaging.diloco(team, STEPS, period=8, eta=0.7, mu=0.9),
    laconic.diloco(8, lr=0.7, momentum=0.9),
    Task(ADAM),
)

# %% [markdown]
# ## What it costs
#
# The loss, on all samples, of each algorithm's model after the same steps of the same SGD
# (DiLoCo's, too), with three seeds. Samples are distributed *ordered* by target, as above, or
# *shuffled*.

# %%
steps, seeds = scaled(480, least=16), range(SEED, SEED + scaled(3))
double = Task(TWICE)
local = laconic.local_sgd(16)
rows = {
    "ddp()": (Task(), laconic.ddp()),
    "ddp(), lr 0.1": (double, laconic.ddp()),
    "sgp()": (Task(), laconic.sgp()),
    "local_sgd(4)": (Task(), laconic.local_sgd(4)),
    "local_sgd(16)": (Task(), local),
    "local_sgd(16), lr 0.1": (double, local),
    "local_sgd(64)": (Task(), laconic.local_sgd(64)),
    "slowmo(.., 16, 0.5)": (Task(), laconic.slowmo(local, 16, 0.5)),
    "slowmo(.., 16, 0.9)": (Task(), laconic.slowmo(local, 16, 0.9)),
    "diloco(16)": (Task(), laconic.diloco(16)),
    "easgd(16)": (Task(), laconic.easgd(16)),
    "lsgd(16, 4)": (Task(), laconic.lsgd(16, local_period=4)),
}
print(f"loss after {steps} steps of {Task().workers} workers, lr 0.05 unless said, by seed\n")
print(f"{'':22}{'ordered shards':>24}   {'shuffled shards':>24}{'sent per step':>15}")
ordered, shuffled, sent = {}, {}, {}
for name, (task, recipe) in rows.items():
    for losses, alike in ((ordered, False), (shuffled, True)):
        losses[name] = []
        for seed in seeds:
            here = replace(task, alike=alike, seed=seed)
            groups = {"group_size": 2} if name == "lsgd(16, 4)" else {}
            trained = by_laconic(here, recipe, steps, **groups)
            losses[name].append(trained.loss)
        sent[name] = trained.sent
    left, right = (
        "".join(f"{loss:8.4f}" for loss in losses[name]) for losses in (ordered, shuffled)
    )
    print(f"{name:22}{left:>24}   {right:>24}{sent[name]:15.3f}")

if FULL:  # losses are meaningful only after all steps
    averaging.check_claims(ordered, shuffled, sent)

# %% [markdown]
# **What to notice.**
#
# - **A longer period** costs the more, the more the workers' samples differ. On shuffled shards a
#   period of 64 costs almost nothing. On ordered shards a period of 4 costs a little, 16 means more
#   than ten times the loss, and 64 more than thirty times.
# - **Slow momentum** sends what local SGD sends. A momentum of 0.5 goes 2 times as far in a
#   constant direction (1 + 1/2 + 1/4 and so on), so compare it with local SGD at twice the learning
#   rate. On shuffled shards both are about equally good. On ordered shards slow momentum is clearly
#   better, because a larger learning rate also drives workers further apart.
# - **Too much momentum** hurts: 0.9 goes 10 times as far, and on shuffled shards ends at a higher
#   loss than local SGD.
# - **DiLoCo**'s usual settings go up to seven times as far. It is ahead of `ddp()` on shuffled
#   shards, but so is `ddp()` with twice the learning rate.
# - **Gossip** does what gradient averaging does, for two thirds of the bytes among 4 workers.
# - **EASGD and LSGD** couple workers loosely to explore, and are behind local SGD with the same
#   period on this small task.
#
# ## A leader with the wrong samples
#
# LSGD has a problem of its own with ordered shards: a worker's loss is that of its own samples, and
# small targets are easy.

# %%
task = Task()
trained = by_laconic(task, laconic.lsgd(16, local_period=4), steps, group_size=2)
own = [task.loss(worker.model, rank) for rank, worker in enumerate(trained.workers)]
everywhere = [task.loss(worker.model) for worker in trained.workers]
print(f"{'worker':>8}{'loss on its own samples':>26}{'on all samples':>18}")
for rank, losses in enumerate(zip(own, everywhere, strict=True)):
    print(f"{rank:8}{losses[0]:26.4f}{losses[1]:18.4f}")
leader = own.index(min(own))
if FULL:
    assert everywhere[leader] == max(everywhere)

# %% [markdown]
# All workers are pulled toward the one that is the best on its own samples and the worst on all. If
# shards differ, choose a leader by its loss on shared samples: `sync.report_loss` accepts any.
#
# For your task, use `laconic compare` ([comparing](../compare.md)), and a search
# ([tuning](../tune.md)). In the table of [Science](../science.md) each algorithm was tuned.
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 6` and `check 6`.

# %% tags=["exercise", "hidden"]
from tutorial.checks import check

# %% [markdown]
# **6.1** Find the shortest period with which each of 4 workers sends at most a tenth of a model per
# step. Messages are padded slightly, so the check accepts 2% more.

# %% tags=["exercise"]
period = 10
check("6.1", period)

# %% tags=["solution"]
period = 15  # 1.5 models per round
check("6.1", period)

# %% [markdown]
# **6.2** Correct this round of EASGD. `x` has a row for each worker, `a` is the center. Return both
# as they are afterward.


# %% tags=["exercise"]
def elastic_round(x, a, beta):
    x = x - beta / len(x) * (x - a)
    a = (1 - beta) * a + beta * x.mean(0)
    return x, a


check("6.2", elastic_round)


# %% tags=["solution"]
def elastic_round(x, a, beta):
    center = (1 - beta) * a + beta * x.mean(0)  # with x before the pull
    return x - beta / len(x) * (x - a), center


check("6.2", elastic_round)

# %% [markdown]
# **6.3** Write post-local SGD: gradient averaging for the first `start` steps, and local SGD from
# then on.


# %% tags=["exercise"]
def post_local_sgd(team, steps, start, period):
    for t in range(1, steps + 1):
        team.train()
        if t <= start or t % period == 0:
            team.x = team.x.mean(0)


check("6.3", post_local_sgd)


# %% tags=["solution"]
def post_local_sgd(team, steps, start, period):
    for t in range(1, steps + 1):
        team.backward()
        if t <= start:
            team.g = team.g.mean(0)  # all workers keep the same momentum, too
        team.step()
        if t > start and t % period == 0:
            team.x = team.x.mean(0)


check("6.3", post_local_sgd)

# %% [markdown]
# **6.4** Without momentum (mu = 0) and with eta = 0.7, DiLoCo is a SlowMo over local SGD with the
# same period. With which beta and alpha?

# %% tags=["exercise"]
slow = {"beta": 0.7, "alpha": 1.0}
check("6.4", slow)

# %% tags=["solution"]
slow = {"beta": 0.0, "alpha": 0.7}  # u is (a - mean(x))/lr, so a moves by 0.7*(a - mean(x))
check("6.4", slow)

# %% [markdown]
# To explore further:
#
# 1. In `by_laconic`, report `task.loss(worker.model)` in place of the batch's loss. Is `lsgd(16,
#    local_period=4, window=1)` any better on ordered shards now?
# 2. How much of the cost of a period of 16 does `laconic.post_local_sgd(100, 16)` recover on
#    ordered shards?
# 3. Train the row of three without w: `team.x = x`. What do the workers converge to?
# 4. Set `BATCH` in `tutorial/averaging.py` to 64, for gradients with less noise. Does the table's
#    order change? And with `Task(MOMENTUM)`?
#
# ## Sources
#
# - R. McDonald, K. Hall, G. Mann, [*Distributed training strategies for the structured
#   perceptron*](https://aclanthology.org/N10-1069/), 2010, and M. Zinkevich et al., [*Parallelized
#   stochastic gradient
#   descent*](https://papers.nips.cc/paper/4006-parallelized-stochastic-gradient-descent), 2010:
#   parameters averaged.
# - S. Stich, *Local SGD converges fast and communicates little*, [arXiv
#   1805.09767](https://arxiv.org/abs/1805.09767).
# - J. Wang et al., *SlowMo*, [arXiv 1910.00643](https://arxiv.org/abs/1910.00643), Algorithm 1.
# - S. Zhang, A. Choromanska, Y. LeCun, *Deep learning with elastic averaging SGD*, [arXiv
#   1412.6651](https://arxiv.org/abs/1412.6651), equations 5 and 6.
# - Y. Teng et al., *Leader stochastic gradient descent*, [arXiv
#   1905.10395](https://arxiv.org/abs/1905.10395), Algorithm 1.
# - M. Assran et al., *Stochastic gradient push*, [arXiv
#   1811.10792](https://arxiv.org/abs/1811.10792), Algorithm 1.
# - A. Douillard et al., *DiLoCo*, [arXiv 2311.08105](https://arxiv.org/abs/2311.08105), Algorithm
#   1.
