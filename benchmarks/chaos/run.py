"""Carries out one plan: starts the processes, does the faults, and checks what follows."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos import network, worker
from benchmarks.chaos.plan import WORKERS, Fault, Plan
from benchmarks.chaos.shared import DONE, MOST_WORKERS, READY, Slot, make
from laconic.engine.donor import LEFT
from laconic.links.elastic.coordinator import Coordinator
from laconic.links.elastic.leases import RETURN_SECONDS

LIMIT = 40.0
"""Seconds after which a run that does not recover is lost."""
START_LIMIT = 60.0
"""The same for the start; more than `worker.WAIT`, so that the workers say what is missing."""
SOFT = 1.0
"""Seconds that a step may take in which a worker was killed. More are counted."""
MARGIN = 2.0
"""Seconds beyond a deadline."""
PAST = 3.0
"""How much longer than the deadline something long lasts."""
TICK = 0.01
PORT = 29400
REMOVED = "the other workers go on without this one"
DONOR_LOST = "the worker that sent its state was lost"
_PR_SET_PDEATHSIG = 1


class LostError(Exception):
    """The run is not what was promised."""


@dataclass
class Outcome:
    """What one fault has done. ``struck``: whether it happened, since a phase may not come.
    ``worst``: the longest step of a survivor, and ``bound``: the longest that is allowed."""

    kind: str
    phase: str
    text: str
    at_step: int = 0
    begin: float = 0.0
    struck: bool = True
    worst: float = 0.0
    bound: float = 0.0
    recovered: float = 0.0
    removed: int = 0
    donor_lost: int = 0
    identical: bool = True
    lost: str = ""


@dataclass
class Process:
    """One worker. ``reasons``: why it may end before the run does."""

    number: int
    place: int
    pid: int
    slot: Slot
    begun: float
    status: int | None = None
    reasons: set[str] = field(default_factory=set)
    hit: bool = False
    """Whether it was stopped or cut off in the present fault."""
    seen_struck: bool = False


def die_with_parent(parent: int) -> None:
    """End this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Run:
    """Carries out ``plan``; files go to ``folder``."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.board = make()
        self.pid = os.getpid()
        own = network.leave_host()
        self.network = network.Network(WORKERS + 1) if plan.hosts and own else None
        self.host = self.network.address(WORKERS) if self.network else "127.0.0.1"
        self.port = PORT if own else PORT + 1 + plan.number % 1000
        self.processes: list[Process] = []
        self.coordinator = 0
        self.actions: list[tuple[float, Callable[[], None]]] = []
        self.story = (folder / "story").open("w", buffering=1)
        self.outcomes: list[Outcome] = []
        self.now = Outcome("start", "", "")
        self.hits: list[set[int]] = []
        """For each fault, the workers that it has stopped, cut off, or ended."""

    def tell(self, text: str) -> None:
        """Write down what was done."""
        self.story.write(f"{time.monotonic():.3f} {text}\n")

    # -- processes ----

    def start_coordinator(self) -> None:
        """Start it; where it was killed: empty."""
        pid = os.fork()
        if pid == 0:
            die_with_parent(self.pid)
            log = os.open(self.folder / "coordinator", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            if self.network is not None:
                self.network.enter(WORKERS)
            Coordinator(self.host, self.port)
            signal.pause()
        self.coordinator = pid
        self.tell(f"coordinator {pid}")

    def start_worker(self, place: int) -> Process:
        """Start a worker on the host ``place``."""
        number = len(self.processes)
        assert number < MOST_WORKERS, "a slot for each"
        plan = self.plan
        job = worker.Job(
            *(number, plan.recipe, f"{self.host}:{self.port}", plan.min_workers, WORKERS),
            *(self.folder, plan.equal, plan.save),
        )
        pid = os.fork()
        if pid == 0:
            die_with_parent(self.pid)
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)
            if self.network is not None:
                self.network.enter(place)
            worker.run(job, self.board)
        process = Process(number, place, pid, self.board.slots[number], time.monotonic())
        self.processes.append(process)
        self.tell(f"worker {number} at {place}: {pid}")
        return process

    @property
    def living(self) -> list[Process]:
        """By place."""
        return sorted((p for p in self.processes if p.status is None), key=lambda p: p.place)

    def max_step(self) -> int:
        """The most steps that any worker has taken."""
        return max(p.slot.step for p in self.processes)

    def deadline(self) -> float:
        """The longest of the workers."""
        return max((p.slot.deadline for p in self.living if p.slot.deadline), default=5.0)

    def poll(self) -> None:
        """Look after the processes, and do what is due. Raises `LostError`."""
        for process in self.processes:
            if process.slot.struck and not process.seen_struck:
                self._struck(process)
            if process.status is None:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    process.status = os.waitstatus_to_exitcode(status)
                    if process.slot.struck and not process.seen_struck:
                        self._struck(process)
                    self._ended(process)
        now = time.monotonic()
        for action in [a for a in self.actions if a[0] <= now]:
            self.actions.remove(action)
            action[1]()
        time.sleep(TICK)

    def _struck(self, process: Process) -> None:
        process.seen_struck = True
        number = signal.Signals(process.slot.signal)
        self.tell(f"worker {process.number} sent itself {number.name}")
        if number == signal.SIGSTOP:
            self._stopped(process, self.deadline() + PAST, may_be_lost=True)
        else:
            process.reasons.add(number.name)

    def _ended(self, process: Process) -> None:
        log = self.log_of(process)
        lines = log.strip().splitlines() or ["no message"]
        errors = [line for line in lines if "Error: " in line and process.status == 1]
        last = (errors or lines)[-1]  # other threads may write after the error
        self.tell(f"worker {process.number} ended with {process.status}: {last}")
        status, reasons = process.status, process.reasons
        if status == -signal.SIGKILL and "SIGKILL" in reasons:
            return
        newcomer = process.slot.stage != READY
        if "SIGTERM" in reasons and status in (LEFT, 0, *([-signal.SIGTERM] if newcomer else [])):
            return
        if status == 1 and REMOVED in last and "silent" in reasons:
            self.now.removed += 1
            return
        if status == 1 and DONOR_LOST in last and "donor" in reasons:
            self.now.donor_lost += 1
            return
        if status == 0 and process.slot.stage == DONE:
            return
        raise LostError(f"worker {process.number} ended with {status}: {last}")

    def log_of(self, process: Process) -> str:
        """What it has written."""
        path = self.folder / f"log-{process.number}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, what: str, condition: Callable[[], bool], limit: float = LIMIT) -> None:
        """Wait until ``condition()``. Raises `LostError`."""
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                self.dump()
                time.sleep(0.5)
                raise LostError(f"{what}: not within {limit:g} s; {self.where()}")
            self.poll()

    def where(self) -> str:
        """What the workers say."""
        return "; ".join(
            f"worker {p.number}: stage {p.slot.stage}, step {p.slot.step}, {p.slot.workers} workers"
            for p in self.living
        )

    # -- faults ----

    def send(self, process: Process, number: signal.Signals) -> None:
        """Send a signal that ends it."""
        process.reasons.add(number.name)
        self.tell(f"{number.name} to worker {process.number}")
        os.kill(process.pid, number)

    def _stopped(self, process: Process, seconds: float, *, may_be_lost: bool) -> None:
        process.hit = True
        if may_be_lost:
            process.reasons.add("silent")

        def go_on() -> None:
            self.tell(f"SIGCONT to worker {process.number}")
            if process.status is None:
                os.kill(process.pid, signal.SIGCONT)

        self.later(seconds, go_on)

    def stop(self, process: Process, seconds: float, *, may_be_lost: bool) -> None:
        """Stop it for a while."""
        self.tell(f"SIGSTOP to worker {process.number} for {seconds:.2f} s")
        os.kill(process.pid, signal.SIGSTOP)
        self._stopped(process, seconds, may_be_lost=may_be_lost)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        self.actions.append((time.monotonic() + seconds, action))

    def kill_coordinator(self, seconds: float) -> None:
        """Kill it, and start it again after a while."""
        self.tell(f"coordinator is killed for {seconds:.2f} s")
        os.kill(self.coordinator, signal.SIGKILL)
        os.waitpid(self.coordinator, 0)
        self.coordinator = 0
        self.later(seconds, self.start_coordinator)

    def isolate(self, kind: str, process: Process, other: Process, seconds: float) -> None:
        """Cut off a host in one of the ways of `benchmarks.chaos.network`."""
        net = self.network
        assert net is not None, "on hosts"
        self.tell(f"{kind}: worker {process.number} ({other.number}) for {seconds:.2f} s")
        long = "long" in kind
        cut_off = [process, other] if "pair" in kind else [process]
        for each in cut_off:
            each.hit = True
            if long:
                each.reasons.add("silent")
        if "cut" in kind:
            net.cut(process.place)
        elif "out" in kind:
            net.drop_out(process.place)
        elif "in" in kind.split():
            net.drop_in(process.place)
        elif "pair" in kind:
            net.drop_between(process.place, other.place)
        else:
            for place in range(WORKERS):
                if place != process.place:
                    net.drop_between(process.place, place)

        def heal() -> None:
            self.tell("the network is whole again")
            net.heal()

        self.later(seconds, heal)

    def inject(self, fault: Fault) -> None:
        """Begin the fault, up to what happens by itself later."""
        kind, living = fault.kind, self.living
        target, other = living[fault.target], living[fault.other]
        deadline = self.deadline()
        long = deadline + PAST
        out = self.now
        out.bound = deadline + MARGIN
        killed = 0
        if kind.startswith(("short one-way", "long one-way", "short cut", "long cut")):
            short = kind.startswith("short")
            seconds = fault.seconds if short else long
            self.isolate(kind, target, other, seconds)
            if short or kind.endswith(("pair", "peers")):  # TCP sends again at growing intervals
                out.bound = 2 * seconds + MARGIN
            killed = not short
        elif kind in ("kill newcomer", "stop newcomer"):
            number = signal.SIGKILL if "kill" in kind else signal.SIGSTOP
            self.board.slots[len(self.processes)].arm(fault.phase, fault.entry, number)
        elif kind in ("kill donor", "stop donor"):
            number = signal.SIGKILL if "kill" in kind else signal.SIGSTOP
            for each in living:
                each.slot.arm(fault.phase, fault.entry, number)
        elif kind == "kill, then kill in phase":
            other.slot.arm(fault.phase, fault.entry, signal.SIGKILL)
            killed = 1
        elif kind == "kill while leaving":
            target.slot.arm(fault.phase, fault.entry, signal.SIGKILL)
        elif kind.endswith("in phase"):
            ends = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
            target.slot.arm(fault.phase, fault.entry, ends[kind.partition(" ")[0]])
        elif "short stop" in kind:
            self.stop(target, fault.seconds, may_be_lost=False)
            out.bound = max(out.bound, fault.seconds + MARGIN)
        elif "two long stops" in kind:
            self.stop(target, 2 * deadline + PAST, may_be_lost=True)
            self.stop(other, 2 * deadline + PAST, may_be_lost=True)
            out.bound, killed = 2 * deadline + MARGIN, 2
        elif "long stop" in kind:
            self.stop(target, long, may_be_lost=True)
            killed = 1
        if "newcomer" in kind or "donor" in kind:
            self.send(target, signal.SIGKILL)
        if kind in ("kill", "kill two", "kill, then kill in phase"):
            self.send(target, signal.SIGKILL)
        if kind in ("term", "term and kill", "kill while leaving"):
            self.send(target, signal.SIGTERM)
        if fault.pause and ("and" in kind or "two" in kind):
            time.sleep(fault.pause)
        if kind in ("kill and short stop", "kill and long stop", "long cut and kill"):
            self.send(other, signal.SIGKILL)
            killed += 1
        if kind in ("kill two", "term and kill"):
            self.send(other, signal.SIGKILL)
            killed = 2
        if kind == "kill and coordinator":
            self.send(target, signal.SIGKILL)
        if "coordinator" in kind:
            self.kill_coordinator(fault.seconds)
            out.bound = max(out.bound, fault.seconds + 2 * MARGIN + RETURN_SECONDS)
        least = self.plan.min_workers or WORKERS // 2 + 1
        if WORKERS - killed < least:
            out.bound = float("inf")

    def carry_out(self, fault: Fault) -> None:
        """Do the fault, and wait until all have recovered. Raises `LostError`."""
        for process in self.processes:
            process.hit = False
            process.reasons.discard("silent")
        self.now = out = Outcome(fault.kind, fault.phase, str(fault))
        self.outcomes.append(out)
        self.hits.append(set())
        start = self.max_step()
        self.wait_for("steps", lambda: self.max_step() >= start + fault.after)
        if "long" in fault.kind or "stop" in fault.kind:
            end = time.monotonic() + 3.0
            while self.deadline() > 5.0 and time.monotonic() < end:
                self.poll()
        out.at_step, out.begin = self.max_step(), time.monotonic()
        self.tell(f"-- fault {len(self.outcomes)}: {fault}")
        try:
            self.inject(fault)
            self.recover(fault)
        finally:
            self.hits[-1] = {p.number for p in self.processes if p.hit}
        out.recovered = time.monotonic() - out.begin

    def recover(self, fault: Fault) -> None:
        """Replace workers until all are back and take steps."""
        end = time.monotonic() + LIMIT
        since: dict[int, float] = {}
        reached = -1
        late = time.monotonic() + 8.0
        patience = time.monotonic() + min(self.now.bound + 3.0 + PAST, LIMIT - 5.0)
        while True:
            self.poll()
            now = time.monotonic()
            if now > patience:
                self.dump()
                patience = float("inf")
            if now > end:
                raise LostError(f"not recovered within {LIMIT:g} s; {self.where()}")
            for place in set(range(WORKERS)) - {p.place for p in self.living}:
                if now - since.setdefault(place, now) >= fault.pause:
                    newcomer = self.start_worker(place)
                    newcomer.reasons.add("donor")  # its donor may be the next to be lost
                    del since[place]
            armed = [p for p in self.living if p.slot.phase]
            if self._all_back():
                if reached < 0:
                    reached = self.max_step() + 5
                done = min(p.slot.step for p in self.living) >= reached
                if done and not (armed and self._may_come(fault, now, late)):
                    break
            else:
                reached = -1
        for process in self.processes:
            process.reasons.discard("donor")
            process.slot.disarm()
        if fault.phase and not any(p.slot.struck > self.now.begin for p in self.processes):
            self.now.struck = False
            self.tell("the phase did not come")

    def dump(self) -> None:
        """Have the workers write what their threads do into their logs."""
        self.tell(f"stalled: {self.where()}")
        for process in self.living:
            os.kill(process.pid, signal.SIGUSR1)

    def _may_come(self, fault: Fault, now: float, late: float) -> bool:
        """Whether an armed phase can still come."""
        if any(p.slot.struck > self.now.begin for p in self.processes):
            return False
        joining = (
            "newcomer" in fault.kind or "donor" in fault.kind or fault.kind.startswith("kill,")
        )
        return not joining and now < late

    def _all_back(self) -> bool:
        living = self.living
        ending = any(
            (p.slot.struck and not p.seen_struck) or p.reasons & {"SIGKILL", "SIGTERM"}
            for p in living
        )
        return (
            not (self.actions or ending)
            and len(living) == WORKERS
            and all(p.slot.stage == READY and p.slot.workers == WORKERS for p in living)
        )

    # -- the whole ----

    def carry_out_all(self) -> str:
        """Returns what is wrong; empty: nothing."""
        try:
            self.start_coordinator()
            for place in range(WORKERS):
                self.start_worker(place)
            started = lambda: self._all_back() and min(p.slot.step for p in self.living) > 3  # noqa: E731
            self.wait_for("the start", started, START_LIMIT)
            for fault in self.plan.faults:
                self.carry_out(fault)
            self.now = Outcome("end", "", "")
            self.board.stop = self.max_step() + 100
            self.wait_for("the end", lambda: not self.living)
        except LostError as lost:
            self.tell(f"LOST: {lost}")
            self.now.lost = str(lost)
            self.end_all()
            self._weigh()
            return str(lost)
        except OSError as error:
            self.end_all()
            return f"the benchmark failed: {error}"
        self.end_all()
        wrong = self._weigh()
        return wrong

    def end_all(self) -> None:
        """Leave no process."""
        for process in self.living:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.status = -9
        if self.coordinator:
            os.kill(self.coordinator, signal.SIGKILL)
            os.waitpid(self.coordinator, 0)
            self.coordinator = 0

    # -- checks ----

    def _events(self, process: Process) -> list[dict[str, Any]]:
        path = self.folder / f"events-{process.number}"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _weigh(self) -> str:
        """Compare times and digests. Returns what is wrong."""
        wrong = []
        events = {p.number: self._events(p) for p in self.processes}
        begins = [o.begin for o in self.outcomes] + [float("inf")]
        for index, (out, after) in enumerate(zip(self.outcomes, begins[1:], strict=True)):
            for number, lines in events.items():
                if number in self.hits[index] or not out.begin:
                    continue
                for line in lines:
                    if line["event"] != "slow":
                        continue
                    # what lies before the fault, or after the next, is not its doing
                    end = min(line["begin"] + line["seconds"], after or float("inf"))
                    out.worst = max(out.worst, end - max(line["begin"], out.begin))
            if out.worst > out.bound and out.struck:
                wrong.append(
                    f"{out.text}: a step took {out.worst:.1f} s of at most {out.bound:.1f} s"
                )
        wrong += self._compare_digests()
        final = defaultdict(list)
        for number, lines in events.items():
            for line in lines:
                if line["event"] == "done":
                    final[line["digest"]].append(number)
        if len(final) > 1:
            wrong.append(f"the models differ at the end: {dict(final)}")
            self.outcomes[-1].identical = False
        return "; ".join(wrong)

    def _compare_digests(self) -> list[str]:
        found: dict[int, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
        for process in self.processes:
            path = self.folder / f"digests-{process.number}"
            data = path.read_bytes() if path.exists() else b""
            records = list(struct.iter_unpack("q8s", data[: len(data) // 16 * 16]))
            if process.slot.stage != DONE:
                records = records[:-1]  # what a lost worker did last need not be what others did
            for step, digest in records:
                found[step][digest].append(process.number)
        different = sorted(step for step, digests in found.items() if len(digests) > 1)
        if not different:
            return []
        for step in different:
            for out in reversed(self.outcomes):
                if out.at_step <= step:
                    out.identical = False
                    break
        first = different[0]
        groups = list(found[first].values())
        return [f"after step {first}, the models differ: workers {groups} ({len(different)} steps)"]


def summary(run: Run, wrong: str) -> dict[str, Any]:
    """For the result file."""
    return {
        "plan": run.plan.number,
        "wrong": wrong,
        "workers": len(run.processes),
        "steps": run.max_step() if run.processes else 0,
        "outcomes": [asdict(o) for o in run.outcomes],
    }
