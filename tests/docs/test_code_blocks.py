"""Every block of Python on the pages runs, and every command on them exists with its options.

A page's blocks run in order, with stand-ins for what a reader brings: a model, data, a schedule.
The tutorial and migration.md have tests of their own.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

import laconic
from laconic.algorithms.recipes import RECIPES
from laconic.attach import attach
from laconic.cli.commands import commands as all_commands
from laconic.engine.attached import synchronizer_of
from laconic.lab.emulation.cluster import Cluster
from laconic.parts import parameters

from tests.support import gloo

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = ("tutorial", "migration", "own_algorithm", "glossary", "tune")
"""Pages that have tests of their own."""
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:^ {4,}.*\n|^\n(?= {4}))+)", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text()
    return [textwrap.dedent(code) for _, name, code in BLOCK.findall(text) if name == language]


def own(page: Path) -> bool:
    return not any(name in page.parts or name == page.stem for name in ELSEWHERE)


def is_signature(code: str) -> bool:
    """Whether it is of a recipe, as pages show them; another test compares them."""
    name = code.partition("(")[0]
    return name in RECIPES or name in ("auto", "muon")


CODE = {page.relative_to(ROOT).as_posix(): blocks(page, "python") for page in PAGES if own(page)}
CODE = {page: found for page, found in CODE.items() if found}


# -- what the reader brings ----


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


def batch() -> Batch:
    x = torch.randn(8, 4)
    return Batch(x, x.sum(1, keepdim=True))


def brought(rank: int) -> dict[str, Any]:
    """By the names under which the pages use it."""
    torch.manual_seed(rank)
    names: dict[str, Any] = {"__name__": "page", "laconic": laconic, "torch": torch, "nn": nn}
    names |= {name: getattr(laconic, name) for name in laconic.__all__}
    names |= {name: getattr(laconic.updates, name) for name in laconic.updates.__all__}
    names |= {name: getattr(laconic.exchanges, name) for name in laconic.exchanges.__all__}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [(each.x[0], each.y[0]) for each in (batch() for _ in range(64))]

    def forward() -> None:
        for one in names.get("optimizers", [names["optimizer"]]):
            one.zero_grad()
        names["model"](torch.randn(8, 4)).square().mean().backward()

    def step() -> None:
        forward()
        for one in names.get("optimizers", [names["optimizer"]]):
            one.step()

    names |= {
        "model": model, "optimizer": optimizer, "criterion": nn.MSELoss(), "rank": rank,
        "loader": [batch() for _ in range(8)], "batches": [batch() for _ in range(4)],
        "dataset": data, "data": data, "validate": lambda model: model(torch.randn(2, 4)).mean(),
        "recipe": laconic.local_sgd(2), "sampler": laconic.ElasticSampler(data, seed=1),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "elastic": laconic.Elastic(others={}), "steps": 8, "end": 8, "path": "checkpoint",
        "time": SimpleNamespace(monotonic=itertools.count().__next__),  # the same on each worker
        "step_fn": step, "take_step": step, "forward": forward, "parameters": parameters,
        "DataLoader": DataLoader, "DistributedSampler": partial(
            DistributedSampler, num_replicas=4, rank=rank
        ),
        "itertools": itertools, "dataclass": dataclass, "AveragedModel": AveragedModel,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
    }  # fmt: skip
    return names


REPLACED = {
    '"cuda"': '"cpu"',
    "(4, 8)": "(2, 2)",
    "10_000": "8",
    "range(200)": "range(20)",
    "% 1000": "% 4",
    "% 100": "% 4",
    "batch_size=32": "batch_size=4",
    "nprocs_per_node=8": "nprocs_per_node=2",
    '"/shared/checkpoint"': '"checkpoint"',
}
"""What is too large for a test, needs a GPU, or would stay for the next run."""


def runnable(code: str) -> str:
    for text, smaller in REPLACED.items():
        code = code.replace(text, smaller)
    does = "forward()" if "optimizer.step()" in code else "take_step()"
    return re.sub(r"^( *)\.\.\.( +#.*)?$", rf"\1{does}", code, flags=re.MULTILINE)


def attach_again(model: nn.Module, optimizer: Any, recipe: Any, **options: Any) -> Any:
    """`attach`, after the block before has attached the same optimizer."""
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        if (before := synchronizer_of(one)) is not None:
            before.detach()
    return attach(model, optimizer, recipe, **options)


TOP = ("laconic.simulate(", "laconic.Trace(")
"""Blocks with these run by themselves, and not as the program of a worker."""
SHARDED = ("fully_shard", "full_state_dict", "dcp.save")


def plain(page: str, code: str) -> bool:
    """Whether the block is for the program of a worker."""
    special = any(name in code for name in (*TOP, *SHARDED)) or page == "docs/trainers.md"
    return not special and not is_signature(code)


def execute(page: str, code: str, names: dict[str, Any]) -> None:
    exec(compile(runnable(code), page, "exec", dont_inherit=True), names)


def write_trace(folder: Path) -> None:
    """Of an elastic run of two workers."""
    (folder / "trace").mkdir()
    for worker in ("a", "b"):
        line = json.dumps({"unit": 0, "workers": ["a", "b"]})
        (folder / "trace" / f"{worker}.jsonl").write_text(line + "\n")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(laconic, "attach", attach_again)
    monkeypatch.setattr(laconic, "init", lambda: None)  # workers are simulated
    monkeypatch.setattr(Cluster, "__enter__", lambda self: self)
    monkeypatch.setattr(Cluster, "__exit__", lambda *_: None)
    record = {"event": "end", "step": 8, "bytes_sent": 0}
    (tmp_path / "run.jsonl").write_text(json.dumps(record) + "\n")
    write_trace(tmp_path)


@pytest.mark.usefixtures("prepared")
@pytest.mark.filterwarnings("ignore:delay=", "ignore:.*group", "ignore:.*fewer than 4 workers")
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * ("advise(" in str(c))) for p, c in CODE.items()],
)
def test_the_blocks_of_a_page_run(page: str) -> None:
    mine = [code for code in CODE[page] if plain(page, code)]
    code = "\n".join(mine)
    changing = "elastic=" in code
    attached = "sync." in code and "sync = " not in code  # by the reader, before

    def worker(rank: int) -> dict[str, Any]:
        names = brought(rank)
        if attached:
            names["sync"] = laconic.attach(names["model"], names["optimizer"], names["recipe"])
        for code in mine:
            execute(page, code, names)
        return names

    many: dict[str, Any] = {"faults": laconic.Faults(start=4)} if changing else {"workers": 4}
    laconic.simulate(worker, **many)


def train_with_a_quorum(rank: int) -> laconic.Synchronizer:
    names = brought(rank)
    recipe = laconic.diloco(2, quorum=3)
    with laconic.attach(names["model"], names["optimizer"], recipe) as sync:
        for _ in range(8):
            names["take_step"]()
    return sync


ALONE = [
    pytest.param(page, code, id=page, marks=[pytest.mark.slow] * ("def train(number" in code))
    for page, found in CODE.items()
    for code in found
    if any(name in code for name in TOP)
]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("page", "code"), ALONE)
def test_a_block_that_starts_workers_runs(page: str, code: str) -> None:
    names = {
        "laconic": laconic,
        "sync": laconic.simulate(train_with_a_quorum, workers=4)[0],
        "worker_fn": train_with_a_quorum,
        "options": None,
        "train": lambda _: None,
    }
    execute(page, code, names)


# -- blocks for more than simulated workers ----

FSDP = [
    (page, code)
    for page, found in CODE.items()
    for code in found
    if "fully_shard" in code and "elastic=" not in code  # tests/elastic/test_ranks.py runs that
]


def shard(rank: int, page: str, code: str, more: list[str], where: str) -> list[str]:
    """Run on a rank of two workers of two ranks: the names in the model's exported state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.chdir(where)
    names = brought(rank)
    names |= {"dcp": dcp, "fully_shard": fully_shard, "init_device_mesh": init_device_mesh}
    execute(page, code, names)
    names["take_step"]()
    exported: list[str] = []
    for block in more:
        execute(page, block, names)
        exported += names["state"]
    return exported


@pytest.mark.parametrize(("page", "code"), FSDP, ids=[page for page, _ in FSDP])
def test_a_block_for_sharded_models_runs(
    page: str, code: str, pool: gloo.Pool, tmp_path: Path
) -> None:
    more = [c for c in CODE[page] if "fully_shard" not in c and any(n in c for n in SHARDED)]
    first, *_ = pool.run(shard, page, code, more, str(tmp_path), ranks=4)
    if more:
        assert first == ["0.weight", "0.bias", "2.weight", "2.bias", "model"]
        assert (tmp_path / "model.pt").is_file() or (tmp_path / "model").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("code", CODE["docs/trainers.md"])
def test_a_block_for_trainers_names_what_exists(code: str) -> None:
    """The tests of integrations train with the same calls."""
    names, tree = {"laconic": laconic}, ast.parse(code)
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "trl" not in ast.unparse(node):
            exec(ast.unparse(node), names)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and "aconic" in (name := ast.unparse(call.func)):
            inspect.signature(eval(name, names)).bind_partial(
                **{k.arg: 0 for k in call.keywords if k.arg}
            )


# -- what blocks must be ----


def test_the_examples_of_compare_stand_in_their_files() -> None:
    files = [(ROOT / f"examples/my_{name}.py").read_text() for name in ("workload", "rules")]
    for part in (part for code in CODE["docs/compare.md"] for part in code.split("\n\n\n")):
        assert part.strip() in "".join(files)


OWN = ROOT / "docs" / "own_algorithm.md"
LINE = re.compile(r"^ *loss (\d\.\d+), (\d+\.\d+) MB sent by each worker$", re.MULTILINE)


@pytest.mark.slow
def test_the_page_on_an_algorithm_of_ones_own_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    update, check, *more = blocks(OWN, "python")
    wrong = update.replace('state["e"].copy_(d - q)', 'state["e"].copy_(q)')
    with pytest.raises(AssertionError):  # the page's check notices a wrong line
        exec(compile(wrong + check, OWN.name, "exec", dont_inherit=True), dict(names))
    for code in (update, check, *more):
        exec(compile(code, OWN.name, "exec", dont_inherit=True), names)
    printed, shown = LINE.findall(capsys.readouterr().out), LINE.findall(OWN.read_text())
    assert len(printed) == 5
    for (loss, sent), (expected, megabytes) in zip(printed, shown, strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=0.1)  # processors differ
        assert sent == megabytes


# -- commands ----


def commands(page: Path) -> Iterator[str]:
    """The lines of shell on a page, those that go on in the next line as one."""
    text = page.read_text()
    shell = [textwrap.dedent(c) for _, name, c in BLOCK.findall(text) if name in ("bash", "sh")]
    shell += map(textwrap.dedent, INDENTED.findall(BLOCK.sub("", text)))
    for line in "\n".join(shell).replace("\\\n", " ").splitlines():
        yield line.partition(" #")[0].strip().removeprefix("$ ").removeprefix("nice -n 19 ")


LINES = sorted(
    {(page.stem, line) for page in PAGES if "tutorial" not in page.parts for line in commands(page)}
)


def test_every_command_of_a_page_is_one_with_these_options() -> None:
    lines = [each for each in LINES if re.match(r"laconic \w", each[1])]
    assert len(lines) > 20
    for page, line in lines:
        words = shlex.split(line.removesuffix(" &").partition(" -- ")[0])[1:]
        known, _ = all_commands()  # each anew: options are given once
        try:
            known.parse_args(["0" if word in ("R", "PID") else word for word in words])
        except SystemExit:
            raise AssertionError(f"{page}: {line}") from None


def test_every_program_of_a_page_exists() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page, line in LINES:
        if line.startswith("make "):
            for target in re.findall(r"(?<= )[a-z][\w-]*(?= |$)", line.partition('"')[0]):
                assert target in targets, f"{page}: {line}"
        for module in re.findall(r"-m ((?:benchmarks|tutorial|laconic)[\w.]*)", line):
            assert find_spec(module) is not None, f"{page}: {line}"
        for file in re.findall(r"\bexamples/[\w/.-]+\w", line):
            assert (ROOT / file).is_file(), f"{page}: {line}"
