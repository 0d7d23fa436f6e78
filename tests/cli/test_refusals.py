"""What the commands refuse: in one line, with the remedy, before anything is started or written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from laconic.advisor.plan import fields
from laconic.cli import main
from laconic.lab.emulation.cluster import Cluster, Loopback
from laconic.lab.race import report

from tests.support.races import FULL

CLUSTER = fields.EXAMPLE

FILES: dict[str, str | bytes] = {
    "text": "{\n",
    "empty/a": "",
    # workloads, rules and adapters
    "raises.py": "def make():\n    return 1 / 0\n",
    "needs.py": "def make(data):\n    return {}\n",
    "taken.py": "def local_sgd(period): pass\n",
    "odd.py": "def mine(n=1):\n    return n\n",
    # clusters
    "rate.yaml": CLUSTER.replace("500mbit ", "500mbut "),
    "field.yaml": CLUSTER.replace("    bandwidth: 1gbit", "    bandwith: 1gbit", 1),
    "syntax.yaml": CLUSTER.replace("sites:", "sites: ["),
    "bytes.yaml": b"step_time: 1\xff",
}
BASE = {
    "COMPARE": "compare --workload digits",
    "ADVISE": "advise --params 1M --step-time 1s --bandwidth 1gbit --latency 9ms --workers 2",
    "PLAN": "plan --workers 4 --bandwidth 100mbit --params 2m --steps 64",
    "HOSTS": "doctor --master h:1 --rank 0 --hosts 2",
}
"""Commands that lack nothing. An option that a line repeats replaces the one here."""
REFUSED = r"""
advice : argument COMMAND: invalid choice:
plan --rate=1mbit : unrecognized arguments: --rate=1mbit
report : the following arguments are required: DIR; see laconic report --help
compare ddp --seconds 3 --steps 4 : not allowed with argument
COMPARE sgd(3) : (did you mean 'lsgd'?): choose from ddp,
COMPARE ddp( : write it as in Python
COMPARE local_sgd(12,perod=3) : its options are period, delay
COMPARE local_sgd(0) : period must be an integer of at least 1, not 0
COMPARE ddp --bandwidth 100 : not a rate: '100'; give a positive number with bit, kbit
COMPARE ddp --hosts 1000 : hosts must be from 1 to 250, not 1000
COMPARE diloco(8,quorum=3) --steps 9 : workers take different numbers of steps
COMPARE ddp ddp : given twice; --repeat
COMPARE ddp --lr-scale 0 : lr-scale must be
COMPARE --bandwidth 4=1mbit : there is no host 4
compare --workload nowhere.py:make : no file nowhere.py
compare --workload needs.py:mke : no function 'mke': it has make
compare --workload raises.py : raises.py, line 2: ZeroDivisionError
COMPARE --rules taken.py : which laconic already has: rename it
COMPARE mine() --rules odd.py : must return a tuple of laconic.Round
COMPARE --peer nobody : choose from accelerate, fairscale, hivemind, torch-ddp, torch-postlocal
lab : no program given
lab -- no-such : program not found
lab --latency 5ms --jitter 6ms true : jitter must be
lab --seed 7 true : is the seed of --jitter and --loss
lab -- PYTHON -m torch.distributed.run --nnodes 2 t.py : in place of torchrun's --nnodes
lab --kill 4@1s true : choose from 0 to 3
advise : --params, --step-time, --bandwidth, --workers
ADVISE --params many : not a count: 'many'
ADVISE locl_sgd(3) : no recipe 'locl_sgd' in 'locl_sgd(3)' (did you mean
ADVISE diloco(4,quorum=3) : at most the number of workers, 2, not 3
ADVISE --json --all : leave out --all
PLAN --bandwidth 100mbut : --bandwidth: not a rate
PLAN --loss 1% : --loss has no effect without --latency
PLAN --mtbf 1d hierarchical(4,8) : has rounds inside groups
plan --workers 8 : plan also needs --bandwidth, --params, or --cluster FILE
plan --example --workers 8 : --example prints a file, and nothing else
plan --example ddp() : --example prints a file, and nothing else
plan --cluster rate.yaml : rate.yaml: sites[0].uplink: not a rate
plan --cluster field.yaml : unknown field sites[0].bandwith (did you mean 'bandwidth'?)
plan --cluster syntax.yaml : syntax.yaml, line
plan --cluster bytes.yaml : is not a text file in UTF-8
doctor --master h:1 --rank 0 : belong together
coordinator --address 192.0.2.1:29400 : cannot listen at 192.0.2.1:29400
keys new --days 0 : --days: not a count: '0'
report nowhere : cannot read a result from nowhere
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    report.save(FULL, folder / "good")
    report.save(FULL, folder / "second")
    return folder


def tree(folder: Path) -> dict[Path, bytes]:
    """All files, but what Python keeps for later."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.read_bytes() for path in files}


def command(line: str) -> list[str]:
    name, *words = line.replace("PYTHON", sys.executable).split()
    base, *pairs = BASE.get(name, name).split()
    options = dict(zip(pairs[::2], pairs[1::2], strict=True))
    given = [word for option in options.items() if option[0] not in words for word in option]
    return [base, *given, *words]


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_mistake_is_one_line_and_starts_nothing(
    line: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was started")

    for kind in (Cluster, Loopback):
        monkeypatch.setattr(kind, "__init__", started)
    monkeypatch.chdir(files)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    words, _, remedy = line.partition(" : ")
    before = tree(files)
    try:
        code: object = main(command(words))
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1, said
    assert said.err.startswith("laconic") and remedy.strip() in said.err
    assert tree(files) == before


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("rich", "COMPARE ddp --steps 3"),
        ("sklearn", "COMPARE ddp --steps 3"),
        ("yaml", "plan --cluster rate.yaml"),
        ("cryptography", "keys keys"),
    ],
)
def test_a_package_that_is_missing_is_named(
    package: str,
    line: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "laconic.cli.authority", raising=False)
    assert main(command(line)) == 2
    said = capsys.readouterr().err.lower()
    assert {"sklearn": "scikit-learn"}.get(package, package) in said and "pip install" in said
    assert said.count("\n") == 1 and not (files / "keys").exists()
