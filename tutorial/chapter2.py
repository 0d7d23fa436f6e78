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
# # 2. Growing
#
# This chapter covers two remedies for long training, special processors and many of them, and two
# problems: a batch that is too small, and a model that is too large.
#
# **After this chapter you can**
#
# - say what GPUs are good at, and why models need many;
# - combine small batches into a large one with [gradient
#   accumulation](../glossary.md#gradient-accumulation);
# - tell [data parallelism](../glossary.md#data-parallelism) from [model
#   parallelism](../glossary.md#model-parallelism);
# - say why PyTorch uses processes and not threads.
#
# **Before you start.** Read [chapter 1](chapter1.md). `python -m tutorial 2` runs for about one
# minute; its last measurement needs two cores.

# %%
import math
import os
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

from tutorial.growing import draw, steps_of_one, time_process, time_threads
from tutorial.naive_ddp import spawn_and_join
from tutorial.toy import SEED, FFNet, ToyDataset, expect, machine, scaled

torch.set_num_threads(1)
print(machine())

# %% [markdown]
# ## What processors are good at
#
# Almost all of training is matrix multiplication. A product of two n × n matrices takes 2n³
# operations on 3n² numbers, so larger matrices do more work per number fetched from memory:

# %%
print("product of two n x n matrices on one core\n")
rates = {}
for n in (8, 32, 128, 512):
    a, b = torch.randn(n, n), torch.randn(n, n)
    repeats, best = scaled(20_000_000 // n**3, least=3), math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            a @ b
        best = min(best, (time.perf_counter() - begin) / repeats)
    rates[n] = 2 * n**3 / best
    print(f"n = {n:4}: {rates[n] / 1e9:8.2f} 10^9 operations per second")

# %% tags=["hidden"]
expect(rates[512] > 10 * rates[8], "large products run more than ten times as fast")

# %% [markdown]
# **GPUs** take this further, with thousands of simple cores, units that multiply tiles of matrices,
# and memory about ten times as fast as a CPU's. They are good at large products in 16 bits or
# fewer; chapter 1's network would be slower on one.
#
# | processor | year | operations per second, 16 bits, dense | memory |
# |---|---|---|---|
# | V100 | 2017 | 125·10¹² | 16 or 32 GB |
# | A100 | 2020 | 312·10¹² | 40 or 80 GB |
# | TPU v4 | 2020 | 275·10¹² | 32 GB |
# | H100 (SXM) | 2022 | 989·10¹² | 80 GB |
#
# These are published peaks. Training often reaches at most half of them.
#
# ## How large models are
#
# Parameters of language models, from their papers:

# %% alt="Parameters of language models by year"
models = [  # name, year, parameters, arXiv number of the source
    ("ELMo", 2018.1, 94e6, "1802.05365"),
    ("BERT-Large", 2018.8, 340e6, "1810.04805"),
    ("Megatron-LM", 2019.7, 8.3e9, "1909.08053"),
    ("T5", 2019.8, 11e9, "1910.10683"),
    ("GPT-3", 2020.4, 175e9, "2005.14165"),
    ("Gopher", 2021.9, 280e9, "2112.11446"),
    ("PaLM", 2022.3, 540e9, "2204.02311"),
    ("Llama 3.1", 2024.6, 405e9, "2407.21783"),
    ("DeepSeek-V3", 2024.95, 671e9, "2412.19437"),
]
draw(models)
plt.show()

size = {name: parameters for name, _, parameters, _ in models}
print(f"BERT-Large to PaLM: {size['PaLM'] / size['BERT-Large']:,.0f} times in 3.5 years")
print(f"V100 to H100:       {989 / 125:,.0f} times in 5 years")
assert size["PaLM"] / size["BERT-Large"] > 1000 > 989 / 125

# %% [markdown]
# **What to notice.** Models grew a thousandfold while processors became about eight times as fast.
# More processors made up the difference.
#
# ## The first problem: a batch that is too small
#
# The gradient of a batch is a sample of the true gradient. Its noise falls with the square root of
# the batch:

# %%
torch.manual_seed(SEED)
data = ToyDataset(input_size=100, num_samples=scaled(16_384, least=4096))
model = FFNet(input_size=100, num_hl=0, hl_size=10)


def gradient(x, y, weight=1.0):
    """The gradient of weight * mean loss over a batch, in one flat tensor."""
    model.zero_grad()
    (weight * nn.functional.mse_loss(model(x), y)).backward()
    return nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).clone()


whole = gradient(data.x, data.y)
noise = {}
for batch in (8, 32, 128):
    off = []
    for _ in range(scaled(400, least=100)):
        drawn = torch.randint(len(data), (batch,))
        off.append((gradient(data.x[drawn], data.y[drawn]) - whole).square().sum())
    noise[batch] = float(torch.stack(off).mean().sqrt() / whole.norm())
    print(f"batch {batch:4}: noise {noise[batch]:.2f} of the gradient's length")
for small, large in ((8, 32), (32, 128)):
    assert 1.6 < noise[small] / noise[large] < 2.5

# %% [markdown]
# If memory holds only a small batch, *gradient accumulation* adds up the gradients of several, each
# with its share, before one step. This gives exactly the gradient of the large batch:

# %%
x, y = data.x[:128], data.y[:128]
at_once = gradient(x, y)
parts = zip(x.split(16), y.split(16), strict=True)
added = sum(gradient(part_x, part_y, weight=16 / 128) for part_x, part_y in parts)
print(f"largest difference: {float((added - at_once).abs().max()):.1e}")
torch.testing.assert_close(added, at_once, rtol=1e-4, atol=1e-6)

# %% [markdown]
# Eight processors, with one of these eight passes each, would take the time of one pass and one
# message. That is **data parallelism**, which chapter 3 builds.
#
# ## The second problem: a model that is too large
#
# With Adam in mixed precision, training takes 16 bytes per parameter: weight and gradient in 16
# bits; weight, momentum, and variance in 32 bits.

# %%
for name in ("BERT-Large", "GPT-3", "DeepSeek-V3"):
    needed = 16 * size[name] / 80e9
    print(f"{name:12} {16 * size[name] / 1e9:8,.0f} GB, that is {needed:6.2f} processors of 80 GB")
assert 16 * size["BERT-Large"] < 80e9 < 16 * size["GPT-3"]

# %% [markdown]
# **Model parallelism** splits the network. *Between* layers, each processor holds some layers and
# passes its outputs on (a [pipeline](../glossary.md#pipeline)). *Inside* a layer, each holds some
# columns of a matrix. Both compute what the whole network computes:

# %%
network = FFNet(input_size=100, num_hl=1, hl_size=64)
first_stage, second_stage = network.layers[:2], network.layers[2:]
x = torch.randn(8, 100)
assert torch.equal(second_stage(first_stage(x)), network(x))  # between layers

layer = network.layers[0]
upper, lower = layer.weight.split(32), layer.bias.split(32)
halves = [nn.functional.linear(x, weight, bias) for weight, bias in zip(upper, lower, strict=True)]
torch.testing.assert_close(torch.cat(halves, dim=1), layer(x))  # inside a layer

# %% [markdown]
# ![Data parallelism: each processor has all layers and half of the batch, and they exchange
# gradients. Model parallelism: each processor has half of the layers, and the first sends its
# outputs to the second](split.svg)
#
# | | data parallelism | model parallelism |
# |---|---|---|
# | what is split | the batch | the network |
# | each processor holds | all parameters (FSDP: fetched as needed) | its part of them |
# | what is sent | gradients, once per step | activations, at every cut, forward and backward |
# | what it needs | a batch large enough to split | a fast link at every cut |
#
# Large runs use both: model parallelism inside a host, where links are fast, and data parallelism
# between hosts, over the slowest link. That is laconic's subject.
#
# ## Threads or processes
#
# PyTorch's `DataParallel` is one process with a thread for each device, and copies the network to
# all devices at every step. Its `DistributedDataParallel` has one process for each device, and
# these exchange gradients.
#
# Python has a lock (the GIL) that lets only one thread at a time run Python code, so threads take
# turns where processes do not. Compare two workers, without messages, each with as many steps as
# one, of chapter 1's small network:

# %%
steps = scaled(500, least=10)
steps_of_one(10)
ways = {
    "one worker": lambda: time_threads(1, steps),
    "two threads": lambda: time_threads(2, steps),
    "two processes": lambda: spawn_and_join(2, time_process, steps=steps)[0],
}
seconds = dict.fromkeys(ways, math.inf)
for _ in range(scaled(8)):  # in turn, the best of each: what else runs here disturbs all alike
    for name, way in ways.items():
        seconds[name] = min(seconds[name], way())
print(f"{steps} steps by each worker\n")
for name, taken in seconds.items():
    print(f"{name:14} {taken:6.2f} s, {taken / seconds['one worker']:5.2f} times one worker's")

# %% tags=["hidden"]
if (os.cpu_count() or 1) >= 2:
    faster = seconds["two processes"] < seconds["two threads"]
    expect(faster, "two processes are faster than two threads")

# %% [markdown]
# **What to notice.** Two threads take about twice as long for twice the work: the second one gains
# nothing. Two processes on free cores take little longer than one. Large operations release the
# lock, so threads do better with large networks.
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 2` and `check 2`
# ([how](index.md#exercises)).

# %% tags=["exercise", "hidden"]
from tutorial.checks import check

# %% [markdown]
# **2.1** Which weights make the sum of the parts' gradients that of the whole batch? `sizes` has
# the number of samples of each part.


# %% tags=["exercise"]
def weights(sizes):
    return [1 / len(sizes) for _ in sizes]


check("2.1", weights)


# %% tags=["solution"]
def weights(sizes):
    return [size / sum(sizes) for size in sizes]  # every sample counts the same


check("2.1", weights)

# %% [markdown]
# **2.2** How large must a batch be for a third of the noise of a batch of 8?

# %% tags=["exercise"]
batch_size = 24
check("2.2", batch_size)

# %% tags=["solution"]
batch_size = 72  # nine times the batch for a third of the noise
check("2.2", batch_size)

# %% [markdown]
# **2.3** How many seconds do a network's gradients take at `rate` bits per second, with so many
# `bits` each?


# %% tags=["exercise"]
def travel(parameters, bits, rate):
    return parameters * bits / 8 / rate


check("2.3", travel)


# %% tags=["solution"]
def travel(parameters, bits, rate):
    return parameters * bits / rate  # bits over bits per second


check("2.3", travel)

# %% [markdown]
# To explore further:
#
# 1. Make the network in `steps_of_one` wide enough that two threads are faster than one worker
#    making all the steps.
# 2. Print the noise after some epochs of training. Why does a batch that was large enough at first
#    no longer suffice?
# 3. Split `FFNet` into four stages and draw which stage works when, for a batch in four parts and
#    for a whole one. For what share of the time is each stage idle?
#
# ## Sources
#
# - NVIDIA, data sheets of the
#   [V100](https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf),
#   [A100](https://www.nvidia.com/en-us/data-center/a100/) and
#   [H100](https://www.nvidia.com/en-us/data-center/h100/); N. Jouppi et al., *TPU v4*, [arXiv
#   2304.01433](https://arxiv.org/abs/2304.01433). Sizes of models: the arXiv numbers in the code
#   above.
# - S. McCandlish et al., *An empirical model of large-batch training*, [arXiv
#   1812.06162](https://arxiv.org/abs/1812.06162): noise.
# - S. Rajbhandari et al., *ZeRO*, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054), section
#   3.1: 16 bytes.
# - Y. Huang et al., *GPipe*, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965); M. Shoeybi et
#   al., *Megatron-LM*, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053).
