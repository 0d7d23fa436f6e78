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
# Before several machines train one network, one process does. This chapter trains a tiny network
# on made-up data, measures what it costs, and finds out what that cost is made of. Everything
# later is compared with the numbers that you get here.
#
# You need Python, PyTorch and a few minutes. Every number below was printed by the code above it;
# run it on your machine and you get your own. `scaled(n)` is n, or as much of it as
# `TUTORIAL_SCALE` says (0.1: a tenth of the work), and the chapter then says so; `FULL` is whether
# it is all of it, as what is claimed about times needs.

# %%
import torch
from torch.utils.data import DataLoader

from tutorial.toy import (
    FULL,
    SEED,
    FFNet,
    ToyDataset,
    benchmark_training,
    count_parameters,
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
# `FFNet` is a stack of fully connected layers. A layer from m numbers to k has k weights for each
# of its m inputs and k biases, m·k + k parameters in all.
#
# `ToyDataset` is random inputs and a target that is a fixed function of them, so there is something
# to learn, and everyone gets the same data from the same seed.

# %% tags=["source"]
show(FFNet, ToyDataset)

# %% [markdown]
# Two sizes of network will do. The small one has 100 inputs, one hidden layer of 10 and one
# output: 100·10 + 10 + 10·1 + 1 = 1,021 parameters. The medium one has four hidden layers of 100.

# %%
small = FFNet(input_size=100, num_hl=0, hl_size=10)
medium = FFNet(input_size=100, num_hl=3, hl_size=100)
print(f"small {count_parameters(small):,}, medium {count_parameters(medium):,} parameters")
assert count_parameters(small) == 1_021
assert count_parameters(medium) == 40_501

# %% [markdown]
# ## Ten epochs
#
# A step takes a batch of samples, computes the loss (forward pass), its gradient with regard to
# every parameter (backward pass), and moves the parameters a little against the gradient
# (optimiser). An epoch is as many steps as it takes to see every sample once.

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
# **What to notice.** The loss falls fast, then slowly. Each line is the mean over the epoch, of
# losses from before the parameters had seen that sample in that epoch. And a run can be repeated
# bit for bit, which is what lets chapter 3 show that two processes compute the same as one.
#
# ## What it costs
#
# `benchmark_training` times epochs, several times over, since one measurement is none: other
# programs, the processor's clock and its caches all have a part in it. It returns nanoseconds.

# %% tags=["source"]
show(benchmark_training)

# %%
taken = benchmark_training(
    small, num_samples=scaled(16_384, least=256), repeats=scaled(10, least=2)
)
print([f"{nanoseconds:,}" for nanoseconds in taken])

# %% [markdown]
# Repeats differ though the work is the same, and what disturbs them only ever makes them slower. So
# from here on the best of several counts.
#
# Now two networks and two sets of data, a small and a large one of 16,384 and 131,072 samples,
# eight times as many. Each is measured in turn and several times over, so that a disturbance does
# not hit one of them alone.

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

print(f"Seconds per epoch, batch 32, on {machine()}\n")
print(f"{'':12}{'small data':>12}{'large data':>12}{'ratio':>8}")
for m in networks:
    row = [seconds[m, d] for d in sizes]
    print(f"{m:12}{row[0]:12.3f}{row[1]:12.3f}{row[1] / row[0]:8.2f}")

# %% [markdown]
# Costs multiply. Eight times the data are eight times the steps, whichever network takes them; a
# larger network makes every step dearer, on whichever data. So what both together cost can be told
# from each alone:

# %%
base = seconds["small", "small"]
by_data = seconds["small", "large"] / base
by_model = seconds["medium", "small"] / base
by_both = seconds["medium", "large"] / base
print(f"data {by_data:.2f} times, network {by_model:.2f} times, product {by_data * by_model:.2f}")
print(f"both {by_both:.2f} times")
if FULL:  # times count at full size only
    assert 0.6 < by_both / (by_data * by_model) < 1.6

# %% [markdown]
# **What to notice.** The medium network has 40 times the parameters and so 40 times the arithmetic,
# but nowhere near 40 times the cost:

# %%
ratio = count_parameters(medium) / count_parameters(small)
print(f"{ratio:.1f} times the parameters, {by_model:.1f} times the time")
if FULL:
    assert by_model < ratio / 2

# %% [markdown]
# A step of the small network is not arithmetic at all but overhead: Python, and the dispatch of
# some dozens of tiny operations, which cost about the same whatever their size. It takes a network
# large enough to keep the processor busy before parameters are what you pay for. Remember it in
# chapter 3, where a message between processes is one more thing that costs time whatever its size.
#
# Networks of use are larger than the medium one, and so are their data. Say, a thousand times each:

# %%
days = seconds["medium", "large"] * 1000 * 1000 / 86_400
print(f"one epoch: {days:.0f} days")
if FULL:
    assert days > 7

# %% [markdown]
# and that is reckoned kindly, as if a step grew no faster than its parameters. One process is not
# enough, and that is why the following chapters exist.
#
# ## Exercises
#
# 1. Train with batches of 64 in place of 8. How many steps is an epoch now? Why is the loss after
#    ten epochs higher? Find the learning rate at which it is not.
# 2. Measure how long a step of the small network takes with batches of 1, 8, 64, 512 and 4096.
#    Where does it begin to grow with the batch? What does a *sample* cost in each case?
# 3. Set `torch.set_num_threads` to the number of your cores. Which of the four cells of the table
#    gains by it, and why do the others not?
# 4. Widen the hidden layers until doubling the parameters doubles the time. How many operations
#    per second does your processor do there? (A step does about 6 for each parameter and sample.)
#
# ## Sources
#
# - L. Bottou, F. Curtis, J. Nocedal, *Optimization methods for large-scale machine learning*,
#   [arXiv 1606.04838](https://arxiv.org/abs/1606.04838): why small batches and many steps.
# - J. Kaplan et al., *Scaling laws for neural language models*,
#   [arXiv 2001.08361](https://arxiv.org/abs/2001.08361), section 2.1: 6 operations for each
#   parameter and sample of a training step.
# - PyTorch, [Reproducibility](https://docs.pytorch.org/docs/stable/notes/randomness.html): when
#   the same seed gives the same run, and when it does not.
