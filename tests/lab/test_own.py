"""`laconic compare` on a user's own: workload, recipes, other libraries, unlike hosts, repeats."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.cli import main
from laconic.lab.race import entrant, rivals, runner, user_files, worker, workloads
from laconic.lab.race.comparison import Summary, summary
from laconic.lab.race.report import Result, Row, read, verdict
from laconic.lab.race.result import NO_COMMUNICATION, grouped
from laconic.lab.race.workloads import Workload
from laconic.links.simulated import single_link
from laconic.links.throttled import Throttled

from tests.lab.test_cluster import refusal
from tests.lab.test_report import SILENT, rendered, result, row

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES, WORKLOAD = EXAMPLES / "my_rules.py", EXAMPLES / "my_workload.py"
ADAPTERS = ["accelerate", "fairscale", "torch-ddp", "torch-postlocal", "torchft"]


def compare(arguments: Sequence[str], directory: Path) -> tuple[int, Result]:
    code = main(["compare", *arguments, "--out", str(directory)])
    return code, read(directory)


# -- races ----


def test_own_workload_and_rules_with_unlike_hosts_run_once_for_each_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file that imports one beside it and prints what looks like an event."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("beside_it.py").write_text(WORKLOAD.read_text())
    Path("mine.py").write_text(
        """
import beside_it
def make(data):
    made = beside_it.make()
    made["batches"] = lambda *which: printing(beside_it.make()["batches"](*which))
    return {**made, "warmup": float(data.read_text())}
def printing(batches):
    for batch in batches:
        print('{"event": "end", "steps": 1}')
        yield batch
"""
    )
    Path("warmup").write_text("0.1")
    recipe = "slowmo(sign_pull(4, size=0.02), period=8)"
    code, ended = compare(
        [
            recipe, "--rules", str(RULES), "--workload", "mine.py:make", "--data", "warmup",
            "--hosts", "2", "--bandwidth-host", "1=20mbit", "--slow-host", "0=1.5",
            "--steps", "16", "--repeat", "7,3",
        ],
        tmp_path / "out",
    )  # fmt: skip
    said = capsys.readouterr()
    assert code == 0, said.err
    names = (NO_COMMUNICATION, recipe)
    assert [(r.seed, r.recipe) for r in ended.rows] == [(s, n) for s in (7, 3) for n in names]
    for one in ended.rows:
        first, last = one.curve[0].loss, one.loss
        assert one.status == "ok" and one.steps == 16 and not one.peer
        assert first is not None and last is not None and last < first
    for once, again in grouped(ended.rows):
        assert once.loss != again.loss
    size = sum(
        p.numel() for p in user_files.workload("mine.py", Path("warmup")).model().parameters()
    )
    for one in ended.rows:
        if one.recipe == recipe:  # four rounds in all
            assert one.ledger_bytes_per_step == pytest.approx(4 * size / 4, rel=0.05)
    assert ended.settings["host_bandwidth"] == {"1": 20e6}
    assert ended.settings["slow_hosts"] == {"0": 1.5}
    assert (ended.settings["seeds"], ended.settings["seed"]) == ([7, 3], 7)
    text = " ".join(said.out.split())
    assert "host 1: 20 Mbit/s, host 0 computes 1.5 times as long" in text
    assert "2 runs each, seeds 7, 3" in text and "±" in text
    assert Result.from_json((tmp_path / "out" / "results.json").read_text()) == ended


def test_other_libraries_beside_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are installed train, and as well; the others say what to install."""
    monkeypatch.setenv("COLUMNS", "160")
    alike = {
        "torch-ddp": "ddp()",
        "torch-ddp('fp16')": "ddp()",
        "accelerate(4)": "local_sgd(4)",
        "torchft(4)": "local_sgd(4)",
        "torchft(4, outer=True, momentum=0.5)": "diloco(4, momentum=0.5)",
        "torchft(4, outer=True, momentum=0.5, bucketed=True)": "diloco(4, momentum=0.5)",
    }
    there = [name for name in alike if rivals.find(name).version() is not None]
    ours = [*dict.fromkeys(alike[name] for name in there)]
    names = [
        *alike,
        "torch-ddp('powersgd', start=2)",
        "torch-postlocal(0, period=4)",
        "fairscale(8, localsgd_period=4)",
        "torchft(4, outer=True, momentum=0.5, fragments=2, delay=1, alpha=0.5)",
    ]
    options = ["--workload", str(WORKLOAD), "--hosts", "2", "--steps", "16"]
    flags = [word for name in names for word in ("--peer", name)]
    code, ended = compare([*ours, *options, *flags], tmp_path / "out")
    said = capsys.readouterr()
    assert code == 0, said.err
    rows = {r.recipe: r for r in ended.rows}
    assert list(rows) == [NO_COMMUNICATION, *ours, *names]
    for name in names:
        one, peer = rows[name], rivals.find(name)
        assert one.peer
        if refusal() is not None:
            assert one.status == "absent" and "needs emulated hosts" in (one.error or "")
            continue
        if peer.version() is None:
            assert one.error == f"not installed: run make peers, or pip install {peer.package}"
            assert one.status == "absent" and peer.name not in ended.versions
            assert f"{name}: absent: not installed: run make peers" in said.out
            continue
        assert one.status == "ok", one.error
        assert ended.versions[peer.name] == peer.version()
        assert math.isnan(one.ledger_bytes_per_step) and math.isnan(one.waiting)
        assert not one.timeline and not one.rounds and one.curve[-1].distance is None
        assert one.interface_bytes_per_step is not None and one.interface_bytes_per_step > 1000
        first, last = one.curve[0].loss, one.loss
        assert first is not None and last is not None and last < first
        sent = one.curve[-1].megabytes * 1e6
        assert sent == pytest.approx(16 * one.interface_bytes_per_step, rel=0.01)
        assert re.search(rf"^{re.escape(name)}‡ .* 16 ", said.out, re.MULTILINE)
        if name in alike:
            assert one.loss == pytest.approx(rows[alike[name]].loss, rel=1e-3)


def test_a_peers_model_is_averaged_in_one_message_per_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a long round trip, one message per tensor takes longer than the training."""
    sent: list[torch.dtype] = []

    def all_reduce(flat: Tensor) -> None:  # two ranks, the other one with ones
        sent.append(flat.dtype)
        flat += 1

    monkeypatch.setattr(entrant.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(entrant.dist, "get_world_size", lambda: 2)
    tensors = [torch.zeros(2, 3), torch.full((4,), 3.0), torch.zeros((), dtype=torch.float64)]
    turned = torch.arange(6.0).view(2, 3).t()
    entrant._average([*tensors, turned])
    assert sent == [torch.float32, torch.float64]
    assert [t.unique().tolist() for t in tensors] == [[0.5], [2.0], [0.5]]
    assert torch.equal(turned, (torch.arange(6.0).view(2, 3).t() + 1) / 2)


def test_every_adapter_is_found_and_pinned() -> None:
    """What a row says to install is what make peers installs."""
    with pytest.raises(ValueError, match=f"no peer 'no': choose from {', '.join(ADAPTERS)}"):
        rivals.find("no")
    pinned = (rivals.ADAPTERS / "requirements.txt").read_text().splitlines()
    assert not any(line.startswith("torch==") for line in pinned)
    for name in ADAPTERS:
        peer = rivals.find(name)
        assert peer.package in pinned or peer.package == "torch"
        assert peer.rounds and all(
            isinstance(r, (laconic.Round, laconic.GradientRound)) for r in peer.rounds
        )


def adapter(name: str) -> Any:
    """An adapter's module."""
    return user_files.load(rivals.ADAPTERS / f"{name}.py", importable=False)


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_fragments_are_all_parameters_in_their_order_and_of_about_a_size(fragments: int) -> None:
    model = workloads.load("digits").model() if fragments < 4 else nn.Sequential(
        *(nn.Linear(8, 8) for _ in range(8))
    )  # fmt: skip
    parts = adapter("torchft").cut(model, fragments)
    together = [p for part in parts for p in part.parameters()]
    assert all(p is q for p, q in zip(together, model.parameters(), strict=True))
    if fragments == 4:
        assert {sum(p.numel() for p in part.parameters()) for part in parts} == {144}
    with pytest.raises(ValueError, match="cannot form 40 fragments"):
        adapter("torchft").cut(model, 40)


def test_peers_are_planned_by_when_they_communicate() -> None:
    """By the steps at which they send, and those at which what was sent is applied."""
    (streaming,) = rivals.find("torchft(12, outer=True, fragments=2, delay=2)").rounds
    assert [step for step in range(1, 25) if streaming.when(step)] == [4, 10, 16, 22]
    assert streaming.delay == 2
    (plain,) = rivals.find("torchft(12, outer=True)").rounds
    assert [step for step in range(1, 25) if plain.when(step)] == [12, 24]
    all_of_it, products = rivals.find("torch-ddp('powersgd', start=3)").rounds
    assert [step for step in range(1, 8) if all_of_it.when(step)] == [1, 2, 3]
    assert [step for step in range(1, 8) if products.when(step)] == [4, 5, 6, 7]
    assert rivals.find("torch-ddp('fp16')").rounds == laconic.ddp()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchft(12, fragments=2)", "are options of DiLoCo: outer=True"),
        (
            "torchft(12, outer=True, fragments=5)",
            "fragments must divide the period of 12, not be 5",
        ),
        ("torchft(12, outer=True, fragments=4, delay=3)", "delay must be less than .* which is 3"),
        ("torchft(12, outer=True, alpha=1.5)", "alpha must"),
        ("torch-ddp('fp8')", "hook must be one of 'none', 'fp16', 'powersgd', not 'fp8'"),
        ("torch-ddp('powersgd', start=1)", "start must be an integer of at least 2"),
    ],
)
def test_an_option_that_a_peer_cannot_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rivals.find(text)


def test_without_namespaces_a_peer_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise runner.NamespacesUnavailable("no")

    def skipped(settings: runner.Settings, cluster: object, text: str, *rest: object) -> object:
        return row(text or NO_COMMUNICATION, (0, 0, 5.0), (3, 1, 2.0)), 7

    monkeypatch.setattr(runner, "Cluster", refuse)
    monkeypatch.setattr(runner, "_row", skipped)
    arguments = ["ddp", "--peer", "torch-ddp", "--workload", "digits", "--repeat", "2"]
    code, ended = compare([*arguments, "--steps", "3"], tmp_path)
    assert code == 0
    assert [(r.recipe, r.status, r.seed) for r in ended.rows] == [
        (NO_COMMUNICATION, "ok", 0), ("ddp", "ok", 0), ("torch-ddp", "absent", 0),
        (NO_COMMUNICATION, "ok", 1), ("ddp", "ok", 1),
    ]  # fmt: skip
    assert "slows only laconic's own messages" in " ".join(capsys.readouterr().out.split())


def test_recipes_with_groups_and_a_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs more than a mean over all: each trains, and has its record."""
    monkeypatch.setattr(runner, "Settings", partial(runner.Settings, baseline=False))
    recipes = ["lsgd(4, local_period=2)", "hierarchical(2, 4)"]
    options = ["--group-size", "2", "--hosts", "4", "--workload", str(WORKLOAD), "--steps", "12"]
    code, ended = compare([*recipes, *options], tmp_path)
    assert code == 0, [r.error for r in ended.rows]
    assert ended.settings["group_size"] == 2
    assert [one.recipe for one in ended.rows] == recipes
    for one in ended.rows:
        first, last = one.curve[0].loss, one.loss
        assert first is not None and last is not None and last < first
        assert one.curve[0].distance == pytest.approx(0.0, abs=1e-6)
        assert one.curve[-1].distance is not None and one.curve[-1].distance > 0
        assert len(one.timeline) == 4 and all(one.timeline)
        sent = sum(rounds.bytes for rounds in one.rounds for _ in rounds.steps())
        assert sent == pytest.approx(12 * one.ledger_bytes_per_step, rel=0.02)


# -- mistakes ----

GOOD = WORKLOAD.read_text()
FILES = {
    "broken.py": "import torch\ndef make(:\n",
    "raises.py": "def make():\n    return 1 / 0\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "lacks.py": "def make():\n    return {'model': 1, 'loss': 2}\n",
    "needs.py": "def make(data):\n    return {}\n",
    "ends.py": GOOD.replace("while True:", "for _ in range(5):"),
    "no_stream.py": GOOD.replace("stream(1 + seed * workers + worker)", "[1, 2]"),
    "empty.py": GOOD.replace("range(8)", "range(0)"),
    "unequal.py": GOOD.replace("[next(stream(0)) for _ in range(8)]",
                               "[next(stream(0)), tuple(t[:5] for t in next(stream(0)))]"),
    "no_model.py": GOOD.replace("lambda: nn.Sequential(", "lambda: list("),
    "vector.py": GOOD.replace("batch[1])", "batch[1], reduction='none')"),
    "detached.py": GOOD.replace("batch[1])", "batch[1]).detach()"),
    "shapes.py": GOOD.replace("nn.Linear(16, 64)", "nn.Linear(17, 64)"),
    "rules.py": "def _hidden(): pass\n",
    "taken.py": "def local_sgd(period): pass\n",
    "odd.py": "def mine(n=1):\n    return n\ndef fails(n):\n    return 1 / n\n",
    "adapter.py": "def peer():\n    return 3\n",
}  # fmt: skip
MISTAKES = {
    "no file": ("--workload nowhere.py:make", "no file nowhere.py"),
    "no function": ("--workload needs.py:mke", "needs.py has no function 'mke': it has make"),
    "syntax": ("--workload broken.py", "broken.py, line 2: SyntaxError: "),
    "exception": ("--workload raises.py", "raises.py, line 2: ZeroDivisionError: division by zero"),
    "exit": ("--workload leaves.py", "leaves.py, line 2: SystemExit: 3"),
    "names": (
        "--workload lacks.py:make",
        "lacks.py:make returned nothing called optimizer (a function (model) that builds its torch "
        "optimizer, at the peak learning rate), batches (a function (worker, workers, seed) that "
        "returns each worker's endless batches), validation (a list of batches of equal size)",
    ),
    "no data": ("--workload needs.py", "needs.py: make needs --data FILE"),
    "data": ("--workload raises.py --data x", "make takes no argument, but --data was given"),
    "ends": ("--workload ends.py", "each worker's endless batches; those of worker 0 end af"),
    "no stream": ("--workload no_stream.py", "it returned [1, 2], which is not an iterator"),
    "empty": (
        "--workload empty.py",
        "validation must be a list of batches of equal size; it has n",
    ),
    "unequal": ("--workload unequal.py", "of equal size; it has batches of 32, 5"),
    "no model": ("--workload no_model.py", "no_model.py, line 12: TypeError: list expected"),
    "vector": ("--workload vector.py", "it returned a tensor of shape (32, 1)"),
    "detached": ("--workload detached.py", "it returned one without a gradient"),
    "shapes": ("--workload shapes.py", "shapes.py, line 15: RuntimeError: mat1 and mat2 shapes"),
    "no rules": ("--rules nowhere.py", "no file nowhere.py"),
    "nothing public": ("--rules rules.py", "rules.py defines no recipe: a public function that"),
    "taken": (
        "--rules taken.py",
        "taken.py defines local_sgd, which laconic already has: rename it",
    ),
    "unknown": (
        "ours() --rules odd.py",
        f"no recipe 'ours' in 'ours()': choose from {', '.join(RECIPES)}, auto, mine, fails",
    ),
    "no rounds": ("mine() --rules odd.py", "mine: must return a tuple of laconic.Round, not 1"),
    "inside": ("fails(0) --rules odd.py", "fails: odd.py, line 4: ZeroDivisionError: division by"),
    "option": ("mine(m=3) --rules odd.py", "mine has no option 'm': its options are n"),
    "peer": ("--peer nobody", f"no peer 'nobody': choose from {', '.join(ADAPTERS)}"),
    "peer's option": (
        "--peer torch-postlocal(perod=3)",
        "no option 'perod' (did you mean 'period'?): its options are start",
    ),
    "peer's value": ("--peer torch-postlocal(period=0)", "period must be an integer of at least 1"),
    "no adapter": ("--peer rules.py", "rules.py has no function 'peer'"),
    "no peer": (
        "--peer adapter.py",
        "adapter.py: peer must return a laconic.lab.race.rivals.Rival, not 3",
    ),
    "twice": ("ddp ddp", "ddp is given twice; --repeat runs everything several times"),
    "host": ("--bandwidth-host 4=1mbit", "there is no host 4: hosts are numbered 0 to 3"),
    "slow host": ("--slow-host 7=2", "there is no host 7: hosts are numbered 0 to 3"),
    "host's rate": ("--bandwidth-host 1=fast", "not a rate: 'fast'"),
    "host's slow rate": ("--bandwidth-host 1=1bit", "bandwidth must be"),
    "no host": ("--bandwidth-host 1mbit", "--bandwidth-host must be HOST=VALUE, such as 2=10mbit"),
    "host twice": ("--slow-host 1=2 --slow-host 1=3", "--slow-host has two values for host 1"),
    "factor": (
        "--slow-host 1=half",
        "not a factor: 'half'; give a number of at least 1, such as 1.5",
    ),
    "fast": ("--slow-host 1=0.5", "must be a finite number at least 1, not 0.5"),
    "no repeat": ("--repeat 0", "repeat must be an integer of at least 1, not 0"),
    "repeat": (
        "--repeat often",
        "a number of runs or a list of seeds, such as 3 or 3,7,11, not 'often'",
    ),
    "seeds alike": ("--repeat 3,3", "seeds must differ from each other: (3, 3)"),
    "seeds and seed": ("--repeat 3,4 --seed 1", "already sets the seeds"),
    "no groups": (
        "hierarchical(2,4)",
        "hierarchical(2,4) has rounds inside groups of workers: give the number of workers per "
        "group, such as --group-size 2",
    ),
    "uneven groups": (
        "hierarchical(2,4) --group-size 3",
        "group-size must divide the number of workers, which is 4, not 3",
    ),
    "empty groups": ("--group-size 0", "group-size must be an integer of at least 1, not 0"),
    "seed": ("--seed=-1", "seed must be an integer of at least 0, not -1"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_starts_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"something was started: {arguments}")

    for name in ("Cluster", "Loopback", "launch"):
        monkeypatch.setattr(runner, name, started)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    user_files.load.cache_clear()  # another directory, the same names
    options, expected = MISTAKES[case]
    words = options.split()
    words += [] if "--workload" in words else ["--workload", "digits"]
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    match = re.fullmatch(r"laconic: (\S.*)\n", said.err)
    assert match and expected in match[1], said.err
    assert not Path("laconic-compare").exists()


def test_peers_without_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rivals, "ADAPTERS", tmp_path / "none")
    with pytest.raises(ValueError, match=r"^no peer 'torch-ddp': .*give a file, such as --peer"):
        rivals.find("torch-ddp")
    assert rivals.find(f"{EXAMPLES.parent}/benchmarks/peers/torch_ddp.py").package == "torch"


def test_batches_that_end_later_are_told(tmp_path: Path) -> None:
    run = worker.Run.__new__(worker.Run)
    run.rank, run._batches = 3, iter([])
    with pytest.raises(ValueError, match="batches of worker 3 ended before step 12: they must be"):
        run._batch(12)


# -- rules ----


def moved(recipe: laconic.Recipe, workers: int = 2) -> list[Tensor]:
    """What one round makes of each worker's numbers."""

    def run(rank: int) -> Tensor:
        model = nn.Linear(64, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        laconic.attach(model, optimizer, recipe)
        with torch.no_grad():
            model.weight.copy_(numbers(rank))
        optimizer.step()
        return model.weight.detach()

    return laconic.simulate(run, workers=workers)


def numbers(rank: int) -> Tensor:
    return torch.arange(64.0).view(1, 64) * (-1) ** rank + rank


def test_the_examples_rules_are_what_they_say() -> None:
    rules = user_files.rules(RULES)
    assert list(rules) == ["sign_pull", "random_half"]
    mean = (numbers(0) + numbers(1)) / 2
    for rank, x in enumerate(moved(parse_recipe("sign_pull(1, size=0.5)", rules))):
        expected = numbers(rank) - 0.5 * torch.sign(numbers(rank) - mean)
        assert torch.equal(x, expected)
    halves = moved(parse_recipe("random_half(1)", rules))
    averaged = halves[0] == mean
    assert 16 < averaged.sum() < 48 and torch.equal(halves[1] == mean, averaged)
    assert torch.equal(halves[1][~averaged], numbers(1)[~averaged])
    nested = parse_recipe("slowmo(random_half(2), period=4)", rules)
    assert [r.when(4) for r in nested] == [False, True] and nested[0].when(2)


# -- a slow host ----


@pytest.mark.parametrize(("pace", "slept"), [(1.0, []), (3.0, [0.8, 1.0])])
def test_a_slow_host_sleeps_in_proportion_to_what_it_computes(
    pace: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock under control: the forward pass takes 0.1 s of processor time and 0.2 s; the
    backward pass as much processor time, and a wait that must not count; the step half of it."""
    wall, busy, sleeps = [0.0], [0.0], []

    def spend(processor: float, seconds: float) -> None:
        busy[0] += processor
        wall[0] += seconds

    def loss(model: nn.Module, batch: object) -> Tensor:
        spend(0.1, 0.2)
        return model(torch.ones(1, 1)).sum()

    def model() -> nn.Module:
        linear = nn.Linear(1, 1, bias=False)
        linear.weight.register_hook(lambda _: spend(0.1, 5.0))
        return linear

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.register_step_post_hook(lambda *_: spend(0.05, 3.0))
        return sgd

    def batches(*which: int) -> Iterator[None]:
        while True:
            yield None

    clock = SimpleNamespace(
        perf_counter=lambda: wall[0], thread_time=lambda: busy[0], sleep=sleeps.append
    )
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(worker.Run, "_link", lambda run: single_link())
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("GROUP_RANK", 1), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    task = Workload("x", model, optimizer, batches, loss, [])  # type: ignore[arg-type]
    run = worker.Run(replace(SPEC, paces=[1.0, pace]), task, ())
    for step in (1, 2):
        run.step(step, step / 10)
    assert sleeps == pytest.approx(slept)


SPEC = worker.Spec(
    recipe="", peer=False, rules=None, group_size=None, workload="", data=None, seconds=None,
    steps=2, seed=0, validations=2, bandwidths=None, latencies=None, paces=[], interface=None,
    timeout=60.0,
)  # fmt: skip


def test_a_throttled_link_has_the_rate_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "world_link", lambda *_: single_link())
    run = worker.Run.__new__(worker.Run)
    run.spec, run.host = replace(SPEC, bandwidths=[1e6, 3e6], latencies=[0.0, 0.02]), 1
    link = run._link()
    assert isinstance(link, Throttled)
    assert (link.bandwidth, link.latency) == (3e6, 0.02)


# -- repeats ----


def runs(name: str, *losses: float, status: str = "ok") -> list[Row]:
    made = [row(name, (0, 0, 5.0), (100, 30, loss), status=status) for loss in losses]  # type: ignore[arg-type]
    return [replace(one, seed=seed) for seed, one in enumerate(made)]


def test_a_summary_is_the_mean_and_the_sample_deviation() -> None:
    assert summary([1.0, 2.0, 6.0]) == Summary(3.0, pytest.approx(math.sqrt(7)), 3)
    assert summary([4.0]) == Summary(4.0, 0.0, 1)
    assert summary([]) is summary([1.0, None]) is summary([1.0, math.inf]) is None


def test_rows_are_grouped_by_recipe_in_their_order() -> None:
    one, two = runs("b", 1.0, 2.0), runs("a", 3.0, 4.0)
    other = replace(one[0], peer=True)
    mixed = [one[0], two[0], other, one[1], two[1]]
    assert grouped(mixed) == [tuple(one), tuple(two), (other,)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((2.3, 2.5), "ddp() and local_sgd(12) are tied at a validation loss of 2.35"),
        ((2.8, 2.9), "ddp() reached the lowest validation loss (2.35), in as many steps as local"),
    ],
)
def test_who_wins_by_less_than_the_spread_is_no_winner(
    second: tuple[float, float], said: str
) -> None:
    rows = [*runs("ddp()", 2.3, 2.4), *runs("local_sgd(12)", *second)]
    text = verdict(result(*rows, seeds=[0, 1]))
    assert said in text
    assert "These are means of 2 runs; recipes that differ by less than the spread" in text


def test_a_recipe_of_which_one_run_diverged_does_not_win() -> None:
    lost = [runs("wild", 1.0, 1.1)[0], *runs("wild", 9.0, status="diverged")]
    rows = [*runs("ddp()", 2.3, 2.4), *runs("local_sgd(12)", 2.8, 2.9), *lost]
    text = verdict(result(*rows))
    assert text.startswith("In 30 s per recipe on this 100 Mbit/s network, ddp() reached")
    assert text.count("wild") == 1 and "not counted: wild diverged" in text
    assert re.search(r"wild .* 1 of 2", rendered(result(*rows), 120))


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shows_means_and_spreads(width: int) -> None:
    shown = result(SILENT, *runs("ddp()", 2.3, 2.5), *runs("slowmo(x)", 2.0, 2.1), seeds=[0, 1])
    text = rendered(shown, width)
    assert re.search(r"^ddp\(\) .*\b2\.40\b", text, re.MULTILINE)
    assert re.search(r"±0\.14\b", text) and re.search(r"±0\.07\b", text)
    assert "± the sample standard deviation" in " ".join(text.split())
    assert all(len(line) <= width for line in text.splitlines())
    assert "waiting" in text


def test_json_keeps_every_run() -> None:
    kept = Result.from_json(result(*runs("ddp()", 2.3, 2.4)).to_json())
    assert [(r.seed, r.loss) for r in kept.rows] == [(0, 2.3), (1, 2.4)]
    fields = json.loads(result(*runs("ddp()", 2.3)).to_json())
    for name in ("seed", "peer"):
        del fields["rows"][0][name]  # as written before there were any
    (old,) = Result.from_json(json.dumps(fields)).rows
    assert (old.seed, old.peer) == (0, False)


def test_a_peer_is_marked_and_shows_what_the_interface_counted() -> None:
    peer = replace(
        row("torch-ddp", (0, 0, 5.0), (100, 30, 2.0)), peer=True,
        ledger_bytes_per_step=math.nan, waiting=math.nan, interface_bytes_per_step=3.21e6,
    )  # fmt: skip
    text = rendered(result(SILENT, *runs("ddp()", 2.4), peer), 120)
    assert re.search(r"^torch-ddp‡ .*\b3\.21 +– *$", text, re.MULTILINE)
    assert "‡ Another library: MB from the interfaces' counters" in " ".join(text.split())
