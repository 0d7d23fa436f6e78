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
# Chapter 4 ended with a network on which every step waits for its gradients. So don't send at every
# step: let each worker train by itself for a while, and average the *parameters* now and then. This
# chapter looks at what that breaks and what it gains, writes six algorithms of this kind from their
# papers' formulas, about ten lines each, and holds each against laconic's one line.
#
# Bytes and losses are all that counts here, no times. So the workers live in one process: by hand
# as rows of a matrix, with laconic as `laconic.simulate` runs them.

# %%
from dataclasses import replace

import torch

import laconic
from tutorial import averaging
from tutorial.averaging import ADAM, MOMENTUM, SGD, Task, Team, by_laconic
from tutorial.toy import FULL, SEED, count_parameters, scaled, show

torch.set_num_threads(1)
print(f"torch {torch.__version__}, {'all' if FULL else 'scaled to a part'} of the work")

# %% [markdown]
# ## Four workers
#
# A worker has a network, an optimiser, and samples that no other worker has. The task is the toy
# data's, made harder: samples are ordered by their target before they are dealt out, so that worker
# 0 sees small targets only and worker 3 large ones. Left alone, they learn four different things.

# %% tags=["source"]
show(averaging.Worker)

# %% [markdown]
# A `Team` is all of them. `team.x` is a matrix with a row of parameters for each worker, `team.g`
# the same of gradients. What is written to them is a row for each, or one for all.

# %% tags=["source"]
show(Team.train, averaging.gradient_averaging, averaging.local_sgd)

# %% [markdown]
# The first loop is the data-parallel training of chapters 3 to 5. The second is **local SGD**.
#
# ## At every step: the same, or not
#
# With a period of 1, is averaging parameters the same as averaging gradients? All start alike, so
# with plain SGD
#
#     mean(x - lr*g_i) = x - lr*mean(g_i)
#
# and it is. With an optimiser that remembers something, each worker now remembers *its own*:


# %%
def remembered(team, name):
    """What the workers' optimisers keep under ``name``: a row for each."""
    return torch.stack(
        [
            torch.cat([w.optimizer.state[p][name].flatten() for p in w.model.parameters()])
            for w in team.workers
        ]
    )


def apart(rows):
    """The largest difference between a worker's row and the first's."""
    return float((rows - rows[0]).abs().max())


print("30 steps, a period of 1\n")
print(f"{'optimiser':12}{'parameters differ':>20}{'states of the workers differ by':>34}")
print(f"{'':12}{'between the two by':>20}{'averaged gradients':>20}{'parameters':>14}")
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
    teams = (gradients, parameters)
    state[name] = [apart(remembered(team, kept)) for team in teams] if kept else [0.0, 0.0]
    print(f"{name:12}{differ[name]:20.1e}{state[name][0]:20.1e}{state[name][1]:14.1e}")
    if name == "momentum":
        mean_momentum = remembered(parameters, kept).mean(0)
        torch.testing.assert_close(mean_momentum, remembered(gradients, kept)[0])
assert max(differ["SGD"], differ["momentum"]) < 1e-12
assert differ["AdamW"] > 1e-3
for name in ("momentum", "AdamW"):
    of_gradients, of_parameters = state[name]
    assert of_gradients == 0 < 1e-2 < of_parameters

# %% [markdown]
# **What to notice.**
#
# - SGD: the same to the last digits.
# - Momentum: the same parameters, though the workers' momenta are far apart. Momentum is a sum of
#   gradients, and the mean of sums is the sum of means: on average they remember what they should.
#   With a longer period that no longer holds, as gradients are then taken in different places.
# - AdamW divides by the root of a mean of squares, and the mean of quotients is not the quotient of
#   means. It is another algorithm from the first steps on.
# - Averaging gradients has none of this. All see the same gradient, so all remember the same.
#
# What should become of such state when parameters are averaged? It can be kept, averaged too (more
# bytes), or forgotten; laconic's `optimizer_state=` says which. For AdamW none of the three is
# gradient averaging:

# %%
task = Task(ADAM)
team = Team(task)
averaging.gradient_averaging(team, 30)
for choice in ("keep", "average", "reset"):
    trained = by_laconic(task, laconic.local_sgd(1, optimizer_state=choice), 30)
    off = float((trained.x - team.x).abs().max())
    print(f"{choice:8} parameters differ from gradient averaging's by {off:.1e}, {trained.sent:.1f} models sent per step")
    assert off > 1e-3

# %% [markdown]
# ## Normalisation
#
# A BatchNorm layer keeps a running mean and variance of what passes through it, to be used when the
# network is used. They are no parameters: no gradient reaches them, and averaging parameters leaves
# them alone. After a round of local SGD all workers hold the same parameters, and yet:

# %%
task = Task(norm=True)
team = Team(task)
averaging.local_sgd(team, steps=96, period=16)
losses = [task.loss(worker.model) for worker in team.workers]
print("parameters differ by", apart(team.x))
print("losses of the same parameters:", *[f"{loss:.4f}" for loss in losses])
assert apart(team.x) == 0
assert len(set(losses)) == 4

for buffers in ("keep", "average"):
    trained = by_laconic(task, laconic.local_sgd(16), 96, buffers=buffers)
    losses = [task.loss(worker.model) for worker in trained.workers]
    print(f"laconic, buffers={buffers!r}:", *[f"{loss:.4f}" for loss in losses])
    assert len(set(losses)) == (4 if buffers == "keep" else 1)

# %% [markdown]
# Each worker has the statistics of its own samples. laconic averages them with every round unless
# told to keep them. Gradient averaging has this one too: torch's `DistributedDataParallel` takes
# rank 0's statistics for all.
#
# ## What it gains
#
# An all-reduce of a model between n workers sends 2(n-1)/n models (chapter 4 did it with n = 2), and
# with a period of H there is one every H steps. Measured, as models per step:

# %%
task, steps = Task(), 64
law = 2 * (task.workers - 1) / task.workers
print(f"{count_parameters(task.network())} parameters, {task.workers} workers, {steps} steps\n")
print(f"{'':16}{'sent per step':>16}{'2(n-1)/n / H':>16}")
for name, period, recipe in [
    ("ddp()", 1, laconic.ddp()),
    *[(f"local_sgd({period})", period, laconic.local_sgd(period)) for period in (1, 4, 16, 64)],
]:
    sent = by_laconic(task, recipe, steps).sent
    print(f"{name:16}{sent:16.4f}{law / period:16.4f}")
    assert abs(sent * period / law - 1) < 0.01  # a model is padded to a multiple of n

# %% [markdown]
# A factor that one chooses. What a long period costs is the question of the rest of this chapter;
# first, what can be done about it.
#
# ## Six algorithms
#
# Each comes as a loop written from its paper, and as laconic's recipe. They are compared for every
# worker after 45 steps, five beyond the last round, when the workers are apart: if any round had
# gone otherwise, one of them would show it. And they are compared in what they take for *the model*:
# what one would validate and ship while workers differ.

# %%
STEPS = 45


def the_same(loop, recipe, task, **options):
    team = Team(task)
    model = loop(team)
    trained = by_laconic(task, recipe, STEPS, **options)
    workers = float((trained.x - team.x).abs().max())
    shipped = float((trained.model - model).abs().max())
    print(f"workers are up to {apart(team.x):.1e} apart")
    print(f"by hand and by laconic: workers differ by {workers:.1e}, the model by {shipped:.1e}")
    assert workers < 1e-12 > shipped
    assert apart(team.x) > 1e-3


task = Task(MOMENTUM)
the_same(lambda team: averaging.local_sgd(team, STEPS, 8), laconic.local_sgd(8), task)

# %% [markdown]
# ### SlowMo: momentum for the average
#
# Where the average went since the last slow step, `a - mean(x)`, is taken for a gradient, and the
# *anchor* a makes a step with momentum along it. Between slow steps any other algorithm may run,
# here local SGD.

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
# Workers never become equal. Each is drawn a part of the way to a *centre* a, and the centre to
# them, as if by springs.

# %% tags=["source"]
show(averaging.easgd)

# %%
the_same(lambda team: averaging.easgd(team, STEPS, period=8), laconic.easgd(8), task)

# %% [markdown]
# ### LSGD: follow the leader
#
# An average of workers in different valleys can lie on the ridge between them. So go toward the
# *best* worker instead: the best of the own group often, the best of all seldom, and a little toward
# both at every step. The best has the least mean of its last ten losses.

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
# All so far wait for the slowest worker. In a gossip each worker sends to one other and waits for
# one. If x_i becomes a mixture of what worker i kept and what it was sent, and everybody sends as
# much as everybody gets, all come to the mean of all. If some get more, they come to something else.
# *Push-sum* puts that right: a weight w travels with x and is mixed like it, and x/w comes to the
# mean. Three workers in a row, with the numbers 0, 3 and 9:

# %% tags=["source"]
show(averaging.exponential, averaging.row_of_three)

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
# In SGP x moves by a step of the optimiser too, and what the network holds, where gradients are
# taken, is z = x/w:

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
# Among n = 4 workers each gets as much as it sends: w stays 1. In the row of three it does not.
#
# ### DiLoCo: an outer optimiser
#
# SlowMo's idea with other choices: AdamW inside, hundreds of steps to a period, and outside
# Nesterov's momentum with a learning rate of its own.

# %% tags=["source"]
show(averaging.diloco)

# %%
the_same(
    lambda team: averaging.diloco(team, STEPS, period=8, eta=0.7, mu=0.9),
    laconic.diloco(8, lr=0.7, momentum=0.9),
    Task(ADAM),
)
