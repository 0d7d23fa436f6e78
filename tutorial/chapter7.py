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
# # 7. A slow network
#
# Between hosts in one rack there are 10 Gbit/s or more, in one office 1 Gbit/s, between two cities
# 100 Mbit/s, to a home perhaps 10. This chapter predicts the time of a step at 1000, 100, and 10
# Mbit/s, and measures it on an emulated network, to find where each recipe pays off.
#
# **After this chapter you can**
#
# - predict the time of a step on a network that you do not have, and say why a measurement differs;
# - choose a [recipe](../glossary.md#recipe) by the seconds that it needs to reach a loss.
#
# **Before you start.** Read chapters [4](chapter4.md) and [6](chapter6.md). The chapter needs Linux
# for hosts with real network interfaces, and runs for about seven minutes. Run nothing else in the
# meantime: the hosts share your processor.

# %%
import matplotlib.pyplot as plt

from laconic.advisor import advice_on
from laconic.advisor.choices import steps_of
from laconic.algorithms.parse import parse_recipe
from laconic.lab.race.wording import network
from laconic.links import cost
from laconic.policy.predict import predict
from laconic.units import format_rate
from tutorial.slow_network import HOSTS, draw, on_paper, train
from tutorial.toy import FULL, expect, machine

print(machine())

# %% [markdown]
# ## A network to train on
#
# Each host of laconic's lab is a [network namespace](../glossary.md#network-namespace) of the
# kernel, with its own address and its own network interface, which sends no faster than a given
# rate. Where the system has none, a link waits as long as bytes and rate imply.
#
# The model is a transformer that learns to predict the next byte of the source of Python's standard
# library. Hosts that never communicate come first: their step is only computing.

# %%
length = {"seconds": 12} if FULL else {"steps": 1}
(silent,) = train([], 1e9, alone=True, **length)
compute = silent.rows[0].seconds_per_step
print(network(silent))
print(silent.settings["reason"] or "no link stands in: the hosts are network namespaces")
print(f"a step computes {compute * 1e3:.0f} ms")

# %% [markdown]
# ## What a step must send
#
# To average n gradients of B bytes, every host must send at least 2(n-1)/n · B bytes (chapter 4).
# So before any measurement you know how long that takes on any network:

# %%
size = silent.settings["parameters"] * 4
law = 2 * (HOSTS - 1) * size / HOSTS
print(f"{size / 1e6:.2f} MB of gradients, {HOSTS} hosts: each sends {law / 1e6:.2f} MB per step\n")
rates = [1e9, 1e8, 1e7]
for rate in rates:
    travel = 8 * law / rate
    print(
        f"{format_rate(rate):>12}: {travel * 1e3:6,.0f} ms of travel,"
        f" communication / compute = {travel / compute:.2g}"
    )
assert cost.mean(size, HOSTS).bytes == law

# %% [markdown]
# ## On paper
#
# That ratio largely decides which recipe is best. If it is small, the backward pass hides the
# transfer. Near 1, fewer *bits* reduce it: gradients in 4 bits are an eighth. From 10 on only fewer
# *rounds* do: parameters averaged once per period (chapter 6), or sent in fragments, in 4 bits,
# while training continues. Here local SGD has a period of 24 steps. Streaming DiLoCo has a period
# of 16 steps and 4 [fragments](../glossary.md#fragment), so one is sent every 4 steps, and a
# [delay](../glossary.md#delay) of 2: workers take two more steps while a fragment is on its way.

# %%
recipes = {
    "ddp": "ddp()",
    "ddp int4": "ddp(codec='int4')",
    "local SGD": "local_sgd(24)",
    "streaming DiLoCo": "streaming_diloco(16, 4, 2, codec='int4', lr=0.7, momentum=0.6)",
}


def predicted(name, rate):
    return predict(parse_recipe(recipes[name]), on_paper(rate, compute))


# %% [markdown]
# `predict` computes the bytes of each round, their time from a latency and a rate as in chapter 4,
# and how much of it training hides. It leaves out the processor time of packing and coding.

# %%
print(f"{'predicted, ms per step':24}{'kB per step':>12}", end="")
print("".join(f"{format_rate(rate):>14}" for rate in rates))
for name in recipes:
    each = [predicted(name, rate) for rate in rates]
    print(f"{name:24}{each[0].bytes / 1e3:12,.0f}", end="")
    print("".join(f"{p.seconds * 1e3:14,.0f}" for p in each))
amounts = [predicted(name, 1e7).bytes for name in recipes]
assert amounts == sorted(amounts, reverse=True)
assert amounts[0] == law and abs(amounts[2] - law / 24) < 1

# %% tags=["hidden"]
on_10 = [predicted(name, 1e7).seconds for name in recipes]
expect(on_10 == sorted(on_10, reverse=True), "at 10 Mbit/s fewer bytes take less time")

# %% [markdown]
# ## Measured
#
# Now with hosts that send. Each recipe gets the same start, batches, and seconds of training, and a
# learning rate that rises and falls within the steps that fit. On each network the hosts first
# train *alone*, because a computer's speed changes over minutes.

# %%
rows = {}


def measure(rate):
    """Train alone and under each recipe, and print a line when it is done."""
    global compute
    print(f"\n{format_rate(rate):18}{'s/step':>10}{'MB/step':>10}{'speed':>8}", end="")
    print(f"{'waiting':>10}{'steps':>8}{'loss':>8}")
    names = list(recipes) if FULL else ["ddp"]
    results = train([recipes[name] for name in names], rate, alone=True, **length)
    for name, result in zip(["alone", *names], results, strict=True):
        row = rows[rate, name] = result.rows[-1]
        if name == "alone":
            compute = min(compute, row.seconds_per_step)
        megabytes = row.ledger_bytes_per_step / 1e6
        print(f"{name:18}{row.seconds_per_step:10.3f}{megabytes:10.3f}", end="")
        print(f"{compute / row.seconds_per_step:8.0%}{row.waiting:10.0%}", end="")
        print(f"{row.steps:8,}{row.loss:8.2f}", flush=True)


print("Each trains for", *(f"{number} {unit}" for unit, number in length.items()))
measure(1e9)

# %% [markdown]
# *Speed* is the share of the fastest speed of hosts that train alone. *Waiting* is the share of the
# time in which a host waits for the network. *Loss* is the validation loss, in
# [nats](../glossary.md#nat) per byte, of the hosts' [consensus
# model](../glossary.md#consensus-model) at the end. If the speed of *alone* is below 100%, other
# programs used the processor, and other rows are as uncertain.
#
# A tenth of the bandwidth:

# %%
if FULL:
    measure(1e8)

# %% [markdown]
# And a hundredth:

# %%
if FULL:
    measure(1e7)

# %% [markdown]
# The bytes are the same on every network, and no step takes less time than sending them takes.

# %%
print("measured / predicted seconds per step\n")
for (rate, name), row in rows.items():
    if name == "alone":
        continue
    told = predicted(name, rate)
    off = row.seconds_per_step / told.seconds
    print(f"{format_rate(rate):>12} {name:18}{off:5.2f}")
    least = 0.9 * 8 * row.ledger_bytes_per_step / rate  # the interface may still hold the end
    expect(row.seconds_per_step > least, "a step takes at least the time of sending its bytes")
    if FULL and name in ("ddp", "ddp int4"):
        assert abs(row.ledger_bytes_per_step / told.bytes - 1) < 0.01

# %% tags=["hidden"]
if FULL:
    off = rows[1e7, "ddp"].seconds_per_step / predicted("ddp", 1e7).seconds
    expect(2 / 3 < off < 3 / 2, "the prediction for ddp on the slowest network is close")

# %% [markdown]
# **What to notice.** The prediction of `ddp` is best if the network is slow, because then only the
# bytes matter. Where a step is mostly computing, copying, coding, and summing take time that the
# prediction leaves out.
#
# ## Loss against seconds

# %% alt="Validation loss against seconds of training on three networks"
if FULL:
    draw(rows, rates, recipes)
    plt.show()

    last = {rate: {name: rows[rate, name].loss for name in recipes} for rate in rates}
    spread = {rate: max(losses.values()) - min(losses.values()) for rate, losses in last.items()}
    print(
        "from the lowest loss to the highest:", {format_rate(r): round(spread[r], 2) for r in rates}
    )

# %% tags=["hidden"]
if FULL:
    expect(max(last[1e7], key=last[1e7].get) == "ddp", "on the slowest network ddp is behind")
    expect(spread[1e9] < spread[1e7] / 2, "on the fastest network the losses are close together")

# %% [markdown]
# **What to notice.** On the slowest network `ddp` has made only a handful of steps.
#
# ## Which one wins
#
# In the first twelve seconds a step is worth about the same with every recipe. Later, infrequent
# averaging takes *more steps* to the same loss. laconic has measured how many, on this task in runs
# of 480 steps. The recipe with the fewest seconds per step times steps needed wins; `laconic
# advise` and `laconic.auto` choose by this rule:

# %%
needed = {}
for name, recipe in recipes.items():
    needed[name], source = steps_of(parse_recipe(recipe))
    print(f"{name:18} needs {needed[name]:.2f} steps for one of ddp's: {source}")
best = {}
for rate in rates if FULL else []:
    score = {name: rows[rate, name].seconds_per_step * needed[name] for name in recipes}
    best[rate] = min(score, key=score.get)
    gain = score["ddp"] / score[best[rate]]
    print(f"{format_rate(rate):>12}: {best[rate]}, {gain:.2f} times the progress of ddp")

# %% tags=["hidden"]
if FULL:
    seconds = [rows[rate, "ddp"].seconds_per_step for rate in rates]
    expect(seconds == sorted(seconds), "ddp is slower on each slower network")
    expect(best[1e7] != "ddp", "on the slowest network another recipe than ddp wins")

# %% [markdown]
# The same rule on paper, for hosts that compute a step in 100 ms:

# %%
winner = {}
for rate in rates:
    score = {
        name: predict(parse_recipe(recipe), on_paper(rate, 0.1)).seconds * needed[name]
        for name, recipe in recipes.items()
    }
    least = min(score, key=score.get)
    winner[rate] = least, score["ddp"] / score[least]
    print(
        f"{format_rate(rate):>12}: communication / compute = {8 * law / rate / 0.1:4.2g}, ", end=""
    )
    print(f"{least}, {winner[rate][1]:.2f} times the progress of ddp")
assert winner[1e9][1] < 1.25
assert winner[1e8][0] == "ddp int4" and winner[1e7][0] == "streaming DiLoCo"

# %% [markdown]
# **What to notice.** On paper, the answer depends on the ratio of communication to computing:
#
# - **Below 1**, as at 1000 Mbit/s: gradients in 4 bits hide a part of the communication. If they
#   gain only a few percent, keep `ddp`.
# - **From 1 to about 10**, as at 100 Mbit/s: gradients in 4 bits bring the ratio below 1 again and
#   give up almost nothing.
# - **Above 10**, as at 10 Mbit/s: more steps for the same loss pay off: average with a period, or
#   stream fragments while training continues.
#
# Two recipes within ten percent of each other are a tie.
#
# With a GPU that computes a step ten times as fast, each range moves to networks ten times as fast.
#
# ## Let it choose
#
# Before a training, from numbers:
#
#     laconic advise --params 865280 --step-time 100ms --bandwidth 10mbit --latency 2ms --workers 2
#
# For these hosts, with the computing measured above, it chooses among more recipes than these four:

# %%
for rate in rates:
    advice = advice_on(on_paper(rate, compute))
    print(f"{format_rate(rate):>12}: {advice.code}")
    expect(advice.row.seconds <= predicted("ddp", rate).seconds, "it is no slower than ddp")

# %% [markdown]
# During training, `auto` measures and chooses, again when the network has changed:
#
#     sync = laconic.attach(model, optimizer, laconic.auto())
#
# For your own task and your own candidates:
#
#     laconic compare "ddp()" "ddp(codec='int4')" "local_sgd(24)" "auto()" --bandwidth 100mbit
#
# ## Exercises
#
# Check your answers in Jupyter, or with `python -m tutorial start 7` and `check 7`.

# %% tags=["exercise", "hidden"]
import math

from tutorial.checks import check

# %% [markdown]
# **7.1** At how many bits per second does sending the gradients of a step, in 32 bits, take exactly
# as long as computing it, `compute` seconds?


# %% tags=["exercise"]
def equal_rate(parameters, hosts, compute):
    return 32 * parameters / compute


check("7.1", equal_rate)


# %% tags=["solution"]
def equal_rate(parameters, hosts, compute):
    return 2 * (hosts - 1) / hosts * 32 * parameters / compute


check("7.1", equal_rate)

# %% [markdown]
# **7.2** Which recipe makes the most progress? Both arguments have a number for each recipe's name:
# seconds per step, and steps needed for the loss that one step of `ddp` reaches.


# %% tags=["exercise"]
def most_progress(seconds, needed):
    return min(seconds, key=lambda name: seconds[name])


check("7.2", most_progress)


# %% tags=["solution"]
def most_progress(seconds, needed):
    return min(seconds, key=lambda name: seconds[name] * needed[name])


check("7.2", most_progress)

# %% [markdown]
# **7.3** A round of local SGD takes `round_time` seconds, and training waits for it. What is the
# shortest period with which rounds add at most a tenth of the computing?


# %% tags=["exercise"]
def long_enough(compute, round_time):
    return math.ceil(round_time / compute)


check("7.3", long_enough)


# %% tags=["solution"]
def long_enough(compute, round_time):
    return math.ceil(round_time / (compute / 10))


check("7.3", long_enough)

# %% [markdown]
# To explore further:
#
# 1. At which bandwidth do `ddp` and `ddp(codec='int4')` make equal progress on your machine?
#    Compute it, then race the two there with `laconic compare`.
# 2. Which period of `local_sgd` wins at 10 Mbit/s, 6, 24 or 96, in one minute and in five? Why not
#    the same?
# 3. Double the hosts (`--hosts 4`). By how much do the bytes per step grow? What happens to seconds
#    per step?
# 4. Add a latency of 50 ms (`--latency 50ms`) at 100 Mbit/s. Which recipes slow down?
# 5. Give one host a tenth of the bandwidth (`--bandwidth 1=10mbit`). Who waits for whom?
#
# ## Where to go next
#
# - **Your own training on slow hosts**: [quick start](../quickstart.md), [compare](../compare.md),
#   and [the lab](../lab.md).
# - **More on communicating less**: [the algorithms](../algorithms/index.md), [codecs and
#   overlap](../coded.md), and [your own algorithm](../own_algorithm.md).
# - **A model that does not fit** (chapter 2's second problem):
#   [FSDP](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). laconic averages
#   between groups that are sharded inside.
#
# ## Sources
#
# - P. Patarasuk, X. Yuan, [*Bandwidth optimal all-reduce algorithms for clusters of
#   workstations*](https://doi.org/10.1016/j.jpdc.2008.09.002), 2009: the law of 2(n-1)/n.
# - S. Stich, *Local SGD converges fast and communicates little*, [arXiv
#   1805.09767](https://arxiv.org/abs/1805.09767).
# - D. Alistarh et al., *QSGD*, [arXiv 1610.02132](https://arxiv.org/abs/1610.02132).
# - A. Douillard et al., *Streaming DiLoCo with overlapping communication*, [arXiv
#   2501.18512](https://arxiv.org/abs/2501.18512).
