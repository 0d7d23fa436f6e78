"""Ranks that are lost, and strangers that call: who is named, how soon, what a stranger can do."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.traps import Outcome, Trapped, run_ranks, trap

_COMMON = """
import json, os, signal, sys, time
import torch
from torch import nn
import laconic

torch.set_num_threads(1)
rank, culprit = int(os.environ["RANK"]), 1
os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def say(**what):
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


def watched(run):
    "What run() raises, and when; the time is that of the machine."
    try:
        run()
        say(error="none", at=time.time())
    except Exception as error:
        ranks = list(getattr(error, "ranks", ()))
        say(error=type(error).__name__, ranks=ranks, text=str(error), at=time.time())
"""


def _said(outcome: Outcome) -> dict[str, Any]:
    """All that a rank said, in one."""
    lines = [line for line in outcome.out.splitlines() if line.startswith("{")]
    merged: dict[str, Any] = {}
    for line in lines:
        merged.update(json.loads(line))
    return merged


def _check_named(
    outcomes: Sequence[Outcome], culprit: int, seconds: float, what: str
) -> tuple[float, list[str]]:
    """That every rank but the culprit raised a LinkError that blames it, within ``seconds`` of what
    it did; returns how long that took, and the messages."""
    began = float(_said(outcomes[culprit])["began"])
    took, texts = 0.0, []
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        said = _said(outcome)
        if "error" not in said:
            raise Trapped(f"{what}: rank {rank} still waits or ended with {outcome.last_line}")
        late = said["at"] - began
        if said["error"] != "LinkError":
            raise Trapped(f"{what}: rank {rank} ended with {said['error']} after {late:.1f} s")
        if late > seconds:
            raise Trapped(f"{what}: rank {rank} noticed after {late:.1f} s")
        if said["ranks"] != [culprit]:
            text = said["text"].split(". ")[0]
            raise Trapped(f"{what}: rank {rank} blames {said['ranks'] or 'nobody'}: {text}")
        took = max(took, late)
        texts.append(said["text"])
    return took, texts


_LOADERS = (
    _COMMON
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(12 if index == 3 else 0)  # one worker is busy, the others are idle
        return torch.zeros(4)


def act(step):
    if rank == culprit and step == 20:
        say(began=time.time())
        os.kill(os.getpid(), signal.SIGKILL)


laconic.init()
model, optimizer = build()
period = 2 if sys.argv[1] == "in a round" else 10**6
sync = laconic.attach(model, optimizer, laconic.local_sgd(period), timeout=30.0)
loader = iter(torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=5, prefetch_factor=1))
next(loader)
watched(lambda: train(model, optimizer, 900, act))
os._exit(0)  # its own workers do not hold it up
"""
)


@trap("a rank that is killed is named within 2 s, though its DataLoader's workers live on", 320.0)
def killed_with_data_loader() -> str:
    took = {}
    for where in ("in a round", "between rounds"):
        outcomes = run_ranks(_LOADERS, 3, 150.0, arguments=[where], culprit=1)
        took[where], _ = _check_named(outcomes, 1, 2.0, f"killed {where}")
    return ", ".join(f"{where}: after {seconds:.1f} s" for where, seconds in took.items())


_HANGS = (
    _COMMON
    + """
def act(step):
    if rank == culprit and step == 5:
        say(began=time.time())
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2 and step == 5:
        time.sleep(1.5)  # it comes later, and its time-out ends later


laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=4.0)
watched(lambda: train(model, optimizer, 20, act))
"""
)


@trap("all ranks blame the one that hangs, and not the one that gave up first", 320.0)
def hung_rank() -> str:
    outcomes = run_ranks(_HANGS, 4, 150.0, culprit=1)
    took, texts = _check_named(outcomes, 1, 15.0, "stopped")
    if len(set(texts)) > 1:
        raise Trapped(f"the ranks have {len(set(texts))} verdicts")
    return f"one verdict on all ranks, after {took:.1f} s with a time-out of 4 s"


_ABSENT = (
    _COMMON
    + """
model, optimizer = build()
laconic.init()
if rank == culprit:
    time.sleep(3.0)  # the others have come to attach
    say(began=time.time())
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)
    os._exit(0)
watched(lambda: laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=float(sys.argv[2])))
os._exit(0)
"""
)


@trap("a rank that dies before laconic.attach, or never comes to it, is named by all others", 320.0)
def absent_from_attach() -> str:
    killed = run_ranks(_ABSENT, 3, 150.0, arguments=["killed", "25"], culprit=1)
    soon, _ = _check_named(killed, 1, 8.0, "killed before attach")
    late = run_ranks(_ABSENT, 3, 150.0, arguments=["sleeps", "4"], culprit=1)
    at_last, _ = _check_named(late, 1, 8.0, "never in attach")
    return f"killed: after {soon:.1f} s of 25; never came: after {at_last:.1f} s of 4"


_ISOLATED = (
    _COMMON
    + """
import subprocess

del os.environ["GLOO_SOCKET_IFNAME"]


def act(step):
    if rank == culprit and step == 20:
        assert os.readlink("/proc/self/ns/net") != os.environ["TRAP_NETWORK"], "a host of its own"
        say(began=time.time())
        listed = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
        names = [line.split()[0].split("@")[0] for line in listed.stdout.splitlines()]
        for name in set(names) - {"lo"}:
            subprocess.run(["ip", "link", "set", name, "down"], check=True)


laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(2), timeout=60.0)
watched(lambda: train(model, optimizer, 10**6, act))
"""
)


def run_hosts(code: str, hosts: int, timeout: float) -> list[Outcome]:
    """As `run_ranks`, each rank on an emulated host of its own."""
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


@trap("a host that nothing reaches any more is named long before the time-out", 200.0)
def isolated_host() -> str:
    took, _ = _check_named(run_hosts(_ISOLATED, 3, 150.0), 1, 30.0, "isolated")
    return f"after {took:.1f} s with a time-out of 60 s"


_STRANGER = (
    _COMMON
    + """
import socket
from laconic.links import health

laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=20.0)
host, port = health.beacon()._server.getsockname()[:2]
heard = b""


def act(step):
    "A stranger on this rank's host reads what the beacon says, and answers with a verdict."
    global heard
    if rank == 0 and step == 7:
        with socket.create_connection((host, port), timeout=3) as stranger:
            stranger.settimeout(3)
            try:
                heard = stranger.recv(65536)
                keys = list(json.loads(heard)[1])
                stranger.sendall(json.dumps([keys[-1], "\\x1b[2Jall is lost"]).encode())
                stranger.shutdown(socket.SHUT_WR)
            except (OSError, ValueError):
                pass


watched(lambda: (train(model, optimizer, 60, act), sync.finish()))
say(heard=len(heard))
"""
)


@trap("a stranger that calls a rank learns nothing and cannot end the run", 320.0)
def stranger_with_a_verdict() -> str:
    outcomes = run_ranks(_STRANGER, 2, 150.0)
    for rank, outcome in enumerate(outcomes):
        said = _said(outcome)
        if said.get("error") != "none":
            raise Trapped(f"rank {rank} ended with {said.get('text', outcome.last_line)!r}")
        if said["heard"]:
            raise Trapped(f"a stranger was told {said['heard']} bytes")
    return "nothing was told or taken, the run went on"


_FUZZ = """
import json, random, socket, sys, time

ports = [int(p) for p in sys.argv[1].split(",")]
total, seconds = int(sys.argv[2]), float(sys.argv[3])
rng, idle, start = random.Random(5), [], time.monotonic()
kinds = ["random", "random", "half-open", "idle", "huge", "drip"]
for n in range(total):
    # in bursts: a second of calls, a second of peace, so that both can be timed in alternation
    due = start + 2 * seconds / total * n
    due += 1.0 - (due - start) % 2.0 if (due - start) % 2.0 >= 1.0 else 0.0
    time.sleep(max(due - time.monotonic(), 0))
    kind = kinds[n % len(kinds)]
    try:
        s = socket.create_connection(("127.0.0.1", ports[n % len(ports)]), timeout=1)
        s.setblocking(False)
        if n % 1000 == 500:  # one that listens first, and answers in kind
            s.settimeout(3)
            keys = list(json.loads(s.recv(65536))[1])
            s.sendall(json.dumps([keys[-1], "\\x1b[2Jall is lost"]).encode())
            s.shutdown(socket.SHUT_WR)
        elif kind == "random":
            s.send(rng.randbytes(rng.randrange(1, 200)))
        if kind == "huge":
            s.send(b"laconic1" + rng.randbytes(2**17))
        if kind == "drip":
            s.send(b"l")
        if kind == "half-open":
            s.shutdown(socket.SHUT_WR)
        if kind in ("idle", "drip"):
            idle.append(s)
        else:
            s.close()
    except (OSError, ValueError):
        pass
    if len(idle) > 200:
        idle.pop(0).close()
print(n + 1, flush=True)
"""

_FUZZED = (
    _COMMON
    + """
import socket, subprocess
from laconic.links import health

laconic.init()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = laconic.attach(model, optimizer, laconic.local_sgd(10), timeout=20.0)
port = torch.tensor([health.beacon()._server.getsockname()[1]])
ports = [torch.zeros_like(port) for _ in range(2)]
torch.distributed.all_gather(ports, port)
torch.distributed.barrier()
called, times = None, []
total, seconds = int(sys.argv[2]), float(sys.argv[3])
if rank == 0 and total:
    given = [",".join(str(int(p)) for p in ports), str(total), str(seconds)]
    called = subprocess.Popen([sys.executable, sys.argv[1], *given], stdout=subprocess.PIPE)
begin = time.monotonic()


def run():
    for step in range(int(sys.argv[4])):
        start = time.perf_counter()
        at = time.monotonic() - begin
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        times.append((at, time.perf_counter() - start))
        if total:  # as many steps in any case, over the time in which strangers call
            time.sleep(max(begin + step * 2 * seconds / int(sys.argv[4]) - time.monotonic(), 0))
    sync.finish()


watched(run)
digest = float(sum(p.double().abs().sum() for p in model.parameters()))
calls = int(called.communicate()[0]) if called else 0
say(times=times, digest=digest, calls=calls)
"""
)


def _fuzzed(calls: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Path(folder, "fuzz.py")
        fuzz.write_text(_FUZZ)
        arguments = [str(fuzz), str(calls), str(seconds), str(steps)]
        outcomes = run_ranks(_FUZZED, 2, 300.0, arguments=arguments)
    said = [_said(outcome) for outcome in outcomes]
    for rank, outcome in enumerate(outcomes):
        if outcome.code != 0 or said[rank].get("error") != "none":
            why = said[rank].get("text", outcome.last_line)
            raise Trapped(f"rank {rank} ended with {outcome.code}: {why!r}")
    return said


@trap(
    "10,000 calls of strangers change nothing: neither the result nor how long a step takes", 400.0
)
def fuzzed_connections() -> str:
    steps, seconds = 5000, 40.0
    undisturbed = _fuzzed(0, seconds, steps)
    disturbed = _fuzzed(10_000, seconds, steps)
    if [said["digest"] for said in disturbed] != [said["digest"] for said in undisturbed]:
        raise Trapped("the model is another one")
    times = [(at, took) for said in disturbed for at, took in said["times"] if at > 2.0]
    last = max(at for at, _ in times)
    end = min(last, 2 * seconds)
    during = [took for at, took in times if at < end and at % 2.0 < 1.0]
    between = [took for at, took in times if at < end and at % 2.0 >= 1.0]
    ratio = statistics.median(during) / statistics.median(between)
    if ratio > 1.05:
        raise Trapped(f"steps take {ratio:.3f} times as long while strangers call")
    calls = disturbed[0]["calls"]
    return f"{calls} calls; a step takes {ratio:.3f} times as long while they come as between them"


_IDLE = (
    _COMMON
    + """
import socket, threading
from laconic.links import wire

made = wire.Wire.__init__
idle = []


def strangers(self, *given):
    "Call every rank's wire as soon as it listens, and say nothing."
    made(self, *given)
    at = self._server.getsockname()[:2]
    for _ in range(300):
        idle.append(socket.create_connection(at, timeout=5))


wire.Wire.__init__ = strangers
laconic.init()
model, optimizer = build()
say(began=time.time())
watched(lambda: laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=20.0))
"""
)


@trap("300 idle strangers at every rank do not delay the ranks' own connections", 320.0)
def idle_strangers() -> str:
    outcomes = run_ranks(_IDLE, 3, 150.0)
    took = 0.0
    for rank, outcome in enumerate(outcomes):
        said = _said(outcome)
        if said.get("error") != "none":
            raise Trapped(f"rank {rank} ended with {said.get('text', outcome.last_line)!r}")
        took = max(took, said["at"] - said["began"])
    if took > 8.0:
        raise Trapped(f"laconic.attach took {took:.1f} s")
    return f"laconic.attach took {took:.1f} s"


_ALONE = (
    _COMMON
    + """
laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(10**6), timeout=20.0)
train(model, optimizer, 3)
if sys.argv[1] == "finish":
    sync.finish()
say(began=time.time())
if rank == culprit:
    sys.exit()  # in order
watched(lambda: train(model, optimizer, 150))
if sys.argv[1] == "a round":
    watched(lambda: sync.finish())
"""
)


@trap(
    "a rank that ended in order does not fail those that go on alone, until their next round", 320.0
)
def ended_in_order() -> str:
    for what in ("finish", "no finish"):
        for rank, outcome in enumerate(run_ranks(_ALONE, 3, 150.0, arguments=[what])):
            if rank != 1 and _said(outcome).get("error") != "none":
                raise Trapped(f"{what}: rank {rank} ended with {_said(outcome)}")
    took, _ = _check_named(
        run_ranks(_ALONE, 3, 150.0, arguments=["a round"]), 1, 15.0, "in a round"
    )
    return f"150 steps alone; the next round names it, {took:.1f} s after it ended"
