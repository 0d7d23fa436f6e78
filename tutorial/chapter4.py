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
# # 4. Why it is slow
#
# This chapter measures what a message costs. It then builds PyTorch's `DistributedDataParallel`
# ([DDP](../glossary.md#ddp)) in small steps, each a few lines of `tutorial/buckets.py`.
#
# **After this chapter you can**
#
# - predict the time of a message from [latency](../glossary.md#latency) and
#   [bandwidth](../glossary.md#bandwidth);
# - say what an all-reduce does inside, and how many bytes it sends;
# - explain [buckets](../glossary.md#bucket), [overlap](../glossary.md#overlap), and why all ranks
#   must send in the same order.
#
# **Before you start.** Read [chapter 3](chapter3.md). The chapter runs for about one minute. Run
# nothing else in the meantime: its processes share your cores.

# %%
import torch

from tutorial import buckets
from tutorial.naive_ddp import spawn_and_join, time_all_reduce
from tutorial.toy import count_parameters, expect, machine, scaled, show

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## What a message costs
#
# A first model of the time of a message:
#
#     seconds = latency + bytes / rate
#
# The table has the fastest of several all-reduces. The formula's latency is the time of 4 kB; its
# rate comes from the last two rows.

# %%
numbers = [1, 1_000, 10_000, 100_000, 1_000_000, 4_000_000]
seconds = spawn_and_join(2, time_all_reduce, numbers=numbers, repeats=scaled(40, least=3))[0]
latency = seconds[1]
rate = 4 * (numbers[-1] - numbers[-2]) / (seconds[-1] - seconds[-2])
print("all_reduce between 2 processes\n")
print(f"{'':13}{'measured':>12}{'by the line':>14}")
for number, taken in zip(numbers, seconds, strict=True):
    line = latency + 4 * number / rate
    print(f"{4 * number / 1e3:10,.1f} kB{taken * 1e3:9.2f} ms{line * 1e3:11.2f} ms")
print(f"\nlatency {latency * 1e3:.2f} ms, rate {rate / 1e6:,.0f} MB/s, ", end="")
print(f"so {latency * rate / 1e3:,.0f} kB take as long to send as the latency")

# %% tags=["hidden"]
expect(seconds[1] < 5 * seconds[0], "a thousand times the bytes take less than five times as long")
expect(seconds[-1] > 2 * seconds[-2], "four times the bytes of 4 MB take more than twice as long")

# %% [markdown]
# **What to notice.** A thousand times the bytes of the first row take less than twice as long: most
# of the time is latency. A message should therefore be large.
#
# A real network is ten to a thousand times slower than this machine's loopback.
#
# ## An all-reduce has two halves
#
# Each rank splits its tensor into n chunks. In *reduce-scatter*, chunks travel around a ring and
# are added up, until each rank has the complete sum of one chunk. In *all-gather*, these sums
# travel around the ring:
#
# ![Four ranks with four chunks each. After reduce-scatter each rank has the sum of one chunk; after
# all-gather every rank has the sums of all chunks](all_reduce.svg)
#
# In each half, a rank sends n-1 of its n chunks. That is 2(n-1)/n of the tensor's bytes in all,
# less than twice, however many ranks there are.
#
# ## A network to send over
#
# To emulate a slow network, messages go through a thread that first sleeps for as long as their
# bytes would take:

# %% tags=["source"]
show(buckets.Network)

# %% [markdown]
# ## Four ways
#
# **One message for each tensor**, as in chapter 3. **One message for all**:

# %% tags=["source"]
show(buckets.one_by_one, buckets.flat, buckets.pack, buckets.unpack)

# %% [markdown]
# One large message cannot be sent before the last gradient is complete. **Buckets** are a
# compromise. Each holds the gradients of a few layers, and is one message:
#
# ![Eight layers in three buckets. The backward pass begins at the last layer, so bucket 1 holds
# layers 6 to 8, bucket 2 layers 3 to 5, bucket 3 layers 1 and 2](buckets.svg)

# %% tags=["source"]
show(buckets.cut, buckets.in_buckets)

# %% [markdown]
# The backward pass begins at the output, so the last layer's gradient is complete long before the
# first one's. A complete bucket can **be sent while the backward pass computes** the others (not to
# scale):
#
# ![Four rows. One message for each tensor: many short messages after the backward pass. Flat: one
# long message after it. Buckets: three messages after it. Overlap: the same three messages begin
# during the backward pass and end soon after it](overlap.svg)
#
# Autograd calls a [hook](../glossary.md#hook) for each gradient that is complete:

# %% tags=["source"]
show(buckets.Overlapped)

# %% [markdown]
# ## Bucket order
#
# Buckets follow the order in which gradients are completed, the *reverse* of the forward pass.
# Otherwise nothing can be sent early:

# %%
half = {}
for reverse in (True, False):
    cut, left = spawn_and_join(2, buckets.sent_during_backward, most=2**18, reverse=reverse)[0]
    half[reverse] = left
    order = "reverse order" if reverse else "forward order"
    print(f"{order}: {left} of {cut} buckets had left when half of the gradients were there")
assert half[True] > 0 == half[False]

# %% [markdown]
# And the order must be *the same on every rank*. Here rank 0 sends a = 1 and then b = 100, and rank
# 1 sends b and then a. The sums should be 2 and 200:

# %%
sums = spawn_and_join(2, buckets.other_order)
print(sums)
assert sums == [[101, 101], [101, 101]]

# %% [markdown]
# There is no error, only wrong numbers. So `Overlapped` sends a complete bucket only when it is the
# next in the order.
#
# ## The race
#
# Now a network of 22 layers and two processes, first without any network between them, and then
# over one of 200 Mbit/s. *Alone* sends nothing. The last line is torch's own DDP, over the same
# `Network`:

# %%
model = buckets.deep_network()
size = 4 * count_parameters(model)
print(f"{len(list(model.parameters()))} tensors, {size / 1e6:.2f} MB of gradients")
race = {}
for rate in (0, 200e6):
    options = {"steps": scaled(15, least=1), "rate": rate, "most": 2**19, "batch": scaled(2048, 8)}
    result = spawn_and_join(2, buckets.compare, **options)[0]
    race[rate] = {name: way["seconds"] for name, way in result.items()}
    travel = f"{8 * size / rate * 1e3:.0f} ms of travel" if rate else "no travel"
    print(f"\n{travel:18}{'ms per step':>14}{'messages':>10}")
    for name, way in result.items():
        print(f"{name:18}{way['seconds'] * 1e3:14.1f}{way['messages']:10}")
        if name != "alone":  # whatever the way, the same gradient, bit for bit
            assert way["gradient"] == result["flat"]["gradient"]

slow = race[200e6]
left = {name: slow[name] - slow["alone"] for name in ("flat", "overlapped")}
print("\ncommunication adds to a step:", end=" ")
print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in left.items()))
gap = slow["overlapped"] / slow["torch's DDP"]
print(f"overlapped takes {gap:.2f} times as long as torch's DDP")

# %% tags=["hidden"]
others = [seconds for name, seconds in slow.items() if name != "one by one"]
expect(slow["one by one"] > max(others), "one message for each tensor is the slowest way")
expect(slow["overlapped"] < slow["buckets"], "early buckets are faster than the same ones late")
expect(slow["overlapped"] < slow["flat"], "early buckets are faster than one flat message")
expect(0.6 < gap < 1.6, "overlapped is about as fast as torch's DDP")

# %% [markdown]
# **What to notice.** All variants give the same gradient to the last bit. One message for each
# tensor pays the latency 44 times. Buckets sent at the end gain nothing; sent early they are faster
# than one flat message, because the backward pass hides a part of the transfer. Three things limit
# how much:
#
# - Only the backward pass hides anything, about two thirds of a step.
# - Nothing hides the last bucket, which is sent when everything is computed.
# - Packing, summing, and the sending thread take processor time. Without any travel, early buckets
#   may lose.
#
# ## How large a bucket
#
# Small buckets are sent early and pay the latency often. Large buckets do the opposite.

# %%
sizes = [2**14, 2**17, 2**18, 2**19, 2**25]
options = {"steps": scaled(10, least=1), "rate": 200e6, "batch": scaled(2048, 8)}
taken = spawn_and_join(2, buckets.sweep, sizes=sizes, **options)[0]
print("overlapped, at most so many kB a bucket\n")
for most, each in zip(sizes, taken, strict=True):
    number = len(buckets.cut(model.parameters(), most))
    print(f"{most / 2**10:10,.0f} kB {number:4} buckets {each * 1e3:8.1f} ms per step")
best = sizes[taken.index(min(taken))] / 2**10
print(f"\nfastest here: at most {best:,.0f} kB")

# %% tags=["hidden"]
expect(min(taken) < taken[0], "a bucket for each tensor is not the fastest")

# %% [markdown]
# torch's default is 25 MiB (1 MiB for the first bucket), which suits large models on fast networks.
#
# ## What is left
#
# All these ways send all gradients at every step, and hide at most a backward pass. On a slow
# network only sending *less* helps: fewer bits ([codecs](../coded.md)), or less often ([local
# SGD](../algorithms/local_sgd.md) and its relatives).
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 4` and `check 4`.

# %% tags=["exercise", "hidden"]
from tutorial.checks import check

# %% [markdown]
# **4.1** How many bytes does each of `ranks` ranks send in an all-reduce of a tensor of `size`
# bytes?


# %% tags=["exercise"]
def all_reduce_bytes(ranks, size):
    return (ranks - 1) * size


check("4.1", all_reduce_bytes)


# %% tags=["solution"]
def all_reduce_bytes(ranks, size):
    chunk = size / ranks
    return 2 * (ranks - 1) * chunk  # half of it in reduce-scatter, half in all-gather


check("4.1", all_reduce_bytes)

# %% [markdown]
# **4.2** Split tensors of the given `sizes` in bytes into buckets, in order. The first has at most
# `first` bytes, so that something is sent early; each other at most `most`. A tensor that is larger
# gets a bucket of its own.


# %% tags=["exercise"]
def split(sizes, first, most):
    buckets, room = [], 0
    for size in sizes:
        if not buckets or size > room:
            buckets.append([])
            room = most
        buckets[-1].append(size)
        room -= size
    return buckets


check("4.2", split)


# %% tags=["solution"]
def split(sizes, first, most):
    buckets, room = [], 0
    for size in sizes:
        if not buckets or size > room:
            room = most if buckets else first
            buckets.append([])
        buckets[-1].append(size)
        room -= size
    return buckets


check("4.2", split)

# %% [markdown]
# **4.3** How many buckets may leave now? `complete` says for each whether its gradients are
# complete, and the first `sent` have left before.


# %% tags=["exercise"]
def may_leave(complete, sent):
    return sum(complete[sent:])


check("4.3", may_leave)


# %% tags=["solution"]
def may_leave(complete, sent):
    number = 0
    while sent + number < len(complete) and complete[sent + number]:
        number += 1
    return number  # up to the first that is not complete


check("4.3", may_leave)

# %% [markdown]
# **4.4** When has the last bucket arrived? Bucket k is ready at `ready[k]` and takes `travel[k]`
# seconds. The network carries one bucket at a time.


# %% tags=["exercise"]
def last_arrival(ready, travel):
    return ready[-1] + sum(travel)


check("4.4", last_arrival)


# %% tags=["solution"]
def last_arrival(ready, travel):
    free = 0.0  # when the network is free again
    for begin, seconds in zip(ready, travel, strict=True):
        free = max(free, begin) + seconds
    return free


check("4.4", last_arrival)

# %% [markdown]
# To explore further:
#
# 1. Emulate networks of 50 Mbit/s and of 1 Gbit/s, also with larger batches. Where is `overlapped`
#    ahead of `flat`, and why?
# 2. Send in 16 bits: `together.bfloat16()` in `pack`, and back in `unpack`. Should the assertions
#    about equal gradients still hold?
# 3. Add `time.sleep(0.001)` to `Network._mean`, a latency of a millisecond. Which way suffers most?
#
# ## Sources
#
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704), sections 3.2 and 4.2.
# - PyTorch, [DDP notes](https://docs.pytorch.org/docs/stable/notes/ddp.html).
# - R. Thakur, R. Rabenseifner, W. Gropp, [*Optimization of collective communication operations in
#   MPICH*](https://doi.org/10.1177/1094342005051521), 2005.
