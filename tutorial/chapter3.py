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
# # 3. Data-parallel training by hand
#
# In data parallelism, every process holds the whole network and computes a gradient on its share of
# the data. All average their gradients before they take the same step:
#
# ![Data parallelism: three ranks, each with its share of the batch and the same network, compute
# their own gradients; an all-reduce gives every rank their mean, and all take the same
# step](data_parallel.svg)
#
# This chapter builds that from processes and one [collective
# operation](../glossary.md#collective-operation), shows that it computes *the same* as one process,
# and measures why it is slow.
#
# **After this chapter you can**
#
# - start processes that form a group, and see how they end;
# - distribute data and average gradients with one [all-reduce](../glossary.md#all-reduce);
# - check that several processes compute the same as one, and say why they can be slower.
#
# **Before you start.** Read chapters [1](chapter1.md) and [2](chapter2.md). `python -m tutorial 3`
# runs for about one minute. The code is in `tutorial/naive_ddp.py`.

# %%
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from tutorial import naive_ddp
from tutorial.naive_ddp import (
    DataPartitioner,
    broadcast_parameters,
    check_backend,
    init_process,
    partition_dataset,
    reduce_gradients,
    spawn_and_join,
    train_alone,
)
from tutorial.toy import ToyDataset, expect, machine, scaled, show

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## Can processes communicate here?
#
# `torch.distributed` sends messages through a *back end*: gloo between CPUs, NCCL between Nvidia
# GPUs, or MPI. A build may lack it. `check_backend` turns a crash in every process into one error
# message:

# %%
print("torch.distributed is available:", dist.is_available())
check_backend("gloo")
try:
    check_backend("carrier pigeon")
except ValueError as error:
    print(error)
    refused = True
assert refused

# %% [markdown]
# ## Starting and ending processes
#
# Each of n processes has a [rank](../glossary.md#rank), from 0 to n-1; n is the [world
# size](../glossary.md#world-size). They find each other at an address where rank 0 listens.
# `init_process` joins the group, runs the training function, and leaves:

# %% tags=["source"]
show(init_process, first="check_backend", last="dist.destroy")

# %% [markdown]
# If a process crashes, the others wait for its message. So the process that starts them, in
# `spawn_and_join`, watches which one ends first without a result, ends the rest, and reports the
# exit codes, the first failure first.
#
# Here each process returns its process number. Then rank 1 dies while rank 0 waits for it:

# %%
numbers = spawn_and_join(2, naive_ddp.who)
print(numbers, "started by", os.getpid())
assert len({*numbers, os.getpid()}) == 3

try:
    spawn_and_join(2, naive_ddp.die, victim=1)
except RuntimeError as error:
    told = str(error)
print(told)
assert "rank 1: exit code 3" in told

# %% [markdown]
# ## Distributing the data
#
# Each rank needs its own samples. There are three common mistakes:
#
# - **Samples get lost** if their number is not a multiple of the number of ranks and the rest is
#   dropped.
# - **Ranks get different numbers of batches** if the rest is not dropped. The rank with one more
#   waits for the others forever.
# - **The order is the same in every epoch** if data is shuffled only once.
#
# The solution: shuffle by the epoch and a seed that all ranks know, and distribute samples in turn.
# A rank that has run out of samples takes part in the last step without any.

# %% tags=["source"]
show(DataPartitioner)

# %% [markdown]
# From a rank's part, `partition_dataset` makes its share of each batch:

# %% tags=["source"]
show(partition_dataset, first="part =")

# %%
data = ToyDataset(input_size=100, num_samples=1003)
parts = [DataPartitioner(data, world_size=4, seed=7).use(i) for i in range(4)]
print("samples of each rank:", [len(part) for part in parts])
dealt = torch.cat([part.indices for part in parts])
assert sorted(dealt.tolist()) == list(range(1003))  # every sample, once
assert max(map(len, parts)) - min(map(len, parts)) <= 1

again = DataPartitioner(data, world_size=4, seed=7).use(0)
later = DataPartitioner(data, world_size=4, seed=7).use(0, epoch=1)
assert torch.equal(again.indices, parts[0].indices)  # every rank finds the same order
assert not torch.equal(later.indices, parts[0].indices)  # the next epoch has another

batches = [len(list(partition_dataset(data, 4, rank, batch_size=24))) for rank in range(4)]
print("batches of each rank:", batches)
assert len(set(batches)) == 1

# %% [markdown]
# ## Averaging gradients
#
# The loss is a mean over the batch, so the gradient of the global batch is the mean of the ranks'
# gradients, weighted by their samples:
#
#     g = sum over ranks i of (samples of i / samples of all) * g_i
#
# `all_reduce` replaces every rank's tensor by the sum of all:

# %% tags=["source"]
show(reduce_gradients)

# %% [markdown]
# ## The same start
#
# Equal gradients keep [replicas](../glossary.md#replica) equal only if they start equal: all ranks
# draw their initial parameters from the same seed, or rank 0 sends its own to all.

# %% tags=["source"]
show(broadcast_parameters)


# %%
def apart(results):
    """The largest difference between a parameter of any rank and rank 0's."""
    first = torch.tensor(results[0]["parameters"])
    return max(float((torch.tensor(r["parameters"]) - first).abs().max()) for r in results)


samples = scaled(1003, least=49) // 2 * 2 + 1  # odd, also when scaled: two ranks cannot halve it
for start in ("seed", "broadcast", "different"):
    options = {"num_samples": samples, "epochs": 3, "start": start}
    differ = apart(spawn_and_join(2, naive_ddp.train, **options))
    print(f"{start:10} replicas differ by {differ:.3g} after training")
    assert (differ == 0) == (start != "different")

# %% [markdown]
# **What to notice.** Different starts raise no error. The seed works only while no rank draws an
# additional random number before the network is created. A broadcast always works, so PyTorch's
# `DistributedDataParallel` broadcasts.
#
# ## The same as one process
#
# n processes with batches of b/n should take the same steps as one with batches of b. If they
# differ by rounding alone, float64 makes the difference nine orders of magnitude smaller.

# %%
tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}
for dtype in tolerance:
    options = {"num_samples": samples, "epochs": 3, "dtype": dtype}
    alone = torch.tensor(train_alone(**options)["parameters"], dtype=torch.float64)
    for world_size in (2, 3):
        result = spawn_and_join(world_size, naive_ddp.train, **options)[0]
        together = torch.tensor(result["parameters"], dtype=torch.float64)
        differ = float((together - alone).abs().max())
        print(f"{dtype}, {world_size} processes: parameters differ by at most {differ:.1e}")
        assert differ < tolerance[dtype]

# %% [markdown]
# 1,003 samples in batches of 24 leave 19 for the last step of an epoch, 10 and 9 for two ranks.
# Averaging these without weights breaks the equality:

# %%
result = spawn_and_join(2, naive_ddp.train, **options, weighted=False)[0]
differ = max(abs(a - b) for a, b in zip(result["parameters"], alone.tolist(), strict=True))
print(f"without weights: parameters differ by at most {differ:.1e}")
assert differ > 1000 * tolerance[dtype]

# %% [markdown]
# ## What it costs
#
# From the command line:
#
#     python -m tutorial.naive_ddp -s 2 -i 100 -n 1024 -d 0 -z 100 -e 10 -v 1
#
# *Waiting* is the time in `reduce_gradients`.

# %%
print("10 epochs of 1,024 samples, batches of 24\n")
print(f"{'processes':>10}{'seconds':>10}{'waiting':>10}{'share':>8}")
options = {"num_samples": scaled(1024, least=48), "epochs": scaled(10, least=1)}
alone = train_alone(**options)
print(f"{'alone':>10}{alone['seconds']:10.2f}{0:10.2f}{0:8.0%}")
naive = {}
for world_size in (1, 2, 4):
    naive[world_size] = result = spawn_and_join(world_size, naive_ddp.train, **options)[0]
    share = result["waiting"] / result["seconds"]
    print(f"{world_size:10}{result['seconds']:10.2f}{result['waiting']:10.2f}{share:8.0%}")

# %% tags=["hidden"]
expect(naive[2]["seconds"] > alone["seconds"], "two processes are slower than one alone")
expect(naive[2]["waiting"] > naive[2]["seconds"] / 2, "two processes wait most of the time")

# %% [markdown]
# Two processes are slower than one, and four usually slower still. This network has four tensors,
# each a separate message at every step. What does a message cost?

# %%
numbers = [10, 1_000, 100_000, 1_000_000]
seconds = spawn_and_join(2, naive_ddp.time_all_reduce, numbers=numbers, repeats=scaled(50, 3))[0]
print("all_reduce between 2 processes\n")
for number, taken in zip(numbers, seconds, strict=True):
    print(f"{number:10,} numbers {taken * 1e6:10,.0f} microseconds")

model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))
x, y = torch.randn(12, 100), torch.randn(12, 1)
steps, begin = scaled(2000, least=20), time.perf_counter()
for _ in range(steps):
    nn.functional.mse_loss(model(x), y).backward()
computing = (time.perf_counter() - begin) / steps
print(f"\n{'forward and backward pass':>18} {computing * 1e6:8,.0f} microseconds")

# %% tags=["hidden"]
expect(seconds[1] < 10 * seconds[0], "100 times the numbers cost less than 10 times as much")
expect(4 * seconds[0] > computing / 2, "four messages cost more than half of the computing")

# %% [markdown]
# **What to notice.** A message of 1,000 numbers takes about as long as one of 10: up to some size,
# *a message* costs, not its content. A second process saves half of a step's computing and costs
# four messages. While those take longer than what is saved, it slows training down.
#
# What helps: fewer and larger messages, sent while the backward pass still computes (chapter 4); a
# model whose steps are worth the messages; and sending less, or less often, which is laconic's
# subject.
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 3` and `check 3`.

# %% tags=["exercise", "hidden"]
from tutorial.checks import check

# %% [markdown]
# **3.1** Distribute `samples` samples over `ranks` ranks. How many does each rank get?


# %% tags=["exercise"]
def shares(samples, ranks):
    return [samples // ranks for _ in range(ranks)]


check("3.1", shares)


# %% tags=["solution"]
def shares(samples, ranks):
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


check("3.1", shares)

# %% [markdown]
# **3.2** When does data-parallel training equal one process even with `weighted=False`, in an epoch
# of `samples` samples? `batch_size` is global, and a multiple of `ranks`.


# %% tags=["exercise"]
def equal_without_weights(samples, batch_size, ranks):
    return samples % batch_size == 0


check("3.2", equal_without_weights)


# %% tags=["solution"]
def equal_without_weights(samples, batch_size, ranks):
    last = samples % batch_size  # samples of the last step, 0 if all batches are full
    return last % ranks == 0  # or samples % ranks == 0, because ranks divides batch_size


check("3.2", equal_without_weights)

# %% [markdown]
# **3.3** One process takes `computing` seconds for the passes of a step. How many seconds per step
# do `ranks` processes save, with so many `messages` of `message` seconds each?


# %% tags=["exercise"]
def saved(computing, message, messages, ranks):
    return computing - messages * message


check("3.3", saved)


# %% tags=["solution"]
def saved(computing, message, messages, ranks):
    together = computing / ranks + messages * message
    return computing - together


check("3.3", saved)

# %% [markdown]
# To explore further:
#
# 1. In `reduce_gradients`, skip parameters whose `grad` is None, and give the network a layer that
#    only rank 0 uses. What happens, and after how long?
# 2. Draw one random number on rank 0 before the network is made, with `start="seed"`. Which
#    assertion fails?
# 3. At which hidden size do two processes become faster than one? Compare `python -m
#    tutorial.naive_ddp -s 2 -z ...` with `-s 1 -z ...`, both with `-b 240`.
#
# ## Sources
#
# - S. Arnold, *Writing distributed applications with PyTorch*,
#   [docs.pytorch.org](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html).
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704), section 3.2.1: this "naive solution".
# - P. Goyal et al., *Accurate, large minibatch SGD*, [arXiv
#   1706.02677](https://arxiv.org/abs/1706.02677), section 3.
