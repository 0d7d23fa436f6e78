"""docs/migration.md does what it says: its loops are run, by four gloo processes, and what it says
about when torch averages is tried. What needs another library than torch is not run."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)

import laconic

from tests.support import gloo

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what torch says of its own use of itself
    from torch.distributed.optim import PostLocalSGDOptimizer

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "migration.md").read_text()
OTHERS = re.compile(r"^from (fairscale|DistOptimizers|accelerate)\b", re.MULTILINE)
RANKS = 4


class Block(NamedTuple):
    """A block of the page's code: the heading it stands under, the line before it, the lines."""

    heading: str
    before: str
    code: str


def blocks() -> list[Block]:
    found = []
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        for match in re.finditer(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            before = section[: match.start()].strip().splitlines()[-1]
            found.append(Block(heading, before, match[1]))
    return found


PREAMBLE, *LOOPS = blocks()
FOREIGN = [block for block in LOOPS if OTHERS.search(block.code)]
OWN = [block for block in LOOPS if block not in FOREIGN]


def one(heading: str, before: str) -> Block:
    """The one block under a heading that begins so, behind a line that begins so."""
    (found,) = [b for b in LOOPS if b.heading.startswith(heading) and b.before.startswith(before)]
    return found


def run(rank: int, code: str) -> dict[str, list[float]]:
    """The preamble and ``code``, as one program: the model at its end."""
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(PREAMBLE.code + code, "migration.md", "exec"), names)
    model = names["model"]
    state = getattr(model, "module", model).state_dict()
    return {
        key: value.flatten().tolist()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def ran(pool: gloo.Pool, code: str) -> list[dict[str, list[float]]]:
    return pool.run(run, code, ranks=RANKS)


def parameters(state: dict[str, list[float]]) -> list[float]:
    return [v for key, values in state.items() if key.endswith(("weight", "bias")) for v in values]


def alike(runs: list[dict[str, list[float]]]) -> bool:
    return all(state == runs[0] for state in runs)


# -- the loops ----


@pytest.mark.parametrize("block", OWN, ids=lambda b: f"{b.heading[:24]} {b.before[:12]}")
def test_a_loop_of_the_page_runs_and_learns(block: Block, pool: gloo.Pool) -> None:
    runs = ran(pool, block.code)
    torch.manual_seed(0)
    start = nn.Linear(8, 32).weight.flatten().tolist()
    assert max(abs(a - b) for a, b in zip(start, runs[0]["0.weight"], strict=True)) > 1e-3
    assert alike(runs) == ("laconic" in block.code), "torch's averagers leave buffers alone"


def test_the_page_has_a_before_and_an_after_for_each() -> None:
    headings = "From Dist", "From fairscale", "From SDTL", "From torch", "Hier", "From Accelerate"
    for heading in headings:
        before, after = one(heading, "Before:"), one(heading, "After:")
        assert "laconic" not in before.code and "laconic" in after.code
    assert [b.heading.partition(" ")[2][:5] for b in FOREIGN] == ["fairs", "SDTL'", *["Accel"] * 2]


def test_what_the_diffs_say_stands_in_the_loops() -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    code = "\n".join(block.code for block in LOOPS)
    assert len(diffs) == 6
    for line in "".join(diffs).splitlines():
        said = line[1:].strip()
        assert line == "..." or said in code or said.partition(" = ")[2] in code


def close(one: list[float], other: list[float]) -> bool:
    return other == pytest.approx(one, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("heading", ["From Dist", "From torch"])
def test_ddp_and_post_local_sgd_are_torchs(heading: str, pool: gloo.Pool) -> None:
    theirs, ours = (ran(pool, one(heading, when).code)[0] for when in ("Before:", "After:"))
    assert close(parameters(theirs), parameters(ours))


def test_hierarchical_is_torchs_counted_from_one(pool: gloo.Pool) -> None:
    before = one("Hier", "Before:").code
    assert before.count("(4, 4)]))\n") == 1
    shifted = before.replace("(4, 4)]))\n", "(4, 4)]))\naverager.step = 1\n")
    theirs, ours = (ran(pool, code)[0] for code in (shifted, one("Hier", "After:").code))
    assert close(parameters(theirs), parameters(ours))


@pytest.mark.parametrize("heading", ["From fairscale", "From SDTL"])
def test_with_the_wrapper_and_without_it_are_the_same(heading: str, pool: gloo.Pool) -> None:
    wrapped, plain = (
        ran(pool, one(heading, before).code)[0] for before in ("After:", "The same without")
    )
    assert list(wrapped) == list(plain)
    for key, values in plain.items():
        assert wrapped[key] == pytest.approx(values, rel=1e-5, abs=1e-6), key


# -- the tables ----


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables under a heading."""
    (section,) = re.findall(rf"^##+ {heading}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def arguments(heading: str) -> set[str]:
    """The names in backquotes in the first column of the tables of arguments."""
    return {name for row in rows(heading) for name in re.findall(r"`(\w+)`", row[0])}


SLOWMO = """module, nprocs_per_node, broadcast_buffers, slowmo_base_algorithm, slowmo_momentum,
slowmo_memory_efficient, slowmo_frequency, slowmo_lr, slowmo_num_shards, localsgd_frequency, graph,
mixing, push_sum, overlap, synch_freq, use_streams, slowmo_sgp_average_params, verbose,
profile_mode, process_rank, process_world_size, global_group, master_group, local_node_group,
comm_device"""


def test_every_argument_of_fairscales_is_in_the_table() -> None:
    wanted = re.findall(r"\w+", SLOWMO)
    assert len(wanted) == 25
    assert set(wanted) <= arguments("From fairscale")
    own = list(inspect.signature(laconic.SlowMoDistributedDataParallel).parameters)
    assert own == [*wanted, "timeout"]


def test_every_argument_of_sdtls_is_in_the_table() -> None:
    named = ["dist_optim_name", "world_size", "comm_period"]
    named += ["dist_pulling_strength", "local_pulling_strength"]
    assert {"local_optimizer", *named} <= arguments("From SDTL")
    assert list(inspect.signature(laconic.CommOptimizer).parameters)[:6] == ["optimizer", *named]


@pytest.mark.parametrize(
    "of",
    [
        PeriodicModelAverager,
        PostLocalSGDOptimizer,
        PostLocalSGDState,
        post_localSGD_hook,
        HierarchicalModelAverager,
    ],
)
def test_every_argument_of_torchs_is_in_the_table(of: Any) -> None:
    told = {
        name
        for row in rows("From torch")
        if row[0] == f"`{of.__name__}`"
        for name in re.findall(r"`(\w+)`", row[1])
    }
    assert told == set(inspect.signature(of).parameters)


# -- what the page says of torch ----


def rounds_of(rank: int, averager: PeriodicModelAverager | HierarchicalModelAverager) -> list[int]:
    """After which of 24 steps it changes a parameter."""
    p, found = nn.Parameter(torch.zeros(1)), []
    p.grad = torch.zeros(1)
    for step in range(1, 25):
        with torch.no_grad():
            p.fill_(float(rank))
        averager.average_parameters([p])
        if float(p) != rank:
            found.append(step)
    return found


def periodic(rank: int, warmup: int) -> list[int]:
    return rounds_of(rank, PeriodicModelAverager(period=4, warmup_steps=warmup))


def in_levels(rank: int, warmup: int) -> list[int]:
    levels = OrderedDict([(2, 2), (4, RANKS)])
    return rounds_of(rank, HierarchicalModelAverager(levels, warmup_steps=warmup))


def test_when_torch_averages(pool: gloo.Pool) -> None:
    assert pool.run(periodic, 0, ranks=RANKS)[0] == [1, 5, 9, 13, 17, 21]
    assert pool.run(periodic, 11, ranks=RANKS)[0] == [12, 16, 20, 24]
    assert pool.run(in_levels, 0, ranks=RANKS)[0] == [*range(1, 24, 2)]
    assert pool.run(in_levels, 4, ranks=RANKS)[0] == [*range(5, 24, 2)]
    start = laconic.post_local_sgd(11, 4)[1].when
    assert [step for step in range(1, 25) if start(step)] == [12, 16, 20, 24]
