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
# Chapter 3 ended with processes that spend most of their time waiting. This chapter looks at what
# a message costs, and walks in small steps to what PyTorch's `DistributedDataParallel` does: one
# message for each tensor, one for all, one for each of several buckets, and buckets that leave
# while the backward pass still computes. Each step is a few lines of `tutorial/buckets.py` that you
# can change.

# %%
import torch

from tutorial import buckets
from tutorial.naive_ddp import spawn_and_join, time_all_reduce
from tutorial.toy import FULL, count_parameters, machine, scaled, show

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## What a message costs
#
# A good first model of a message is a line: so much for its being there at all, and so much for
# each byte.
#
#     seconds = latency + bytes / rate

# %%
numbers = [1, 1_000, 10_000, 100_000, 1_000_000, 4_000_000]
seconds = spawn_and_join(2, time_all_reduce, numbers=numbers, repeats=scaled(40, least=3))[0]
print(f"all_reduce between 2 processes, on {machine()}\n")
for number, taken in zip(numbers, seconds, strict=True):
    print(
        f"{4 * number / 1e3:10,.1f} kB {taken * 1e3:8.2f} ms {4 * number / taken / 1e6:8,.0f} MB/s"
    )
rate = 4 * (numbers[-1] - numbers[-2]) / (seconds[-1] - seconds[-2])
print(f"\nlatency {seconds[0] * 1e3:.2f} ms; beyond it {rate / 1e6:,.0f} MB/s")
if FULL:  # times count at full size only
    assert seconds[1] < 5 * seconds[0]  # a thousand times the bytes
    assert seconds[-1] > 2 * seconds[-2]  # four times the bytes

# %% [markdown]
# **What to notice.** A thousand times the bytes of the first row take a few times as long, and not
# a thousand times: latency is most of it. Beyond some 100 kB bytes count. A message should
# therefore be large. This is the loopback of one machine; on a real network the rate is ten to a
# thousand times lower.
#
# ## A network to send over
#
# Two processes on one machine have no network between them, only memory. So messages go through a
# thread that first sleeps for as long as their bytes would travel: a slow network can be played on
# a fast machine, and as sleeping takes no processor, training really goes on meanwhile.

# %% tags=["source"]
show(buckets.Network)

# %% [markdown]
# ## Four ways
#
# **One message for each tensor**, as in chapter 3. **One message for all**: copy the gradients
# together, send, copy back.

# %% tags=["source"]
show(buckets.one_by_one, buckets.flat, buckets.pack, buckets.unpack)

# %% [markdown]
# One large message has a fault: it can't leave before the last gradient is there. **Buckets** are
# between the two.

# %% tags=["source"]
show(buckets.cut, buckets.in_buckets)

# %% [markdown]
# And they make the last step possible. The backward pass begins at the output: the last layer's
# gradient is there long before the first one's. A bucket that is complete can **leave while the
# backward pass computes** the others. Autograd calls a hook for each gradient that is complete:

# %% tags=["source"]
show(buckets.Overlapped)

# %% [markdown]
# ## Bucket order
#
# Two things about the order matter. It should be that in which gradients appear, the *reverse* of
# the forward pass, or nothing can leave early:

# %%
half = {}
for reverse in (True, False):
    cut, left = spawn_and_join(2, buckets.sent_during_backward, most=2**18, reverse=reverse)[0]
    half[reverse] = left
    order = "reverse order" if reverse else "forward order"
    print(f"{order}: {left} of {cut} buckets had left when half of the gradients were there")
assert half[True] > 0 == half[False]

# %% [markdown]
# And it must be *the same on every rank*. An all-reduce has no name: the first of one rank is added
# to the first of the others. Here rank 0 sends a = 1 and then b = 100, rank 1 sends b and then a.
# The sums should be 2 and 200:

# %%
sums = spawn_and_join(2, buckets.other_order)
print(sums)
assert sums == [[101, 101], [101, 101]]

# %% [markdown]
# No error, just wrong numbers; with tensors of different sizes a crash or a hang. That is why
# `Overlapped` does not send what is complete first, but waits until it is the next in line.
#
# ## The race
#
# A network of 22 layers, batches of 1,024, two processes: without any network between them, and
# over one of 200 Mbit/s. *Alone* sends nothing. The last line is torch's own, over the same
# `Network`:

# %% tags=["source"]
show(buckets.torch_ddp)

# %%
model = buckets.deep_network()
size = 4 * count_parameters(model)
print(f"{len(list(model.parameters()))} tensors, {size / 1e6:.2f} MB of gradients, on {machine()}")
race = {}
for rate in (0, 200e6):
    options = {"steps": scaled(20, least=1), "rate": rate, "most": 2**18, "batch": scaled(1024, 8)}
    result = spawn_and_join(2, buckets.compare, **options)[0]
    race[rate] = {name: way["seconds"] for name, way in result.items()}
    travel = f"{8 * size / rate * 1e3:.0f} ms of travel" if rate else "no travel"
    print(f"\n{travel:18}{'ms per step':>14}{'messages':>10}")
    for name, way in result.items():
        print(f"{name:18}{way['seconds'] * 1e3:14.1f}{way['messages']:10}")
        if name != "alone":  # whatever the way, the same gradient, bit for bit
            assert way["gradient"] == result["flat"]["gradient"]

slow = race[200e6]
gap = slow["overlapped"] / slow["torch's DDP"]
print(f"\noverlapped takes {gap:.2f} times as long as torch's DDP")
if FULL:
    assert slow["one by one"] > max(time for name, time in slow.items() if name != "one by one")
    assert slow["overlapped"] < slow["buckets"]
    assert 0.6 < gap < 1.6

# %% [markdown]
# **What to notice.** All ways give the same gradient to the last bit; they differ in time alone.
# One message for each tensor pays the latency 44 times. Buckets that leave early take less time
# than the same buckets sent at the end: a part of the travel is hidden behind the backward pass.
# Not all of it: the last bucket leaves when everything is computed, and only the backward pass can
# hide anything. Whether it also beats one flat message depends: every further message costs a
# latency, and on a machine with few cores the thread that sends takes them from the backward pass.
# Compare the two above, and with the buckets below. A network on which gradients travel for ten
# times as long as a step computes makes a step ten times as long, and no order of messages helps
# against it.
#
# ## How large a bucket
#
# Small buckets leave early and pay the latency often; large ones the other way round.

# %%
sizes = [2**14, 2**17, 2**18, 2**19, 2**25]
options = {"steps": scaled(10, least=1), "rate": 200e6, "batch": scaled(1024, 8)}
taken = spawn_and_join(2, buckets.sweep, sizes=sizes, **options)[0]
print(f"overlapped, at most so many kB a bucket, on {machine()}\n")
for most, each in zip(sizes, taken, strict=True):
    number = len(buckets.cut(model.parameters(), most))
    print(f"{most / 2**10:10,.0f} kB {number:4} buckets {each * 1e3:8.1f} ms per step")
if FULL:
    assert min(taken) < taken[0]  # a bucket for each tensor is not the best

# %% [markdown]
# torch's default is 25 MiB (the first bucket 1 MiB, so that something leaves early), which suits
# large models on fast networks. This model would be two buckets, the second of a few layers.
#
# ## What is left
#
# Everything here sends all gradients at every step, and can hide at most a backward pass. On a slow
# network that is not enough. Then there is only to send *less*: fewer bits
# ([codecs](../coded.md)), or less often ([local SGD](../algorithms/local_sgd.md) and its
# relatives), and that is what laconic is about.
#
# ## Exercises
#
# 1. Play networks of 50 Mbit/s and of 1 Gbit/s, with larger batches, too. Where is `overlapped`
#    ahead of `flat`, where behind, and why?
# 2. Make the first bucket smaller than the others in `cut`. What is gained?
# 3. Send in 16 bits: `together.bfloat16()` in `pack`, and back in `unpack`. Do the assertions about
#    equal gradients still hold? Should they?
# 4. Add `time.sleep(0.001)` to `Network._mean`: a network with a latency of a millisecond. Which
#    way suffers most?
#
# ## Sources
#
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*,
#   [arXiv 2006.15704](https://arxiv.org/abs/2006.15704), sections 3.2 and 4.2: buckets, their
#   order, overlap, and the sweep.
# - PyTorch, [DDP notes](https://docs.pytorch.org/docs/stable/notes/ddp.html): the design inside.
# - R. Thakur, R. Rabenseifner, W. Gropp, [*Optimization of collective communication operations in
#   MPICH*](https://doi.org/10.1177/1094342005051521), 2005: latency and bytes of an all-reduce.
