"""Carries out one plan: starts the processes, does the faults, and checks what follows."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from benchmarks.chaos import check, network, shared, worker
from benchmarks.chaos.check import Outcome
from benchmarks.chaos.plan import WORKERS, Fault, Plan
from benchmarks.chaos.shared import DONE, READY, Slot
from laconic.engine.donor import LEFT
from laconic.links.elastic.coordinator import Coordinator
from laconic.links.elastic.leases import RETURN_SECONDS

LIMIT = 80.0
"""Seconds after which a run that does not recover is lost; more than `worker.WAIT`, so that the
workers say what is missing."""
PHASE_SECONDS = 8.0
"""How long to wait for a phase."""
MARGIN = 2.0
"""Seconds beyond a deadline."""
PAST = 3.0
"""How much longer than the deadline something long lasts."""
LONGER = 14.0
"""By how many times a fault's seconds a long stop is longer than it must be, and a cut of the whole
network longer than 15 seconds."""
TICK = 0.01
TWO = "pair", "half", "refused"
"""Cuts in which both workers of a fault are hit."""
PORT = 29400
REMOVED = "the other workers go on without this one"
DONOR_LOST = "the worker that sent its state was lost"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_PR_SET_PDEATHSIG = 1


class LostError(Exception):
    """The run is not what was promised."""


@dataclass
class Process:
    """One worker. ``reasons``: why it may end before the run does, and "hit" if it was stopped or
    cut off in the present fault. ``seen_struck``: the latest `Slot.struck` that was seen."""

    number: int
    place: int
    pid: int
    slot: Slot
    status: int | None = None
    reasons: set[str] = field(default_factory=set)
    seen_struck: float = 0.0


def die_with_parent(parent: int) -> None:
    """End this process when the one that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Run:
    """Carries out ``plan``; files go to ``folder``."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.board = shared.make()
        self.pid = os.getpid()
        network.leave_host()
        self.network = network.Network(WORKERS + 1) if plan.hosts else None
        serving = 0 if plan.embedded else WORKERS
        self.host = self.network.address(serving) if self.network else "127.0.0.1"
        self.processes: list[Process] = []
        self.coordinator, self.served_since = 0, 0.0
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
        code = 1
        try:
            die_with_parent(self.pid)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            descriptor = os.open(self.folder / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if self.network is not None:
                self.network.enter(host)
            work()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(code)

    def start_coordinator(self) -> None:
        """Start it; where it was killed: empty. It waits while a worker serves its address."""

        def serve() -> None:
            while True:
                try:
                    Coordinator(self.host, PORT)
                    signal.pause()
                except OSError:
                    time.sleep(0.2)

        if not self.plan.embedded:
            self.coordinator = self.fork("coordinator", WORKERS, serve)
            self.served_since = time.monotonic()
            self.tell(f"coordinator {self.coordinator}")

    def start_worker(self, place: int) -> Process:
        """Start a worker on the host ``place``."""
        number = len(self.processes)
        assert number < shared.MOST_WORKERS, "a slot for each"
        address = f"{self.host}:{PORT}"
        work = partial(worker.run, self.plan, number, address, self.folder, self.board)
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
            if process.slot.struck > process.seen_struck:
                self._struck(process)
            if ended:
                self._ended(process)
        now = time.monotonic()
        for action in [a for a in self.actions if a[0] <= now]:
            self.actions.remove(action)
            action[1]()
        time.sleep(TICK)

    def _struck(self, process: Process) -> None:
        process.seen_struck = process.slot.struck
        number = signal.Signals(process.slot.signal)
        self.tell(f"worker {process.number} sent itself {number.name}")
        if number == signal.SIGSTOP:
            self.go_on_after(process, self.deadline() + PAST, "silent")
        else:
            process.reasons.add(number.name)

    def _ended(self, process: Process) -> None:
        """Raise `LostError` unless ``process`` may have ended like that."""
        log = (self.folder / f"log-{process.number}").read_text(errors="replace")
        lines = log.strip().splitlines() or ["no message"]
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

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``. Raises `LostError`."""
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end:
                self.hang(f"{what}: not within {LIMIT:g} s")
            self.poll()

    # -- faults ----

    def send(self, process: Process, number: signal.Signals) -> None:
        """Send a signal that ends it."""
        process.reasons.add(number.name)
        self.tell(f"{number.name} to worker {process.number}")
        os.kill(process.pid, number)

    def stop(self, process: Process, seconds: float, *reasons: str) -> None:
        """Stop it for a while."""
        self.tell(f"SIGSTOP to worker {process.number} for {seconds:.2f} s")
        os.kill(process.pid, signal.SIGSTOP)
        self.go_on_after(process, seconds, *reasons)

    def go_on_after(self, process: Process, seconds: float, *reasons: str) -> None:
        """It is stopped, or about to stop itself: continue it later."""
        process.reasons.update(("hit", *reasons))

        def go_on() -> None:
            self.tell(f"SIGCONT to worker {process.number}")
            if process.status is None:
                os.kill(process.pid, signal.SIGCONT)

        self.later(seconds, go_on)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        self.actions.append((time.monotonic() + seconds, action))

    def end_coordinator(self) -> None:
        """Kill it."""
        if self.coordinator:
            os.kill(self.coordinator, signal.SIGKILL)
            os.waitpid(self.coordinator, 0)
            self.coordinator = 0

    def inject(self, fault: Fault) -> None:
        """Begin the fault, up to what happens by itself later."""
        victims = self.living[fault.target], self.living[fault.other]
        lost = 0
        for number, part in enumerate(fault.kind.split(" and ")):
            if number:
                time.sleep(fault.pause)
            bound, more = self.begin(part, victims[number], victims[1], fault)
            self.now.bound, lost = max(self.now.bound, bound), lost + more
        fresh = time.monotonic() - self.served_since < RETURN_SECONDS  # it does not know them yet
        if self.plan.embedded or "coordinator" in fault.kind or fresh:
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
                self.stop(target, fault.seconds)
                return max(bound, fault.seconds + MARGIN), 0
            case ["long", "stop"]:
                both = fault.kind.count("long stop") * deadline
                self.stop(target, both + PAST + LONGER * fault.seconds, "silent")
                return both + MARGIN, 1
            case ["coordinator"]:
                self.end_coordinator()
                self.later(fault.seconds, self.start_coordinator)
                return fault.seconds + MARGIN, 0
            case ["mass", "join"]:
                for place in range(WORKERS, 2 * WORKERS):
                    self.start_worker(place)
                return bound, 0
            case ["late" | "lost" as how, "beats"]:
                disturbance = shared.LATE if how == "late" else shared.SOME_LOST
                self.disturb(self.living, disturbance, fault.seconds)
                return bound, 0
            case ["long", "lost", "beats"]:
                target.reasons.update(("hit", "silent"))
                self.disturb([target], shared.ALL_LOST, long)
            case ["short" | "long" | "whole" as length, *_]:
                lasts = {"short": fault.seconds, "long": long, "whole": 15 + LONGER * fault.seconds}
                seconds, half = lasts[length], part.endswith("half")
                for each in [target, other] if part.endswith(TWO) else [target]:
                    each.reasons.update(("hit", "silent") if length == "long" else ("hit",))
                assert self.network is not None, "on hosts"
                self.network.isolate(part, target.place, other.place)
                self.later(seconds, self.network.heal)
                # TCP sends again at growing intervals
                again = length != "long" or part.endswith(("pair", "peers"))
                return (2 * seconds + MARGIN if again else bound), (length == "long") * (1 + half)
        return bound, 1

    def disturb(self, processes: Sequence[Process], how: int, seconds: float) -> None:
        """Have their messages to the coordinator come late, or not at all, for a while."""

        def change(how: int) -> None:
            for process in processes:
                process.slot.beats = how

        change(how)
        self.later(seconds, partial(change, shared.IN_TIME))

    def carry_out(self, fault: Fault) -> None:
        """Do the fault, and wait until all have recovered. Raises `LostError`."""
        for process in self.processes:
            process.reasons -= {"hit", "silent"}
        self.now = out = Outcome(fault.kind, fault.phase, str(fault))
        self.outcomes.append(out)
        start = self.max_step()
        self.wait_for("steps", lambda: self.max_step() >= start + fault.after)
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
            out.hit = {p.number for p in self.processes if "hit" in p.reasons}
        out.recovered = time.monotonic() - out.begin

    def recover(self, fault: Fault) -> None:
        """Replace workers until all are back and take steps."""
        begun = time.monotonic()
        limit = LIMIT + 2 * self.deadline() + max((at - begun for at, _ in self.actions), default=0)
        since: dict[int, float] = {}
        reached: dict[int, int] = {}  # by worker: one may be faster than others (`pace="own"`)
        # which phases of a newcomer come depends on when it joins
        joining = fault.kind.endswith(("newcomer", "donor")) or "in phase and" in fault.kind
        while (
            not reached or self.actions or any(p.slot.step < reached[p.number] for p in self.living)
        ):
            self.poll()
            now = time.monotonic()
            if now - begun > limit:
                self.hang(f"not recovered within {limit:g} s")
            for place in set(range(WORKERS)) - {p.place for p in self.living}:
                served = self.coordinator or self.network or self.plan.embedded
                # where nobody serves the address, a newcomer on this host would, from then on
                if served and now - since.setdefault(place, now) >= fault.pause:
                    newcomer = self.start_worker(place)
                    newcomer.reasons.add("donor")  # its donor may be the next to be lost
                    del since[place]
            armed = any(p.slot.phase for p in self.living) and not joining
            if not self._all_back() or (armed and now - begun < PHASE_SECONDS):
                reached = {}
            elif not reached:
                reached = {p.number: p.slot.step + 5 for p in self.living}
        for process in self.processes:
            process.reasons.discard("donor")
            process.slot.phase = 0
        if fault.phase and not any(p.slot.struck > self.now.begin for p in self.processes):
            self.now.struck = False
            self.tell("the phase did not come")

    def hang(self, what: str) -> NoReturn:
        """The run does not recover: have the workers log what their threads do, and raise."""
        for process in self.living:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.now.hung = True
        slots = {p.number: (p.slot.stage, p.slot.step, p.slot.workers) for p in self.living}
        raise LostError(f"{what}: stage, step, and workers in view are {slots}")

    def _all_back(self) -> bool:
        living = self.living
        back = not self.actions and len(living) >= WORKERS
        for p in living:
            back &= p.slot.stage == READY and p.slot.workers == len(living)
            back &= p.slot.struck <= p.seen_struck and not p.reasons & {"SIGKILL", "SIGTERM"}
        return back

    # -- the whole ----

    def carry_out_all(self) -> str:
        """Returns what is wrong; empty: nothing."""
        lost = []
        try:
            self.start_coordinator()
            for place in range(WORKERS):
                self.start_worker(place)
            self.wait_for("the start", lambda: self._all_back() and self.max_step() > 3)
            for fault in self.plan.faults:
                self.carry_out(fault)
            self.now = Outcome("end", "", "")
            own = "own" in self.plan.recipe
            self.board.stop = (min if own else max)(p.slot.step for p in self.living) + 100
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
        self.end_coordinator()
        if self.network is not None:
            self.network.close()
