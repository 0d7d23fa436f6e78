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
# # 1. One CPU process
#
# This chapter trains a tiny network in one process, measures what that costs, and finds out where
# the cost comes from.
#
# **After this chapter you can**
#
# - say what a [step](../glossary.md#step), a [batch](../glossary.md#batch) and an
#   [epoch](../glossary.md#epoch) are;
# - repeat a training run bit for bit;
# - measure and estimate what training costs.
#
# **Before you start.** You know Python, and have seen a PyTorch training loop. `python -m tutorial
# 1` runs for about one minute ([set up the environment](index.md)).
#
# The code above each number printed it. Times, and all that follows from them, are from one run:
# yours will differ. `scaled(n)` is n, unless `TUTORIAL_SCALE` asks for less. An `assert` stops the
# chapter where the text would be wrong.

# %%
import torch
from torch.utils.data import DataLoader

from tutorial.toy import (
    SEED,
    FFNet,
    ToyDataset,
    benchmark_training,
    count_parameters,
    expect,
    machine,
    scaled,
    sgd,
    show,
    train_epoch,
)

torch.set_num_threads(1)  # one process on one core
print(machine())

# %% [markdown]
# ## A network and its data
#
# Listings of functions and classes are from `tutorial/`. `FFNet` is a stack of fully connected
# layers. A layer with m inputs and k outputs has m·k weights and k biases.

# %% tags=["source"]
show(FFNet, ToyDataset)

# %% [markdown]
# The small network has 100·10 + 10 + 10·1 + 1 = 1,021 parameters:

# %%
small = FFNet(input_size=100, num_hl=0, hl_size=10)
medium = FFNet(input_size=100, num_hl=3, hl_size=100)
print(f"small {count_parameters(small):,}, medium {count_parameters(medium):,} parameters")
assert count_parameters(small) == 1_021
assert count_parameters(medium) == 40_501

# %% [markdown]
# ## Ten epochs
#
# A step takes a batch of samples. The *forward pass* computes the [loss](../glossary.md#loss): how
# wrong the outputs are. The *backward pass* computes the [gradient](../glossary.md#gradient) of the
# loss with respect to every parameter. The [optimizer](../glossary.md#optimizer) moves the
# parameters slightly against the gradient:
#
# ![A step: a batch goes through the network to the loss, the backward pass computes a gradient for
# each parameter, and the optimizer changes the parameters](step.svg)
#
# An epoch is as many steps as it takes to see every sample once.

# %% tags=["source"]
show(train_epoch, sgd)


# %%
def train(seed, epochs=10, num_samples=1024, verbose=True):
    torch.manual_seed(seed)  # the network's start and the order of the data follow from it
    model = FFNet(input_size=100, num_hl=0, hl_size=10)
    data = ToyDataset(input_size=100, num_samples=num_samples)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    optimizer = sgd(model)
    losses = []
    for epoch in range(epochs):
        losses.append(train_epoch(model, loader, optimizer))
        if verbose:
            print(f"epoch {epoch + 1:2d}: loss {losses[-1]:.4f}")
    return losses


losses = train(SEED)
assert losses[-1] < losses[0] / 2  # it learns
assert losses == train(SEED, verbose=False)  # and the same seed gives the same run, bit for bit
assert losses != train(SEED + 1, verbose=False)

# %% [markdown]
# **What to notice.** The loss falls fast, then slowly, then fast again: by the second epoch the
# network has learned only the mean of all targets, whose loss is their variance, 0.42.
#
# The same seed repeats a run bit for bit, which chapter 3 uses.
#
# ## What it costs
#
# `benchmark_training` (in `tutorial/toy.py`) times epochs. Other programs can only make one slower,
# so from here on the fastest of several counts.

# %%
benchmark_training(small, num_samples=scaled(16_384, least=256), repeats=scaled(10, least=2))

# %% [markdown]
# Now both networks, each on a small data set of 16,384 samples and a large one of 131,072:

# %%
sizes = {"small": 16_384, "large": 131_072}
networks = {"small": small, "medium": medium}
seconds = {(m, d): float("inf") for m in networks for d in sizes}
for _ in range(scaled(4)):
    for (m, d), best in seconds.items():
        samples = scaled(sizes[d], least=sizes[d] // 64)
        taken = benchmark_training(
            networks[m], num_samples=samples, nb_epochs=1, repeats=2, verbose=False
        )
        seconds[m, d] = min(best, min(taken) / 1e9)

print("Seconds per epoch, batch 32\n")
print(f"{'':12}{'small data':>12}{'large data':>12}{'ratio':>8}")
for m in networks:
    row = [seconds[m, d] for d in sizes]
    print(f"{m:12}{row[0]:12.3f}{row[1]:12.3f}{row[1] / row[0]:8.2f}")

# %% [markdown]
# Costs multiply: eight times the data are eight times the steps, and a larger network makes every
# step more expensive:

# %%
base = seconds["small", "small"]
by_data = seconds["small", "large"] / base
by_model = seconds["medium", "small"] / base
by_both = seconds["medium", "large"] / base
print(f"data {by_data:.2f} times, network {by_model:.2f} times, product {by_data * by_model:.2f}")
print(f"both {by_both:.2f} times")

# %% tags=["hidden"]
expect(0.6 < by_both / (by_data * by_model) < 1.6, "both cost about the product of the two")

# %% [markdown]
# **What to notice.** The medium network has 40 times the parameters, and so 40 times the
# arithmetic, but far less than 40 times the cost:

# %%
ratio = count_parameters(medium) / count_parameters(small)
print(f"{ratio:.1f} times the parameters, {by_model:.1f} times the time")

# %% tags=["hidden"]
expect(by_model < ratio / 2, "the time grows far less than the parameters")

# %% [markdown]
# A step of the small network is mostly overhead: Python, and the dispatch of a few dozen tiny
# operations, which cost about the same whatever their size.
#
# With a network and data a thousand times larger:

# %%
days = seconds["medium", "large"] * 1000 * 1000 / 86_400
print(f"one epoch: {days:.0f} days")

# %% [markdown]
# One process is not enough.
#
# ## Exercises
#
# Each answer below makes a common mistake. Change it in Jupyter, or with `python -m tutorial start
# 1` and `check 1` ([how](index.md#exercises)).

# %% tags=["exercise", "hidden"]
import math

from tutorial.checks import check

# %% [markdown]
# **1.1** How many parameters does `FFNet(input_size, num_hl, hl_size)` have? Do not build the
# network to find out.


# %% tags=["exercise"]
def parameters(input_size, num_hl, hl_size):
    first = input_size * hl_size
    hidden = num_hl * hl_size * hl_size
    last = hl_size
    return first + hidden + last


check("1.1", parameters)


# %% tags=["solution"]
def parameters(input_size, num_hl, hl_size):
    first = input_size * hl_size + hl_size  # weights and biases
    hidden = num_hl * (hl_size * hl_size + hl_size)
    last = hl_size + 1
    return first + hidden + last


check("1.1", parameters)

# %% [markdown]
# **1.2** How many steps is an epoch of `samples` samples?


# %% tags=["exercise"]
def steps(samples, batch_size):
    return samples // batch_size


check("1.2", steps)


# %% tags=["solution"]
def steps(samples, batch_size):
    return math.ceil(samples / batch_size)  # the last batch may be smaller


check("1.2", steps)

# %% [markdown]
# **1.3** With batches of 64 in place of 8, an epoch has an eighth of the steps, and the loss after
# ten epochs is higher. Find a learning rate with which it is not.

# %% tags=["exercise"]
learning_rate = 0.001
check("1.3", learning_rate)

# %% tags=["solution"]
learning_rate = 0.01  # try 0.1, 0.2 and 1, too: how far can you go?
check("1.3", learning_rate)

# %% [markdown]
# To explore further:
#
# 1. How long does a step of the small network take with batches of 1, 8, 64, 512 and 4096? Where
#    does it begin to grow with the batch?
# 2. Set `torch.set_num_threads` to your number of cores. Which of the table's four cells gain by
#    it, and why not the others?
# 3. Widen the hidden layers until doubling the parameters doubles the time. How many operations per
#    second does your processor do there, at about 6 for each parameter and sample?
#
# ## Sources
#
# - L. Bottou, F. Curtis, J. Nocedal, *Optimization methods for large-scale machine learning*,
#   [arXiv 1606.04838](https://arxiv.org/abs/1606.04838).
# - J. Kaplan et al., *Scaling laws for neural language models*, [arXiv
#   2001.08361](https://arxiv.org/abs/2001.08361), section 2.1: 6 operations.
# - PyTorch, [Reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html).
