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
# # 5. Full DDP that works
#
# A program that trains for days on many machines needs more than torch's `DistributedDataParallel`.
# This chapter explains one, `tutorial/full_ddp.py`, shows that it computes the same as one process,
# and ends with common mistakes.
#
# **After this chapter you can**
#
# - start a data-parallel program on one machine, on several, with
#   [torchrun](../glossary.md#torchrun), and with Slurm;
# - write a [checkpoint](../glossary.md#checkpoint) from which a run continues bit for bit;
# - train in [mixed precision](../glossary.md#mixed-precision);
# - recognize common mistakes, most of which raise no error.
#
# **Before you start.** Read chapters [3](chapter3.md) and [4](chapter4.md). The two emulated hosts
# need Linux (`laconic doctor` says what is missing). `python -m tutorial 5` runs for about one
# minute.

# %%
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from tutorial import full_ddp, mistakes, naive_ddp
from tutorial.mistakes import apart, runs
from tutorial.naive_ddp import free_port, spawn_and_join, train_alone
from tutorial.shell import started
from tutorial.toy import FULL, FFNet, ToyDataset, machine, scaled, show

torch.set_num_threads(1)
folder = tempfile.TemporaryDirectory()
tmp = folder.name
samples, epochs = scaled(1024, least=48), scaled(10, least=2)
print(machine())

# %% [markdown]
# ## Starting it
#
# `-g` is the number of processes, `-nb` that of samples, `-e` that of epochs. The batch, `-s`, is
# that of all processes together, so the same options mean the same training with any number of
# them.

# %%
shape = f"--device cpu -nb {samples} -e 2"
[plainly] = started(tmp, f"python -m tutorial.full_ddp -g 2 {shape}")
assert len(plainly) == 2

# %% [markdown]
# `launch` starts two processes, which call `work`. They meet at a free port, or with several nodes
# at `MASTER_ADDR` and `MASTER_PORT`.

# %% tags=["source"]
show(full_ddp.work, first="backend =", last="result =")

# %% [markdown]
# Each process has a [rank](../glossary.md#rank) among all processes, and a [local
# rank](../glossary.md#local-rank) on its machine, which is also the number of its GPU:
#
# ![Two nodes with two processes each. Ranks count from 0 to 3 over both nodes, local ranks are 0
# and 1 on each. All meet at the address where rank 0 listens](ranks.svg)
#
# `init_process` is chapter 3's.
#
# **torchrun**, PyTorch's own launcher, starts the processes and tells each its rank in environment
# variables:

# %% tags=["source"]
show(full_ddp.under_torchrun)

# %%
torchrun = "torchrun --standalone --nproc-per-node 2"
if FULL:  # this and the next two take some seconds
    [by_torchrun] = started(tmp, f"{torchrun} -m tutorial.full_ddp {shape}")
    assert by_torchrun == plainly

# %% [markdown]
# The losses are the same. For **two nodes**, run the same command on each, with only `-nr` changed;
# `MASTER_ADDR` is the first one's address. Here both are this machine.

# %%
if FULL:
    nodes = started(
        tmp,
        f"python -m tutorial.full_ddp -n 2 -g 1 -nr 0 {shape}",
        f"python -m tutorial.full_ddp -n 2 -g 1 -nr 1 {shape}",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert nodes == [plainly, []]  # rank 0 alone prints

# %% [markdown]
# `laconic lab` ([how](../lab.md)) provides two hosts with their own network interfaces, and starts
# torchrun on each:

# %%
if FULL:
    [in_lab] = started(tmp, f"laconic lab --hosts 2 -- torchrun -m tutorial.full_ddp {shape}")
    assert [line[line.index("epoch") :] for line in in_lab] == plainly

# %% [markdown]
# With **Slurm**, `sbatch tutorial/full_ddp.slurm` requests two nodes and starts the command on
# each. These are its commands, without options and comments:

# %% tags=["cheap"]
script = Path(full_ddp.__file__).with_suffix(".slurm").read_text()
print("\n".join(line for line in script.splitlines() if line and not line.startswith("#")))

# %% [markdown]
# ## Distributing the data
#
# `DistributedSampler` does what chapter 3's `DataPartitioner` did, with one difference: if samples
# cannot be distributed evenly, it repeats the first ones, so that all ranks have the same number.

# %% tags=["source"]
show(full_ddp.share_of, first="sampler =")

# %%
for number in (1002, 1003):
    dealt = [list(full_ddp.share_of(ToyDataset(4, number), 24, rank, 2)[1]) for rank in range(2)]
    every = dealt[0] + dealt[1]
    print(f"{number} samples: ranks have {[len(each) for each in dealt]}", end="; ")
    print(f"{len(every) - len(set(every))} of them twice")
    assert set(every) == set(range(number))
    assert len(every) - len(set(every)) == number % 2

# %% [markdown]
# ## Training
#
# `DistributedDataParallel(model)` broadcasts rank 0's parameters and averages gradients during the
# backward pass. `set_epoch` makes the sampler shuffle again. The printed loss is the mean over
# *all* samples, not only rank 0's.

# %% tags=["source"]
show(full_ddp.train, first="torch.manual_seed", last="save(Path")

# %% tags=["source"]
show(full_ddp.train_epoch)

# %% [markdown]
# ## The same as one process
#
# The sampler's seed makes it shuffle as chapter 3 did, so all see the same global batches. Only
# rounding remains, and in float64 there is little of it:


# %%
few = {"epochs": scaled(3, least=2)}
double = {**few, "precision": "float64"}
numbers = (samples, samples - 1, samples - 2)
alone = [train_alone(dtype=torch.float64, num_samples=number, **few) for number in numbers]
for world_size in (2, 4):
    options = [{"num_samples": number, **double} for number in numbers]
    for number, one, full in zip(
        numbers, alone, runs(world_size, full_ddp.train, *options), strict=True
    ):
        assert all(result["parameters"] == full[0]["parameters"] for result in full)
        assert all(result["losses"] == full[0]["losses"] for result in full)
        differ = apart(full[0], one)
        print(f"{world_size} processes, {number:5} samples: parameters differ by {differ:.1e}")
        assert differ < 1e-13 if number % world_size == 0 else differ > 1e-6

[by_hand] = runs(2, naive_ddp.train, {"num_samples": samples, "dtype": torch.float64, **few})
assert apart(by_hand[0], alone[0]) < 1e-13  # chapter 3's

# %% [markdown]
# **What to notice.** If samples can be distributed evenly, the training is the same. Otherwise one
# or two count twice in an epoch's last step.
#
# ## Checkpoints
#
# A reliable checkpoint needs three things:
#
# - **It is complete**: the state of model, optimizer (its momentum), and scaler, and the number of
#   completed epochs, which determines the sampler's order. A network with dropout also needs each
#   rank's random state.
# - **A file is either whole or absent.** It is written next to the old one, flushed to the disk,
#   and then renamed.
# - **All ranks do the same.** Rank 0 reads and writes, and tells the others. Otherwise a rank
#   without the file would start again while the others continue.

# %% tags=["source"]
show(full_ddp.save, full_ddp.on_first_rank)

# %% [markdown]
# Four epochs must equal two epochs, an end, new processes, and two more epochs:

# %%
options = {"num_samples": samples, "checkpoint": f"{tmp}/training.pt"}
whole = spawn_and_join(2, full_ddp.train, num_samples=samples, epochs=4)
half = spawn_and_join(2, full_ddp.train, epochs=2, **options)
rest = spawn_and_join(2, full_ddp.train, epochs=4, **options)
for name, results in (("4 epochs", whole), ("2 epochs", half), ("2 more", rest)):
    print(f"{name:10}", " ".join(f"{loss:.6f}" for loss in results[0]["losses"]))
assert [result["losses"] for result in rest] == [result["losses"] for result in whole]
assert [result["parameters"] for result in rest] == [result["parameters"] for result in whole]

# %% [markdown]
# They are equal bit for bit, on both ranks. A checkpoint of another training is rejected with a
# one-line error.
#
# ## Mixed precision
#
# GPUs multiply matrices several times as fast in 16 bits as in 32.
# [`torch.autocast`](../glossary.md#autocast) keeps parameters, the optimizer, and sums in float32,
# and computes matrix products in *bfloat16*, a float32 with 16 bits cut off, or in *float16*, which
# has more digits but a small range: small gradients become zero. So
# [`GradScaler`](../glossary.md#gradscaler) multiplies the loss by a large number, divides gradients
# by it after the backward pass, and skips a step in which a value became infinite. DDP has averaged
# the gradients by then, so all ranks skip the same steps.

# %%
print(f"{epochs} epochs in 2 processes\n")
print(f"{'':8}{'loss':>10}{'off float64':>14}{'seconds':>10}")
options = [
    {"num_samples": samples, "epochs": epochs, "precision": precision}
    for precision in ("float64", "float32", "mixed")
]
precise = {}
for each, (result, _) in zip(options, runs(2, full_ddp.train, *options), strict=True):
    precise[each["precision"]] = result
    differ = apart(result, precise["float64"])
    print(f"{each['precision']:8}{result['losses'][-1]:10.6f}{differ:14.1e}", end="")
    print(f"{result['seconds']:10.2f}")
assert apart(precise["float32"], precise["float64"]) < 1e-5
assert 1000 * apart(precise["float32"], precise["float64"]) < apart(
    precise["mixed"], precise["float64"]
)
off = precise["mixed"]["losses"][-1] / precise["float64"]["losses"][-1] - 1
print(f"\nthe loss in mixed precision is off by {off:+.3%}")
assert abs(off) < 0.02

# %% [markdown]
# **What to notice.** Parameters differ thousands of times as much as in float32, but the loss
# hardly differs.
#
# ## Common mistakes
#
# Most of them raise no error.
#
# **Training the model instead of the wrapper.** Gradients are averaged only if the forward pass
# goes through the module that `DistributedDataParallel(model)` returns. Through `model` every rank
# trains alone.

# %%
ways = [{"wrapper": True}, {"wrapper": False}]
for way, (one, other) in zip(ways, runs(2, mistakes.train_through, *ways), strict=True):
    differ = float((torch.tensor(one) - torch.tensor(other)).abs().max())
    print(
        f"through the {'wrapper' if way['wrapper'] else 'model':7}: replicas differ by {differ:.1e}"
    )
    assert (differ == 0) == way["wrapper"]

# %% [markdown]
# **Discarding the result of `.to()` or `.cuda()`.** For a module both work in place. For a tensor
# they return a new one.

# %%
model, x = FFNet(4, 0, 4), torch.randn(2, 4)
x.to(torch.float64)
assert x.dtype == torch.float32  # nothing happened
model.to(torch.float64)
assert next(model.parameters()).dtype == torch.float64  # here it did
try:
    model(x)
except RuntimeError as error:
    told = str(error)
print(told)
assert "dtype" in told
x = x.to(torch.float64)
assert model(x).dtype == torch.float64

# %% [markdown]
# **`shuffle=True` together with a sampler** raises an error. Without `set_epoch` there is no error,
# and every epoch has the same order.

# %%
data = ToyDataset(4, 16)
sampler = DistributedSampler(data, num_replicas=2, rank=0)
try:
    DataLoader(data, 4, shuffle=True, sampler=sampler)
except ValueError as error:
    told = str(error)
print(told)
assert "mutually exclusive" in told

first, second = list(sampler), list(sampler)
sampler.set_epoch(1)
print("two epochs without set_epoch:", first, second, "and with it:", list(sampler))
assert first == second != list(sampler)

# %% [markdown]
# **A fixed port.** The second job on a machine finds it in use:

# %%
job = dist.TCPStore("127.0.0.1", 0, is_master=True)  # port 0: one that is free
try:
    dist.TCPStore("127.0.0.1", job.port, is_master=True)
except RuntimeError as error:
    told = str(error)
print(told)
assert "EADDRINUSE" in told
del job

# %% [markdown]
# So `launch` takes a free port where it can, the Slurm script one made from the job's number, and
# torchrun has `--standalone`.
#
# **A loss divided by a constant.** DDP divides the sum of gradients by the number of ranks. The
# loss must be the mean over the *samples that are present*. Divided by the requested batch size,
# the smaller batch at an epoch's end weighs less. Divided by the number of ranks again, every step
# is too short.

# %% tags=["source"]
show(mistakes.last_gradient)

# %%
model = mistakes.small_network()
sampler = full_ddp.share_of(ToyDataset(10, 20), 16, rank=0, world_size=1)[1]
x, y = ToyDataset(10, 20)[list(sampler)[16:]]
nn.functional.mse_loss(model(x.double()), y.double()).backward()
one_process = mistakes.gradient(model)
expected = {"samples": 1, "batch size": 1 / 4, "samples and ranks": 1 / 2}
ways = [{"divisor": divisor} for divisor in expected]
for way, (got, _) in zip(ways, runs(2, mistakes.last_gradient, *ways), strict=True):
    got, share = torch.tensor(got, dtype=torch.float64), expected[way["divisor"]]
    print(f"by {way['divisor']:18} {float(got.norm() / one_process.norm()):.2f} of the gradient")
    torch.testing.assert_close(got, share * one_process, rtol=0, atol=1e-13)

# %% [markdown]
# **The same data on every rank.** The same seed everywhere is right for the model and wrong for the
# data: the mean of equal gradients is just one of them.

# %%
ways = [{"dealt": True}, {"dealt": False}]
for way, results in zip(ways, runs(2, mistakes.own_and_mean, *ways), strict=True):
    (own, mean), (other, _) = results
    print("dealt out:" if way["dealt"] else "same seed:", end=" ")
    print(f"gradients of the ranks are {'equal' if own == other else 'different'},", end=" ")
    print(f"and their mean is {'one of them' if mean == own else 'another'}")
    assert (own == other) == (mean == own) == (not way["dealt"])

# %% [markdown]
# ## Where laconic takes over
#
# laconic adds **three lines** to a program: `laconic.init()`, `laconic.attach(...)` in place of the
# wrapper, and `sync.finish()`. Here the processes have already formed a group, and the `with` block
# calls `finish`:

# %% tags=["source"]
show(mistakes.with_laconic, first="with laconic.attach", last="optimizer.step")

# %%
options = {**few, "num_samples": samples}
[(ddp, _)] = runs(2, full_ddp.train, {"precision": "float64", **options})
ways = [
    {"period": 0, **options},
    {"period": 12, **options},
    {"period": 0, "num_samples": 48, "epochs": 1, "dealt": False},
]
(same, _), (less, _), (careless, _) = runs(2, mistakes.with_laconic, *ways)
print(f"ddp():         {same['sent'] / 1e6:6.2f} MB sent; differs by {apart(same, ddp):.1e}")
print(f"local_sgd(12): {less['sent'] / 1e6:6.2f} MB sent; differs by {apart(less, ddp):.1e}")
assert apart(same, ddp) < 1e-13
assert 0 < apart(less, ddp) < 0.1
if FULL:  # with rank 0's parameters at the start, and a last round at the end
    assert 10 < same["sent"] / less["sent"] < 12

print(f"\nthe same data on every rank:\n{careless['warnings'][0].partition('. ')[0]}")
assert "identical on all workers" in careless["warnings"][0]
folder.cleanup()

# %% [markdown]
# `laconic.ddp()` trains the same as DDP. `local_sgd(12)` sends about a twelfth of the bytes and
# trains differently. `laconic.save` and `laconic.load` write and read such checkpoints, at any
# step.
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 5` and `check 5`.

# %% tags=["exercise", "hidden"]
from tutorial.checks import check

# %% [markdown]
# **5.1** Which rank has the process with this local rank on this node, with `per_node` processes on
# each?


# %% tags=["exercise"]
def rank_of(node, local_rank, per_node):
    return node + local_rank


check("5.1", rank_of)


# %% tags=["solution"]
def rank_of(node, local_rank, per_node):
    return node * per_node + local_rank


check("5.1", rank_of)

# %% [markdown]
# **5.2** How many samples does `DistributedSampler` repeat in an epoch?


# %% tags=["exercise"]
def repeated(samples, ranks):
    return samples % ranks


check("5.2", repeated)


# %% tags=["solution"]
def repeated(samples, ranks):
    return -samples % ranks  # what is missing to the next multiple


check("5.2", repeated)

# %% [markdown]
# **5.3** Correct this loss. `errors` are the squared errors of this rank's samples. `batch_size` is
# that of all ranks together.


# %% tags=["exercise"]
def loss(errors, batch_size, ranks):
    return errors.sum() / (batch_size / ranks)


check("5.3", loss)


# %% tags=["solution"]
def loss(errors, batch_size, ranks):
    return errors.mean()  # over the samples that are there


check("5.3", loss)

# %% [markdown]
# **5.4** Which parts must a checkpoint have, so that two epochs, an end, and two more equal four?
# Choose from "model", "optimizer" and "epoch". The optimizer has momentum, and every epoch is
# shuffled.

# %% tags=["exercise"]
parts = {"model"}
check("5.4", parts)

# %% tags=["solution"]
parts = {"model", "optimizer", "epoch"}  # parameters, momentum, and the order of samples
check("5.4", parts)

# %% [markdown]
# To explore further:
#
# 1. Kill a process of `python -m tutorial.full_ddp -g 2 -e 1000` with `kill -9`. What is printed,
#    how long does it take, and does any process remain? And under torchrun?
# 2. Train with `-c FILE`, press Ctrl-C, and continue with `-g 4`. Is the result still that of a
#    training without a break? To the last bit?
# 3. Give the network a dropout layer. Which test of this chapter fails, and what else does the
#    checkpoint need?
# 4. Put the `all_reduce` of `train_epoch` under `if rank == 0:`. What happens, and after how long?
#
# ## Sources
#
# - PyTorch,
#   [DistributedDataParallel](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   [DDP notes](https://docs.pytorch.org/docs/stable/notes/ddp.html),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), and
#   [torch.utils.data](https://docs.pytorch.org/docs/stable/data.html).
# - PyTorch, [torch.amp](https://docs.pytorch.org/docs/stable/amp.html); P. Micikevicius et al.,
#   *Mixed precision training*, [arXiv 1710.03740](https://arxiv.org/abs/1710.03740), section 3.2.
# - Slurm, [sbatch](https://slurm.schedmd.com/sbatch.html).
