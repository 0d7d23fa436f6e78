"""What ``laconic compare``, ``laconic lab`` and ``laconic demo`` refuse: in one line, with the
choices, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from laconic.algorithms.recipes import RECIPES
from laconic.cli import main
from laconic.lab.emulation.cluster import Cluster, Loopback
from laconic.lab.race import rivals, user_files

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = (EXAMPLES / "my_workload.py").read_text()
ADAPTERS = "accelerate, fairscale, torch-ddp, torch-postlocal, torchft"
FILES = {
    "file": "abc",
    "broken.py": "import torch\ndef make(:\n",
    "raises.py": "def make():\n    return 1 / 0\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "lacks.py": "def make():\n    return {'model': 1, 'loss': 2}\n",
    "needs.py": "def make(data):\n    return {}\n",
    "ends.py": GOOD.replace("while True:", "for _ in range(5):"),
    "empty.py": GOOD.replace("range(8)", "range(0)"),
    "vector.py": GOOD.replace("batch[1])", "batch[1], reduction='none')"),
    "detached.py": GOOD.replace("batch[1])", "batch[1]).detach()"),
    "shapes.py": GOOD.replace("nn.Linear(16, 64)", "nn.Linear(17, 64)"),
    "rules.py": "def _hidden(): pass\n",
    "taken.py": "def local_sgd(period): pass\n",
    "odd.py": "def mine(n=1):\n    return n\ndef fails(n):\n    return 1 / n\n",
    "adapter.py": "def peer():\n    return 3\n",
}
CHOICES = f"choose from {', '.join(RECIPES)}, auto"
COMPARE = [
    ("sgd(3)", f"(did you mean 'lsgd'?): {CHOICES}"),
    ("ddp slowmo(sgd(3))", CHOICES),
    ("local_sgd(12,perod=3)", "its options are period, delay, codec, optimizer_state"),
    ("local_sgd(0)", "period must be an integer of at least 1, not 0"),
    ("ddp --bandwidth fast", "not a rate: 'fast'; give a positive number with bit"),
    ("ddp --bandwidth 100", "not a rate: '100'; give a positive number with bit, kbit"),
    ("ddp --bandwidth 1bit", "bandwidth must be"),
    ("ddp --latency 5", "not a latency: '5'; give 0, or a positive"),
    ("ddp --latency=-1ms", "with us, ms, s, min, h or d (20ms, 1.5 s)"),
    (
        "ddp --workload imagenet",
        "choose from digits, text, text-small, or your own, such as",
    ),
    ("ddp --workload text --data missing.txt", "missing.txt: No such file"),
    ("ddp --workload text --data .", "Is a directory"),
    ("ddp --workload text --data file", "the training text is too short: it has 3 bytes"),
    ("ddp --data file", "the digits workload uses built-in data"),
    ("ddp --hosts 1000", "hosts must be from 1 to 250, not 1000"),
    ("ddp --per-host 0", "per-host must be an integer of at least 1, not 0"),
    ("ddp --hosts 200 --per-host 10", "2000 workers are too many for 1437 training im"),
    ("ddp --steps 0", "steps must be an integer of at least 1, not 0"),
    ("ddp --seconds inf", "seconds must be a finite number of at least 1"),
    ("diloco(8,quorum=3) --steps 9", "workers take different numbers of steps under diloco(8,quo"),
    ("local_sgd(8,quorum=3) --hosts 2", "at most the number of workers, 2, not 3"),
    ("ddp --steps 3 --out file", "file"),
    ("ddp --steps 3 --out file/below", "file/below"),
    ("ddp --steps 3 --out taken", "taken"),
    ("--workload nowhere.py:make", "no file nowhere.py"),
    ("--workload needs.py:mke", "needs.py has no function 'mke': it has make"),
    ("--workload broken.py", "broken.py, line 2: SyntaxError: "),
    ("--workload raises.py", "raises.py, line 2: ZeroDivisionError: division by zero"),
    ("--workload leaves.py", "leaves.py, line 2: SystemExit: 3"),
    ("--workload lacks.py:make", "returned nothing called optimizer (a function (model) that bui"),
    ("--workload needs.py", "needs.py: make needs --data FILE"),
    ("--workload raises.py --data x", "make takes no argument, but --data was given"),
    ("--workload ends.py", "each worker's endless batches; those of worker 0 end af"),
    ("--workload empty.py", "validation must be a list of batches of equal size"),
    ("--workload vector.py", "it returned a tensor of shape (32, 1)"),
    ("--workload detached.py", "it returned one without a gradient"),
    ("--workload shapes.py", "shapes.py, line 15: RuntimeError: mat1 and mat2 shapes"),
    ("--rules rules.py", "rules.py defines no recipe: a public function that"),
    ("--rules taken.py", "taken.py defines local_sgd, which laconic already has: rename it"),
    ("ours() --rules odd.py", f"{CHOICES}, mine, fails"),
    ("mine() --rules odd.py", "mine: must return a tuple of laconic.Round, not 1"),
    ("fails(0) --rules odd.py", "fails: odd.py, line 4: ZeroDivisionError: division by"),
    ("--peer nobody", f"no peer 'nobody': choose from {ADAPTERS}"),
    ("--peer torch-postlocal(perod=3)", "(did you mean 'period'?): its options are start"),
    ("--peer torch-ddp('fp8')", "hook must be one of 'none', 'fp16', 'powersgd', not 'fp8'"),
    ("--peer torchft(12,fragments=2)", "are options of DiLoCo: outer=True"),
    ("--peer rules.py", "rules.py has no function 'peer'"),
    ("--peer adapter.py", "peer must return a laconic.lab.race.rivals.Rival, not 3"),
    ("ddp ddp", "ddp is given twice; --repeat runs everything several times"),
    ("--bandwidth-host 4=1mbit", "there is no host 4: hosts are numbered 0 to 3"),
    ("--bandwidth-host 1mbit", "--bandwidth-host must be HOST=VALUE, such as 2=10mbit"),
    ("--slow-host 1=2 --slow-host 1=3", "--slow-host has two values for host 1"),
    ("--slow-host 1=0.5", "must be a finite number at least 1, not 0.5"),
    ("--repeat often", "a number of runs or a list of seeds, such as 3 or 3,7,11, not 'often'"),
    ("--repeat 3,3", "seeds must differ from each other: (3, 3)"),
    ("--repeat 3,4 --seed 1", "already sets the seeds"),
    ("hierarchical(2,4)", "has rounds inside groups of workers: give the number of workers per "),
    (
        "hierarchical(2,4) --group-size 3",
        "group-size must divide the number of workers, which is",
    ),
]
RUN = [sys.executable, "-m", "torch.distributed.run"]
LAB: list[tuple[list[str], str]] = [
    ([], "no program given: try laconic lab -- python train.py"),
    (["--", "no-such"], "program not found: 'no-such'"),
    (["--bandwidth", "100", "true"], "not a rate: '100'; give a positive number with"),
    (["--bandwidth-host", "1=10", "true"], "not a rate: '10'"),
    (["--jitter", "5", "true"], "not a latency: '5'"),
    (["--latency", "1min", "true"], "latency must be from 0 to 10 s, not 60.0"),
    (["--latency", "5ms", "--jitter", "6ms", "true"], "jitter must be from 0 to the lat"),
    (["--loss", "2", "true"], "not a share: '2'; give a number from 0 to 1, or one with %"),
    (["--loss", "100%", "true"], "loss must be from 0 to less than 1, not 1.0"),
    (["--loss-host", "9=1%", "true"], "there is no host 9; hosts are numbered 0"),
    (["--bandwidth-host", "x=1mbit", "true"], "not a host: 'x'; give its number"),
    (["--network-seed", "-1", "true"], "the network's seed must be an integer"),
    (["--hosts", "0", "true"], "hosts must be an integer of at least 1, not 0"),
    (["--hosts", "2", "--shell", "2"], "there is no host 2; hosts are numbered 0 to 1"),
    (["--shell", "1@0"], "no lab of process '0' runs here; running labs: "),
    (["--shell", "2", "--", "true"], "give a program or --shell, not both"),
    (["--out", "/dev/null/x", "true"], "cannot create /dev/null/x: Not a directory"),
    (["--", *RUN, "--nnodes", "2", "t.py"], "torchrun's --nnodes 2 differs from the lab's --host"),
    (
        ["--", *RUN, "--standalone", "t.py"],
        "torchrun --standalone isolates each host: leave it",
    ),
    (["--seed", "7", "true"], "--seed is the seed of random kills: give --mtbf"),
    (["--restart", "5s", "true"], "--restart needs faults: give --kill, --hang, --cut or"),
    (["--kill", "4@1s", "true"], "a fault names 4, which does not exist: choose from 0 to 3"),
    (["--cut", "2-2@1s..2s", "true"], "cuts 2 from itself"),
    (["--hang", "1@2s..2s", "true"], "its end must be later"),
    (["--kill", "2@soon", "true"], "not a "),
    (["--cut", "0-x@1s..2s", "true"], "not a "),
]


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with mistakes are here, and nothing may start."""

    def started(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"something was started: {arguments}")

    for kind in (Cluster, Loopback):
        monkeypatch.setattr(kind, "__init__", started)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("taken/results.json").mkdir(parents=True)
    user_files.load.cache_clear()  # another directory, the same names


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["compare", *line.split()], said) for line, said in COMPARE),
        (["compare", ""], "write it as in Python, such as 'local_sgd(12)'"),
        *((["lab", *words], said) for words, said in LAB),
        (["demo", "--seconds", "0"], "seconds must be a finite number of at least"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_starts_nothing(
    words: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    short = words[0] == "compare" and "--workload" not in words
    assert main([*words, *(["--workload", "digits"] if short else [])]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("laconic: ")
    assert message in said.err
    left = {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)}
    assert left == {path for path in before if "__pycache__" not in str(path)}


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("missing", ["rich", "matplotlib", "sklearn"])
def test_a_package_that_is_missing_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["compare", "ddp", "--workload", "digits", "--steps", "3"]) == 2
    said = capsys.readouterr().err
    assert missing.replace("sklearn", "scikit-learn") in said and "pip install" in said


def test_every_adapter_is_found_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row says to install is what make peers installs."""
    pinned = (rivals.ADAPTERS / "requirements.txt").read_text().splitlines()
    assert not any(line.startswith("torch==") for line in pinned)
    for name in ADAPTERS.split(", "):
        peer = rivals.find(name)
        assert (peer.package in pinned or peer.package == "torch") and peer.rounds
    (streaming,) = rivals.find("torchft(12, outer=True, fragments=2, delay=2)").rounds
    assert [s for s in range(1, 25) if streaming.when(s)] == [4, 10, 16, 22], "when they send"
    monkeypatch.setattr(rivals, "ADAPTERS", Path("none"))
    with pytest.raises(ValueError, match=r"^no peer 'torch-ddp': .*give a file, such as --peer"):
        rivals.find("torch-ddp")
