"""Traps of strangers that connect to a rank: what they learn, and what they can do."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.traps import Trapped, run_ranks, trap
from benchmarks.traps.network import COMMON, reported

_STRANGER = (
    COMMON
    + """
import socket
from laconic.links import health

laconic.init()
model, optimizer = build()
sync = laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=20.0)
host, port = health.beacon()._server.getsockname()[:2]
received = b""


def act(step):
    "A stranger on this rank's host reads the beacon's message and answers with a verdict."
    global received
    if rank == 0 and step == 7:
        with socket.create_connection((host, port), timeout=3) as stranger:
            stranger.settimeout(3)
            try:
                received = stranger.recv(65536)
                keys = list(json.loads(received)[1])
                stranger.sendall(json.dumps([keys[-1], "\\x1b[2Jall is lost"]).encode())
                stranger.shutdown(socket.SHUT_WR)
            except (OSError, ValueError):
                pass


report_error(lambda: (train(model, optimizer, 60, act), sync.finish()))
emit(received=len(received))
"""
)


@trap("a stranger that connects to a rank learns nothing and cannot end the run", 320.0)
def stranger_with_a_verdict() -> str:
    outcomes = run_ranks(_STRANGER, 2, 150.0)
    for rank, outcome in enumerate(outcomes):
        result = reported(outcome)
        if result.get("error") != "none":
            raise Trapped(f"rank {rank} ended with {result.get('text', outcome.last_line)!r}")
        if result["received"]:
            raise Trapped(f"a stranger received {result['received']} bytes")
    return "nothing was sent or accepted, and the run continued"


_FUZZ = """
import json, random, socket, sys, time

ports = [int(p) for p in sys.argv[1].split(",")]
total, seconds = int(sys.argv[2]), float(sys.argv[3])
rng, idle, start = random.Random(5), [], time.monotonic()
kinds = ["random", "random", "half-open", "idle", "huge", "drip"]
for n in range(total):
    # Call in bursts, a second with calls and a second without, so that both can be timed.
    due = start + 2 * seconds / total * n
    due += 1.0 - (due - start) % 2.0 if (due - start) % 2.0 >= 1.0 else 0.0
    time.sleep(max(due - time.monotonic(), 0))
    kind = kinds[n % len(kinds)]
    try:
        s = socket.create_connection(("127.0.0.1", ports[n % len(ports)]), timeout=1)
        s.setblocking(False)
        if n % 1000 == 500:  # one that reads first and answers in the same format
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
    COMMON
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
    arguments = [",".join(str(int(p)) for p in ports), str(total), str(seconds)]
    called = subprocess.Popen([sys.executable, sys.argv[1], *arguments], stdout=subprocess.PIPE)
begin = time.monotonic()


def run():
    for step in range(int(sys.argv[4])):
        start = time.perf_counter()
        at = time.monotonic() - begin
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        times.append((at, time.perf_counter() - start))
        if total:  # spread the same number of steps over the time of the calls
            time.sleep(max(begin + step * 2 * seconds / int(sys.argv[4]) - time.monotonic(), 0))
    sync.finish()


report_error(run)
digest = float(sum(p.double().abs().sum() for p in model.parameters()))
calls = int(called.communicate()[0]) if called else 0
emit(times=times, digest=digest, calls=calls)
"""
)


def _fuzzed(calls: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Path(folder, "fuzz.py")
        fuzz.write_text(_FUZZ)
        arguments = [str(fuzz), str(calls), str(seconds), str(steps)]
        outcomes = run_ranks(_FUZZED, 2, 300.0, arguments=arguments)
    results = [reported(outcome) for outcome in outcomes]
    for rank, outcome in enumerate(outcomes):
        if outcome.code != 0 or results[rank].get("error") != "none":
            why = results[rank].get("text", outcome.last_line)
            raise Trapped(f"rank {rank} ended with {outcome.code}: {why!r}")
    return results


@trap("10,000 calls of strangers change neither the result nor the time of a step", 400.0)
def fuzzed_connections() -> str:
    steps, seconds = 5000, 40.0
    undisturbed = _fuzzed(0, seconds, steps)
    disturbed = _fuzzed(10_000, seconds, steps)
    if [r["digest"] for r in disturbed] != [r["digest"] for r in undisturbed]:
        raise Trapped("the model differs")
    times = [(at, took) for r in disturbed for at, took in r["times"] if at > 2.0]
    last = max(at for at, _ in times)
    end = min(last, 2 * seconds)
    during = [took for at, took in times if at < end and at % 2.0 < 1.0]
    between = [took for at, took in times if at < end and at % 2.0 >= 1.0]
    ratio = statistics.median(during) / statistics.median(between)
    if ratio > 1.05:
        raise Trapped(f"steps take {ratio:.3f} times as long during calls")
    calls = disturbed[0]["calls"]
    return f"{calls} calls; a step takes {ratio:.3f} times as long during calls as between them"


_IDLE = (
    COMMON
    + """
import socket, threading
from laconic.links import wire

original = wire.Wire.__init__
idle = []


def strangers(self, *arguments):
    "Connect to every rank's wire as soon as it listens, and send nothing."
    original(self, *arguments)
    at = self._server.getsockname()[:2]
    for _ in range(300):
        idle.append(socket.create_connection(at, timeout=5))


wire.Wire.__init__ = strangers
laconic.init()
model, optimizer = build()
emit(began=time.time())
report_error(lambda: laconic.attach(model, optimizer, laconic.local_sgd(5), timeout=20.0))
"""
)


ATTACH = 8.0
"""Seconds that `laconic.attach` may take beside idle strangers."""


@trap("300 idle strangers at every rank do not delay the ranks' own connections", 320.0)
def idle_strangers() -> str:
    outcomes = run_ranks(_IDLE, 3, 150.0)
    took = 0.0
    for rank, outcome in enumerate(outcomes):
        result = reported(outcome)
        if result.get("error") != "none":
            raise Trapped(f"rank {rank} ended with {result.get('text', outcome.last_line)!r}")
        took = max(took, result["at"] - result["began"])
    if took > ATTACH:
        raise Trapped(f"laconic.attach took {took:.1f} s")
    return f"laconic.attach took {took:.1f} s"
