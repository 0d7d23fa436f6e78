"""Carries out one plan: starts the processes, does the faults, and checks what follows."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.chaos import check, network, worker
from benchmarks.chaos.check import Outcome
from benchmarks.chaos.plan import WORKERS, Fault, Plan
from benchmarks.chaos.shared import (
    ALL_LOST,
    DONE,
    IN_TIME,
    LATE,
    MOST_WORKERS,
    READY,
    SOME_LOST,
    Slot,
    make,
)
from laconic.engine.donor import LEFT
from laconic.links.elastic.coordinator import Coordinator
from laconic.links.elastic.leases import RETURN_SECONDS

LIMIT = 40.0
"""Seconds after which a run that does not recover is lost."""
MARGIN = 2.0
"""Seconds beyond a deadline."""
PAST = 3.0
"""How much longer than the deadline something long lasts."""
TICK = 0.01
PORT = 29400
REMOVED = "the other workers go on without this one"
DONOR_LOST = "the worker that sent its state was lost"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_PR_SET_PDEATHSIG = 1


class LostError(Exception):
    """The run is not what was promised."""


@dataclass
class Process:
    """One worker. ``reasons``: why it may end before the run does."""

    number: int
    place: int
    pid: int
    slot: Slot
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
        serving = 0 if plan.embedded else WORKERS
        self.host = self.network.address(serving) if self.network else "127.0.0.1"
        self.port = PORT if own else PORT + 1 + plan.number % 1000
        self.processes: list[Process] = []
        self.coordinator = 0
        self.actions: list[tuple[float, Callable[[], None]]] = []
        self.story = (folder / "story").open("w", buffering=1)
        self.outcomes: list[Outcome] = []
        self.now = Outcome("start", "", "")

    def tell(self, text: str) -> None:
        """Write down what was done."""
        self.story.write(f"{time.monotonic():.3f} {text}\n")

    # -- processes ----

    def fork(self, log: str, host: int, work: Callable[[], object]) -> int:
        """Do ``work`` in a new process on that host."""
        pid = os.fork()
        if pid:
            return pid
        try:
            die_with_parent(self.pid)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            descriptor = os.open(self.folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if self.network is not None:
                self.network.enter(host)
            work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    def start_coordinator(self) -> None:
        """Start it; where it was killed: empty. It waits while a worker serves its address."""

        def serve() -> None:
            while True:
                try:
                    Coordinator(self.host, self.port)
                    signal.pause()
                except OSError:
                    time.sleep(0.2)

        if not self.plan.embedded:
            self.coordinator = self.fork("coordinator", WORKERS, serve)
            self.tell(f"coordinator {self.coordinator}")

    def start_worker(self, place: int) -> Process:
        """Start a worker on the host ``place``."""
        number = len(self.processes)
        assert number < MOST_WORKERS, "a slot for each"
        plan = self.plan
        job = worker.Job(
            *(number, plan.recipe, f"{self.host}:{self.port}", plan.min_workers, WORKERS),
            *(self.folder, plan.equal, plan.save),
        )
        work = partial(worker.run, job, self.board)
        pid = self.fork(f"log-{number}", place % WORKERS, work)
        process = Process(number, place, pid, self.board.slots[number])
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

    def min_step(self) -> int:
        """The fewest that any living worker has taken."""
        return min(p.slot.step for p in self.living)

    def deadline(self) -> float:
        """The longest of the workers."""
        return max((p.slot.deadline for p in self.living if p.slot.deadline), default=5.0)

    def poll(self) -> None:
        """Look after the processes, and do what is due. Raises `LostError`."""
        for process in self.processes:
            ended = 0
            if process.status is None:
                ended, status = os.waitpid(process.pid, os.WNOHANG)
                process.status = os.waitstatus_to_exitcode(status) if ended else None
            if process.slot.struck and not process.seen_struck:
                self._struck(process)
            if ended:
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
        """Raise `LostError` unless ``process`` may have ended like that."""
        lines = self.log_of(process).strip().splitlines() or ["no message"]
        errors = [line for line in lines if "Error: " in line and process.status == 1]
        last = (errors or lines)[-1]  # other threads may write after the error
        self.tell(f"worker {process.number} ended with {process.status}: {last}")
        status, reasons, stage = process.status, process.reasons, process.slot.stage
        left = (LEFT, 0) if stage == READY else (LEFT, 0, -signal.SIGTERM)
        expected = (
            (status == -signal.SIGKILL and "SIGKILL" in reasons)
            or (status in left and "SIGTERM" in reasons)
            or (status == 1 and REMOVED in last and "silent" in reasons)
            or (status == 1 and DONOR_LOST in last and "donor" in reasons)
            or (status == 0 and stage == DONE)
        )
        if not expected:
            self.now.evicted += REMOVED in last
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
                self.hang(f"{what}: not within {limit:g} s")
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
        victims = self.living[fault.target], self.living[fault.other]
        lost = 0
        for number, part in enumerate(fault.kind.split(" and ")):
            if number:
                time.sleep(fault.pause)
            bound, more = self.begin(part, victims[number], victims[1], fault)
            self.now.bound, lost = max(self.now.bound, bound), lost + more
        if self.plan.embedded or "coordinator" in fault.kind:
            self.now.bound += RETURN_SECONDS + MARGIN
        if WORKERS - lost < (self.plan.min_workers or WORKERS // 2 + 1):
            self.now.bound = float("inf")

    def begin(self, part: str, target: Process, other: Process, fault: Fault) -> tuple[float, int]:
        """Begin a part of a fault. Returns how long a step of others may take, and how many workers
        may be lost at once."""
        deadline = self.deadline()
        bound, long = deadline + MARGIN, deadline + PAST
        match part.split():
            case ["kill" | "term" as how]:
                self.send(target, SIGNALS[how])
            case ["kill" | "term" as how, "all", "but", "one"]:
                for each in self.living:
                    if each is not target:
                        self.send(each, SIGNALS[how])
                return bound, WORKERS - 1
            case [how, "in", "phase"]:
                target.slot.arm(fault.phase, fault.entry, SIGNALS[how])
            case ["kill", "while", "leaving"]:
                target.slot.arm(fault.phase, fault.entry, signal.SIGKILL)
                self.send(target, signal.SIGTERM)
            case [how, "newcomer" | "donor" as whom]:
                newcomer = self.board.slots[len(self.processes)]
                armed = [newcomer] if whom == "newcomer" else [p.slot for p in self.living]
                for slot in armed:
                    slot.arm(fault.phase, fault.entry, SIGNALS[how])
                self.send(target, signal.SIGKILL)
            case ["short", "stop"]:
                self.stop(target, fault.seconds, may_be_lost=False)
                return max(bound, fault.seconds + MARGIN), 0
            case ["long", "stop"]:
                both = fault.kind.count("long stop") * deadline
                self.stop(target, both + PAST, may_be_lost=True)
                return both + MARGIN, 1
            case ["coordinator"]:
                self.kill_coordinator(fault.seconds)
                return fault.seconds + MARGIN, 0
            case ["mass", "join"]:
                for place in range(WORKERS, 2 * WORKERS):
                    self.start_worker(place)
                return bound, 0
            case ["late" | "lost" as how, "beats"]:
                self.disturb(self.living, LATE if how == "late" else SOME_LOST, fault.seconds)
                return bound, 0
            case ["long", "lost", "beats"]:
                target.hit = True
                target.reasons.add("silent")
                self.disturb([target], ALL_LOST, long)
            case ["short" | "long" as length, *_]:
                seconds = fault.seconds if length == "short" else long
                self.isolate(part, target, other, seconds)
                # TCP sends again at growing intervals
                again = length == "short" or part.endswith(("pair", "peers"))
                return (2 * seconds + MARGIN if again else bound), int(length == "long")
        return bound, 1

    def disturb(self, processes: Sequence[Process], how: int, seconds: float) -> None:
        """Have their messages to the coordinator come late, or not at all, for a while."""
        self.tell(f"messages of {[p.number for p in processes]} are disturbed for {seconds:.2f} s")

        def change(how: int) -> None:
            for process in processes:
                process.slot.beats = how

        change(how)
        self.later(seconds, partial(change, IN_TIME))

    def carry_out(self, fault: Fault) -> None:
        """Do the fault, and wait until all have recovered. Raises `LostError`."""
        for process in self.processes:
            process.hit = False
            process.reasons.discard("silent")
        self.now = out = Outcome(fault.kind, fault.phase, str(fault))
        self.outcomes.append(out)
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
            extra = [process for process in self.living if process.place >= WORKERS]
            for process in extra:
                self.send(process, signal.SIGTERM)
            if extra:
                self.recover(fault)
        finally:
            out.hit = {p.number for p in self.processes if p.hit}
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
                self.hang(f"not recovered within {LIMIT:g} s")
            for place in set(range(WORKERS)) - {p.place for p in self.living}:
                if now - since.setdefault(place, now) >= fault.pause:
                    newcomer = self.start_worker(place)
                    newcomer.reasons.add("donor")  # its donor may be the next to be lost
                    del since[place]
            armed = [p for p in self.living if p.slot.phase]
            if self._all_back():
                if reached < 0:
                    reached = self.max_step() + 5
                done = self.min_step() >= reached
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

    def hang(self, what: str) -> NoReturn:
        """The run did not recover."""
        self.dump()
        time.sleep(0.5)
        self.now.hung = True
        raise LostError(f"{what}; {self.where()}")

    def _may_come(self, fault: Fault, now: float, late: float) -> bool:
        """Whether an armed phase can still come."""
        if any(p.slot.struck > self.now.begin for p in self.processes):
            return False
        joining = fault.kind.endswith(("newcomer", "donor")) or "in phase and" in fault.kind
        return not joining and now < late

    def _all_back(self) -> bool:
        living = self.living
        ending = any(
            (p.slot.struck and not p.seen_struck) or p.reasons & {"SIGKILL", "SIGTERM"}
            for p in living
        )
        in_view = (p.slot.stage == READY and p.slot.workers == len(living) for p in living)
        return not (self.actions or ending) and len(living) >= WORKERS and all(in_view)

    # -- the whole ----

    def carry_out_all(self) -> str:
        """Returns what is wrong; empty: nothing."""
        lost = []
        try:
            self.start_coordinator()
            for place in range(WORKERS):
                self.start_worker(place)
            self.wait_for("the start", lambda: self._all_back() and self.min_step() > 3, 60.0)
            for fault in self.plan.faults:
                self.carry_out(fault)
            self.now = Outcome("end", "", "")
            self.board.stop = self.max_step() + 100
            self.wait_for("the end", lambda: not self.living)
        except LostError as error:
            self.tell(f"LOST: {error}")
            self.now.lost = str(error)
            lost.append(str(error))
        finally:
            self.end_all()
        numbers = [p.number for p in self.processes]
        finished = {p.number for p in self.processes if p.slot.stage == DONE}
        wrong = check.times(self.folder, numbers, self.outcomes)
        return "; ".join(lost + wrong + check.bits(self.folder, numbers, finished, self.outcomes))

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

    def summary(self, wrong: str) -> dict[str, Any]:
        """What came of it."""
        return {
            "wrong": wrong,
            "workers": len(self.processes),
            "steps": max((p.slot.step for p in self.processes), default=0),
            "outcomes": self.outcomes,
        }
