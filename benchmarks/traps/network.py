"""Traps of lost ranks: who is blamed, and how soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.traps import Outcome, Trapped, run_ranks, trap

COMMON = """
import json, os, signal, sys, time
import torch
from torch import nn
import laconic

torch.set_num_threads(1)
rank, culprit = int(os.environ["RANK"]), 1
os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def emit(**what):
    print(json.dumps(what), flush=True)


def build():
    torch.manual_seed(rank)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model, optimizer, steps, act=lambda step: None, pause=0.02):
    for step in range(1, steps + 1):
        act(step)
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(pause)


def report_error(run):
    "Print the error that run() raises, and the machine's time."
    try:
        run()
        emit(error="none", at=time.time())
    except Exception as error:
        ranks = list(getattr(error, "ranks", ()))
        emit(error=type(error).__name__, ranks=ranks, text=str(error), at=time.time())
"""


def reported(outcome: Outcome) -> dict[str, Any]:
    """Return everything that a rank printed, merged."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
    merged: dict[str, Any] = {}
    for line in lines:
        merged.update(json.loads(line))
    return merged


KILLED, HUNG, ABSENT, ISOLATED, ENDED = 2.0, 15.0, 8.0, 30.0, 15.0
"""Seconds within which the others name a rank that was killed, hangs, does not come to
`laconic.attach`, has lost its network, or has ended. Tests allow more, on busy machines."""


def check_blamed(
    outcomes: Sequence[Outcome], culprit: int, seconds: float, what: str
) -> tuple[float, list[str]]:
    """Check that every other rank raised a LinkError that blames the culprit within ``seconds``.

    Returns how long that took, and the messages.
    """
    start = float(reported(outcomes[culprit])["began"])
    took, texts = 0.0, []
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        result = reported(outcome)
        if "error" not in result:
            raise Trapped(f"{what}: rank {rank} still waits or ended with {outcome.last_line}")
        late = result["at"] - start
        if result["error"] != "LinkError":
            raise Trapped(f"{what}: rank {rank} ended with {result['error']} after {late:.1f} s")
        if late > seconds:
            raise Trapped(f"{what}: rank {rank} noticed after {late:.1f} s")
        if result["ranks"] != [culprit]:
            text = result["text"].split(". ")[0]
            raise Trapped(f"{what}: rank {rank} blames {result['ranks'] or 'no rank'}: {text}")
        took = max(took, late)
        texts.append(result["text"])
    return took, texts


_LOADERS = (
    COMMON
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(12 if index == 3 else 0)  # one worker is busy, the others are idle
        return torch.zeros(4)


def act(step):
    if rank == culprit and step == 20:
        emit(began=time.time())
        os.kill(os.getpid(), signal.SIGKILL)


laconic.init()
model, optimizer = build()
period = 2 if sys.argv[1] == "in a round" else 10**6
sync = laconic.attach(model, optimizer, laconic.local_sgd(period), timeout=30.0)
loader = iter(torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=5, prefetch_factor=1))
next(loader)
report_error(lambda: train(model, optimizer, 900, act))
os._exit(0)  # do not wait for its DataLoader workers
"""
)


@trap("a killed rank is named within 2 s, even though its DataLoader workers live on", 320.0)
def killed_with_data_loader() -> str:
    took = {}
    for where in ("in a round", "between rounds"):
        outcomes = run_ranks(_LOADERS, 3, 150.0, arguments=[where], culprit=1)
        took[where], _ = check_blamed(outcomes, 1, KILLED, f"killed {where}")
    return ", ".join(f"{where}: after {seconds:.1f} s" for where, seconds in took.items())


_HANGS = (
    COMMON
    + """
def act(step):
    if rank == culprit and step == 5:
        emit(began=time.time())
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2 and step == 5:
        time.sleep(1.5)  # it starts waiting later, so its timeout ends later


laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=4.0)
report_error(lambda: train(model, optimizer, 20, act))
"""
)


@trap("all ranks blame the rank that hangs, not the one that timed out first", 320.0)
def hung_rank() -> str:
    outcomes = run_ranks(_HANGS, 4, 150.0, culprit=1)
    took, texts = check_blamed(outcomes, 1, HUNG, "stopped")
    if len(set(texts)) > 1:
        raise Trapped(f"the ranks have {len(set(texts))} different verdicts")
    return f"one verdict on all ranks, after {took:.1f} s with a timeout of 4 s"


_ABSENT = (
    COMMON
    + """
model, optimizer = build()
laconic.init()
if rank == culprit:
    time.sleep(3.0)  # by then the others are in attach
    emit(began=time.time())
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)
    os._exit(0)
report_error(
    lambda: laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=float(sys.argv[2]))
)
os._exit(0)
"""
)


@trap("a rank that dies before laconic.attach, or never calls it, is named by all others", 320.0)
def absent_from_attach() -> str:
    killed = run_ranks(_ABSENT, 3, 150.0, arguments=["killed", "25"], culprit=1)
    soon, _ = check_blamed(killed, 1, ABSENT, "killed before attach")
    late = run_ranks(_ABSENT, 3, 150.0, arguments=["sleeps", "4"], culprit=1)
    at_last, _ = check_blamed(late, 1, ABSENT, "never in attach")
    return f"killed: after {soon:.1f} s of 25; never called: after {at_last:.1f} s of 4"


_ISOLATED = (
    COMMON
    + """
import subprocess

del os.environ["GLOO_SOCKET_IFNAME"]


def act(step):
    if rank == culprit and step == 20:
        own_host = os.readlink("/proc/self/ns/net") != os.environ["TRAP_NETWORK"]
        assert own_host, "not on an emulated host"
        emit(began=time.time())
        listed = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
        names = [line.split()[0].split("@")[0] for line in listed.stdout.splitlines()]
        for name in set(names) - {"lo"}:
            subprocess.run(["ip", "link", "set", name, "down"], check=True)


laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(2), timeout=60.0)
report_error(lambda: train(model, optimizer, 10**6, act))
"""
)


def run_hosts(code: str, hosts: int, timeout: float) -> list[Outcome]:
    """Run the program like `run_ranks`, with each rank on an emulated host of its own."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(code)
        lab = [sys.executable, "-m", "laconic", "lab", "--hosts", str(hosts), "--"]
        env = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        env["TRAP_NETWORK"] = os.readlink("/proc/self/ns/net")
        argv = [*lab, sys.executable, str(program)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout)
        outs = {rank: "" for rank in range(hosts)}
        for line in done.stdout.splitlines():
            where, _, text = line.partition(" | ")
            if text and where.rpartition("rank")[2].strip().isdecimal():
                outs[int(where.rpartition("rank")[2])] += text + "\n"
        return [Outcome(done.returncode, outs[rank], done.stderr, 0.0) for rank in range(hosts)]


@trap("a host that has lost its network is named long before the timeout", 200.0)
def isolated_host() -> str:
    took, _ = check_blamed(run_hosts(_ISOLATED, 3, 150.0), 1, ISOLATED, "isolated")
    return f"after {took:.1f} s with a timeout of 60 s"


_ALONE = (
    COMMON
    + """
laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(10**6), timeout=20.0)
train(model, optimizer, 3)
if sys.argv[1] == "finish":
    sync.finish()
emit(began=time.time())
if rank == culprit:
    sys.exit()  # normally
report_error(lambda: train(model, optimizer, 150))
if sys.argv[1] == "a round":
    report_error(lambda: sync.finish())
"""
)


@trap(
    "a rank that ended normally does not fail others that continue alone, until their next round",
    320.0,
)
def ended_in_order() -> str:
    for what in ("finish", "no finish"):
        for rank, outcome in enumerate(run_ranks(_ALONE, 3, 150.0, arguments=[what])):
            if rank != 1 and reported(outcome).get("error") != "none":
                raise Trapped(f"{what}: rank {rank} ended with {reported(outcome)}")
    took, _ = check_blamed(
        run_ranks(_ALONE, 3, 150.0, arguments=["a round"]), 1, ENDED, "in a round"
    )
    return f"150 steps alone; the next round names it, {took:.1f} s after it ended"
