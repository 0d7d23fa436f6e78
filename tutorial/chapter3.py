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
# Data parallelism in one sentence: every process holds the whole network and a share of the data,
# computes a gradient on its share, and all average their gradients before they take the same step.
# This chapter builds that from nothing but processes and one collective operation, shows that it
# computes *the same* as one process, and then measures why it is slow.
#
# The code is in `tutorial/naive_ddp.py`, a module and not the notebook, because the processes that
# it starts have to import it.

# %%
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from tutorial import naive_ddp
from tutorial.naive_ddp import (
    DataPartitioner,
    DatasetPartition,
    broadcast_parameters,
    check_backend,
    init_process,
    partition_dataset,
    reduce_gradients,
    spawn_and_join,
    train_alone,
)
from tutorial.toy import FULL, ToyDataset, machine, scaled, show

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## Can processes talk here?
#
# `torch.distributed` is a part of PyTorch that a build may lack, and messages travel through a
# *back end*: gloo between CPUs, NCCL between Nvidia's GPUs, MPI where PyTorch was built with it.
# Asking first turns a crash in every process into one line in yours.

# %% tags=["source"]
show(check_backend)

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
# A process is known to the others by its *rank*, 0 to world size - 1. They find each other through
# an address at which rank 0 listens; once all have called `init_process_group`, they are a group.

# %% tags=["source"]
show(init_process)

# %% [markdown]
# Someone has to start them, and to see how they end. A process that crashes leaves the others
# waiting for its message, so the one that started them looks at each one's exit code, ends those
# that are left, and says who failed.

# %% tags=["source"]
show(spawn_and_join)

# %% [markdown]
# Any function of a module will do in place of a training function. Here each process says its
# process number, and then one of them dies:

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
# ## Dealing out the data
#
# Each rank needs samples of its own: if all read the same, all compute the same gradient, and the
# average of equal gradients is worth no more than one of them. Three things are easily got wrong:
#
# - **Samples get lost** when the number of samples is no multiple of the number of ranks and the
#   rest is dropped.
# - **Ranks get unequal numbers of batches** when it isn't dropped. The one with a batch more then
#   waits for the others for ever.
# - **The order is the same in every epoch** when data are shuffled once and not per epoch.
#
# So: shuffle by a seed that all ranks know and by the epoch, deal samples out like cards, and let a
# rank whose cards have run out take part in the last step with nothing in its hand.

# %% tags=["source"]
show(DatasetPartition, DataPartitioner, partition_dataset)

# %%
data = ToyDataset(input_size=100, num_samples=1003)
parts = [DataPartitioner(data, world_size=4, seed=7).use(i) for i in range(4)]
print("samples of each rank:", [len(part) for part in parts])
dealt = torch.cat([part.indices for part in parts])
assert sorted(dealt.tolist()) == list(range(1003))  # every sample, once
assert max(map(len, parts)) - min(map(len, parts)) <= 1

again = DataPartitioner(data, world_size=4, seed=7).use(0)
later = DataPartitioner(data, world_size=4, seed=7).use(0, epoch=1)
assert torch.equal(again.indices, parts[0].indices)  # anyone can deal the same cards
assert not torch.equal(later.indices, parts[0].indices)  # and others in the next epoch

batches = [len(list(partition_dataset(data, 4, rank, batch_size=24))) for rank in range(4)]
print("batches of each rank:", batches)
assert len(set(batches)) == 1

# %% [markdown]
# ## Averaging gradients
#
# The loss is a mean over the batch, so the gradient of the global batch is the mean of the ranks'
# gradients, each weighted by its share of the samples:
#
#     g = sum over ranks i of (samples of i / samples of all) * g_i
#
# `all_reduce` leaves the sum of every rank's tensor in every rank's tensor. That is all there is to
# it:

# %% tags=["source"]
show(reduce_gradients)

# %% [markdown]
# ## The same start
#
# Equal gradients keep replicas equal only if they start equal. Two ways to get there: all ranks
# draw their first parameters from the same seed, or rank 0 sends its own to all.

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
# **What to notice.** With different starts nothing fails. Every replica takes the same steps from
# another place, each is trained on gradients that were computed elsewhere, and no error says so.
# The seed works as long as no rank draws a random number more than another before the network is
# made; a broadcast works always. That is why PyTorch's `DistributedDataParallel` broadcasts.
#
# ## The same as one process
#
# Now the claim of the whole exercise: n processes with batches of b/n take the same steps as one
# process with batches of b. Up to rounding: a sum in another order has other last digits. So this
# is looked at twice, in float32 (about 7 digits) and in float64 (about 16). If the difference is
# rounding, it shrinks by nine orders of magnitude; if the algorithm is another, it stays.

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
# `1003` samples in batches of 24 leave 19 for the last step of an epoch, 10 and 9 for two ranks: if
# those were averaged without weights the equality would be gone:

# %%
result = spawn_and_join(2, naive_ddp.train, **options, weighted=False)[0]
differ = max(abs(a - b) for a, b in zip(result["parameters"], alone.tolist(), strict=True))
print(f"without weights: parameters differ by at most {differ:.1e}")
assert differ > 1000 * tolerance[dtype]

# %% [markdown]
# For which numbers of samples would it not be gone (exercise 1)?
#
# ## What it costs
#
# The same from the command line, with a world size of 2, 100 inputs, 1,024 samples, no hidden layer
# after the first, hidden size 100, and 10 epochs:
#
#     python -m tutorial.naive_ddp -s 2 -i 100 -n 1024 -d 0 -z 100 -e 10 -v 1
#
# Here for one process and for several. *Waiting* is the time spent in `reduce_gradients`.

# %%
print(f"10 epochs of 1,024 samples, batches of 24, on {machine()}\n")
print(f"{'processes':>10}{'seconds':>10}{'waiting':>10}{'share':>8}")
options = {"num_samples": scaled(1024, least=48), "epochs": scaled(10, least=1)}
alone = train_alone(**options)
print(f"{'alone':>10}{alone['seconds']:10.2f}{0:10.2f}{0:8.0%}")
naive = {}
for world_size in (1, 2, 4):
    naive[world_size] = result = spawn_and_join(world_size, naive_ddp.train, **options)[0]
    share = result["waiting"] / result["seconds"]
    print(f"{world_size:10}{result['seconds']:10.2f}{result['waiting']:10.2f}{share:8.0%}")
if FULL:  # times count at full size only
    assert naive[2]["seconds"] > alone["seconds"]
    assert naive[2]["waiting"] > naive[2]["seconds"] / 2

# %% [markdown]
# More processes, and slower. Where does the time go? This network has four tensors, two matrices
# and two vectors of biases, and each is a message of its own at every step. What does a message
# cost, and does that come from its size?

# %%
numbers = [10, 1_000, 100_000, 1_000_000]
seconds = spawn_and_join(2, naive_ddp.time_all_reduce, numbers=numbers, repeats=scaled(50, 3))[0]
print(f"all_reduce between 2 processes, on {machine()}\n")
for number, taken in zip(numbers, seconds, strict=True):
    print(f"{number:10,} numbers {taken * 1e6:10,.0f} microseconds")

model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 1))
x, y = torch.randn(12, 100), torch.randn(12, 1)
steps, begin = scaled(2000, least=20), time.perf_counter()
for _ in range(steps):
    nn.functional.mse_loss(model(x), y).backward()
computing = (time.perf_counter() - begin) / steps
print(f"\n{'forward and backward pass':>18} {computing * 1e6:8,.0f} microseconds")
if FULL:
    assert seconds[1] < 10 * seconds[0]  # 100 times the numbers
    assert 4 * seconds[0] > computing / 2  # messages, against half the work that they save

# %% [markdown]
# **What to notice.** A message of 1,000 numbers takes about as long as one of 10: up to some size
# what is paid for is that there *is* a message (waking another process, the way through the network
# stack), not what is in it. A second process saves half of the computing of a step, and costs four
# messages. As long as those take longer than what is saved, the second process slows training down.
#
# Three ways out, and they are the rest of this tutorial: fewer and larger messages, sent while the
# backward pass still computes (chapter 4); a network whose computing is worth the messages; and
# talking less often, or saying less, which is what laconic is for.
#
# ## Exercises
#
# 1. For which numbers of samples does equality with one process survive `weighted=False`, and why
#    for those?
# 2. In `reduce_gradients`, put `continue` in place of what is done where `parameter.grad is None`,
#    and give the network a layer that only rank 0 uses. What happens, and after how long?
# 3. Draw one random number on rank 0 before the network is made, with `start="seed"`. Which test
#    would have told you?
# 4. At which hidden size do two processes become faster than one on your machine? Use
#    `python -m tutorial.naive_ddp -s 2 -z ...` against `-s 1 -z ...`, with `-b 240`.
#
# ## Sources
#
# - S. Arnold, *Writing distributed applications with PyTorch*,
#   [docs.pytorch.org](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html): the same
#   idea, on MNIST.
# - PyTorch, [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html): back ends
#   and collectives.
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*,
#   [arXiv 2006.15704](https://arxiv.org/abs/2006.15704), section 3.2.1: this "naive solution", and
#   why it is slow.
# - P. Goyal et al., *Accurate, large minibatch SGD*,
#   [arXiv 1706.02677](https://arxiv.org/abs/1706.02677): weighting, shuffling and other things
#   that are easily got wrong (section 3).
