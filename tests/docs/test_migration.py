"""docs/migration.md does what it says: its loops are run, by four gloo processes. What needs
another library than torch is not run."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import laconic

from tests.support import gloo

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
OTHERS = re.compile(r"^from (fairscale|DistOptimizers|accelerate)\b", re.MULTILINE)
RANKS = 4
Model = dict[str, list[float]]


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


def one(heading: str, before: str) -> str:
    """The code of the one block under a heading that begins so, behind a line that begins so."""
    (found,) = [b for b in LOOPS if b.heading.startswith(heading) and b.before.startswith(before)]
    return found.code


def run(rank: int, code: str) -> Model:
    """The preamble and ``code``, as one program: the model at its end."""
    names: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*torch.jit")  # torch's use of itself
        exec(compile(PREAMBLE.code + code, "migration.md", "exec"), names)
    state = getattr(names["model"], "module", names["model"]).state_dict()
    return {k: v.flatten().tolist() for k, v in state.items() if isinstance(v, torch.Tensor)}


RAN: dict[str, list[Model]] = {}


def ran(pool: gloo.Pool, code: str) -> list[Model]:
    """The models of all ranks; each code is run once."""
    if code not in RAN:
        RAN[code] = pool.run(run, code, ranks=RANKS)
    return RAN[code]


def test_the_loops_run_learn_and_have_a_before_and_an_after(pool: gloo.Pool) -> None:
    torch.manual_seed(0)
    start = nn.Linear(8, 32).weight.flatten().tolist()
    for block in LOOPS:
        if OTHERS.search(block.code):
            continue
        runs = ran(pool, block.code)
        assert runs[0]["0.weight"] != pytest.approx(start, abs=1e-3), block
        # torch's averagers leave buffers alone
        assert all(r == runs[0] for r in runs) == ("laconic" in block.code), block
    for heading in ("From Dist", "From fairscale", "From SDTL", "From torch", "Hier", "From Accel"):
        assert "laconic" not in one(heading, "Before:") and "laconic" in one(heading, "After:")


def test_loops_before_and_after_are_the_same_training(pool: gloo.Pool) -> None:
    pairs = [
        *((one(h, "Before:"), one(h, "After:")) for h in ("From Dist", "From torch", "Hier")),
        *((one(h, "The same without"), one(h, "After:")) for h in ("From fairscale", "From SDTL")),
    ]
    for before, after in pairs:  # torch's hierarchical averager counts from zero
        counted = before.replace("(4, 4)]))\n", "(4, 4)]))\naverager.step = 1\n")
        theirs, ours = ran(pool, counted)[0], ran(pool, after)[0]
        for key, values in theirs.items():
            if key.endswith(("weight", "bias")):
                assert ours[key] == pytest.approx(values, rel=1e-4, abs=1e-5), (before, key)


# -- the tables ----


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables under a heading."""
    (section,) = re.findall(rf"^##+ {heading}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


SLOWMO = """module, nprocs_per_node, broadcast_buffers, slowmo_base_algorithm, slowmo_momentum,
slowmo_memory_efficient, slowmo_frequency, slowmo_lr, slowmo_num_shards, localsgd_frequency, graph,
mixing, push_sum, overlap, synch_freq, use_streams, slowmo_sgp_average_params, verbose,
profile_mode, process_rank, process_world_size, global_group, master_group, local_node_group,
comm_device"""
SDTL = """optimizer, dist_optim_name, world_size, comm_period, dist_pulling_strength,
local_pulling_strength"""


def test_every_argument_is_in_the_tables_and_in_the_others_order() -> None:
    for heading, ours, theirs in (
        ("From fairscale", laconic.SlowMoDistributedDataParallel, SLOWMO),
        ("From SDTL", laconic.CommOptimizer, SDTL),
    ):
        wanted = re.findall(r"\w+", theirs)
        named = {name for row in rows(heading) for name in re.findall(r"`(\w+)`", row[0])}
        assert set(wanted) - {"optimizer"} <= named
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted
