"""Hosts that look at each other: who is there, who reaches whom, with which clock and versions.

Every host listens on a port of its own choice and says where in torch's store, which rank 0 keeps
at MASTER_ADDR:MASTER_PORT; then each connects to every other. Nothing waits without an end: who
does not come, or stops answering, is a finding.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from laconic.lab.doctor.host_checks import Environment, Finding, number, versions
from laconic.links.addresses import address_towards
from laconic.units import format_rate

GROUP = "between hosts"
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 10.0
PINGS = 10
AT_ONCE = 16
SEND_SECONDS = 1.0
SEND_MOST = 64 << 20
PIECE = 64 << 10
GRACE_SECONDS = 15.0
"""What every stage of the meeting is given beyond what it must take."""
CLOCK_SECONDS = 0.5
"""Clocks further apart than this make logs and metrics of several hosts hard to compare."""
PING, SINK = b"P", b"S"


@dataclass(frozen=True)
class Card:
    """How one host introduces itself."""

    rank: int
    host: str
    address: str
    port: int
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, {self.address})"


@dataclass(frozen=True)
class Pair:
    """What ``source`` saw of ``target``: seconds of half a round trip, how far the target's clock
    is ahead, within ``uncertainty``; or why it could not be reached."""

    source: int
    target: int
    latency: float = 0.0
    offset: float = 0.0
    uncertainty: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Rate:
    """Bits per second from ``source`` to its neighbour in the ring, all hosts sending at once."""

    source: int
    target: int
    rate: float
    error: str = ""


@dataclass
class Meeting:
    """What came of it on this host; on rank 0, of all hosts."""

    findings: list[Finding] = field(default_factory=list)
    hosts: list[Card] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def problem(self, text: str, remedy: str) -> None:
        self.findings.append(Finding("problem", GROUP, text, remedy))

    def numbers(self) -> dict[str, Any]:
        """The measurements, for JSON."""
        return {
            "hosts": [asdict(card) for card in self.hosts],
            "pairs": [asdict(pair) for pair in self.pairs],
            "rates": [asdict(rate) for rate in self.rates],
        }


@dataclass(frozen=True)
class Place:
    """Where this host takes part: rank ``rank`` of ``world``, meeting at ``host``:``port``;
    ``agent``: another program (torchrun's agent) keeps the store there already."""

    rank: int
    world: int
    host: str
    port: int
    agent: bool = False

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank must be from 0 to world - 1, and world at least 1, not rank {self.rank} of "
                f"{self.world}"
            )
        if not self.host or not 0 < self.port < 65536:
            raise ValueError(
                f"master must be HOST:PORT with a port from 1 to 65535, not {self.host}:{self.port}"
            )


def meet(
    place: Place,
    own: Sequence[Finding] = (),
    *,
    timeout: float = 60.0,
    known: Mapping[str, str] | None = None,
    address: str | None = None,
    clock: Callable[[], float] = time.time,
) -> Meeting:
    """Meet the other hosts, and say what came of it within ``timeout`` and what the tests take.

    ``own``: what was found on this host, of which rank 0 hears. ``known`` (versions), ``address``
    and ``clock`` stand in for this host's own.
    """
    meeting = Meeting()
    card = Card(
        place.rank,
        socket.gethostname(),
        address or address_towards(place.host) or "127.0.0.1",
        0,
        known or versions(),
    )
    end = time.monotonic() + timeout
    stages = timeout + 4 * (GRACE_SECONDS + place.world / AT_ONCE * CONNECT_SECONDS)

    def hold() -> None:
        try:
            with _Listener(clock) as listener:
                own_card = Card(**{**asdict(card), "port": listener.port})
                store = _store(place, end, timeout, meeting)
                if store is not None:
                    _Course(place, own_card, own, store, end, timeout, clock, meeting).run()
        except (RuntimeError, OSError) as error:  # the store's host has gone
            text = f"the meeting broke off: {str(error).splitlines()[0]}"
            meeting.problem(text, "look at rank 0's host, then run it again on all hosts")

    # torch's store waits for a host that vanished: then this thread is left behind
    thread = threading.Thread(target=hold, daemon=True, name="laconic-doctor")
    thread.start()
    thread.join(stages)
    if thread.is_alive():
        text = f"the meeting did not end: {place.host}:{place.port} no longer answers"
        meeting.problem(text, "look at rank 0's host, then run it again on all hosts")
    return meeting


def _store(place: Place, end: float, timeout: float, meeting: Meeting) -> Any:
    """torch's store at the meeting place; None, and a finding, where it cannot be had."""
    where = f"{place.host}:{place.port}"
    serves = place.rank == 0 and not place.agent
    if serves:
        if not _is_own(place.host):
            meeting.problem(
                f"{place.host} is no address of this host, which is rank 0",
                "give the address of rank 0's host as --master (MASTER_ADDR), on every host",
            )
            return None
        if _taken(place.port):
            meeting.problem(
                f"port {place.port} is taken on this host, which is rank 0",
                "choose another one on every host, or end the program that has it (ss -ltnp)",
            )
            return None
    else:
        error: OSError | None = TimeoutError()
        while error is not None and time.monotonic() < end:
            error = _connection_error(place.host, place.port, end)
            if error is not None:
                time.sleep(min(0.3, max(end - time.monotonic(), 0)))
        if error is not None:
            text = f"cannot reach {where}, where rank 0 should be, within {timeout:g} s: "
            meeting.problem(text + _reason(error), _remedy(error, "rank 0's host", place.port))
            return None
    seconds = timedelta(seconds=max(end - time.monotonic(), 1.0))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.host, place.port, is_master=serves, timeout=seconds, wait_for_workers=False
    )
    return dist.PrefixStore("laconic doctor", store)  # type: ignore[attr-defined]


def _is_own(host: str) -> bool:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _taken(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return True
    return False


def _connection_error(host: str, port: int, end: float) -> OSError | None:
    seconds = max(min(CONNECT_SECONDS, end - time.monotonic()), 0.1)
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name does not resolve"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _remedy(error: OSError, who: str, port: int | None = None) -> str:
    if isinstance(error, socket.gaierror):
        return "use its address, or add the name to /etc/hosts on this host"
    if isinstance(error, ConnectionRefusedError):
        return f"start laconic doctor on {who} too; is the address right?"
    ports = f"port {port} and " if port else ""
    return (
        f"let the firewall of {who} (and of the network between) pass TCP from the other hosts: "
        f"{ports}the ports of net.ipv4.ip_local_port_range, which laconic, gloo and NCCL use; is "
        "the address right?"
    )


class _Listener:
    """Answers the other hosts: their pings with the time, and takes what they send."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
        else:
            self._server = socket.create_server(("", 0), backlog=256)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="laconic-doctor-port").start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(ANSWER_SECONDS)
            kind = connection.recv(1)
            if kind == PING:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while connection.recv(1):
                    connection.sendall(struct.pack("!d", self._clock()))
            elif kind == SINK:
                size, start = 0, time.perf_counter()
                while piece := connection.recv(PIECE):
                    size += len(piece)
                connection.sendall(struct.pack("!Qd", size, time.perf_counter() - start))

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._server.close()


def ping(source: int, card: Card, clock: Callable[[], float]) -> Pair:
    """Round trips to a host. Of the quickest: half of it is the latency, and the target's clock,
    read in between, is ahead by ``theirs - (sent + received) / 2``, within half of it (the rule
    of NTP)."""
    trips = []
    try:
        with socket.create_connection((card.address, card.port), CONNECT_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(PING)
            for _ in range(PINGS):
                sent, start = clock(), time.perf_counter()
                connection.sendall(b".")
                (theirs,) = struct.unpack("!d", _receive(connection, 8))
                trip = time.perf_counter() - start
                trips.append((trip, theirs - (sent + trip / 2)))
    except OSError as error:
        return Pair(source, card.rank, error=_reason(error))
    trip, offset = min(trips)
    return Pair(source, card.rank, trip / 2, offset, trip / 2)


def send(source: int, card: Card) -> Rate:
    """Bits per second to a host, as it counts them: a second long, or `SEND_MOST` bytes."""
    piece = bytes(PIECE)
    try:
        with socket.socket(socket.AF_INET6 if ":" in card.address else socket.AF_INET) as own:
            # a small buffer, so that little is still to be sent when the second is over
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PIECE)
            own.settimeout(CONNECT_SECONDS)
            own.connect((card.address, card.port))
            own.settimeout(ANSWER_SECONDS)
            own.sendall(SINK)
            size, end = 0, time.monotonic() + SEND_SECONDS
            while size < SEND_MOST and time.monotonic() < end:
                own.sendall(piece)
                size += PIECE
            own.shutdown(socket.SHUT_WR)
            received, seconds = struct.unpack("!Qd", _receive(own, 16))
    except OSError as error:
        return Rate(source, card.rank, 0.0, _reason(error))
    return Rate(source, card.rank, 8 * received / seconds)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        data += piece
    return data


@dataclass
class _Course:
    """The meeting as one host goes through it, from ``store`` to its ``meeting``."""

    place: Place
    card: Card
    own: Sequence[Finding]
    store: Any
    end: float
    timeout: float
    clock: Callable[[], float]
    meeting: Meeting

    def run(self) -> None:
        place, meeting = self.place, self.meeting
        if self.store.add(f"taken/{place.rank}", 1) > 1:
            text = f"another host takes part as rank {place.rank} too"
            meeting.problem(text, "give every host a rank of its own, from 0 up")
            return
        self.store.set(f"card/{place.rank}", json.dumps(asdict(self.card)))
        cards = self._present()
        if cards is None:
            return
        meeting.hosts = list(cards.values())
        others = [card for rank, card in cards.items() if rank != place.rank]
        # from the next rank on, so that not all of them call on the same host at once
        others.sort(key=lambda card: (card.rank - place.rank) % place.world)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            meeting.pairs = list(pool.map(lambda c: ping(place.rank, c, self.clock), others))
        rounds = len(others) / AT_ONCE * CONNECT_SECONDS
        self._together("pinged", cards, GRACE_SECONDS + rounds)
        reached = [pair.target for pair in meeting.pairs if not pair.error]
        if others and others[0].rank in reached:
            meeting.rates = [send(place.rank, others[0])]
        self._together("sent", cards, GRACE_SECONDS)
        if place.rank == 0:
            self._hear(cards)
        else:
            self._tell()

    def _present(self) -> dict[int, Card] | None:
        """Who is there; rank 0 decides when enough has been waited."""
        store, place = self.store, self.place
        ranks = list(range(place.world))
        if place.rank == 0:
            missing = self._wait([f"card/{r}" for r in ranks], self.end - time.monotonic())
            here = [r for r in ranks if f"card/{r}" not in missing]
            store.set("present", json.dumps(here))
        elif self._wait(["present"], self.end - time.monotonic() + GRACE_SECONDS):
            self.meeting.problem("rank 0 did not say who is there", "start it again on all hosts")
            return None
        here = json.loads(store.get("present"))
        absent = [r for r in ranks if r not in here]
        if place.rank in absent:
            text = f"rank {place.rank} came after rank 0 had waited for it"
            self.meeting.problem(text, "start it again on all hosts within --timeout")
            return None
        if absent:
            text = f"{_ranks(absent)} of {place.world} did not come within {self.timeout:g} s"
            self.meeting.problem(
                text,
                f"run laconic doctor there too, with the same --master and --world; if it runs, "
                f"it says why it does not reach {place.host}:{place.port}",
            )
        return {r: Card(**json.loads(store.get(f"card/{r}"))) for r in here}

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until all keys are there; returns those that are not."""
        end = time.monotonic() + seconds
        missing = list(keys)
        while missing := [key for key in missing if not self.store.check([key])]:
            if time.monotonic() >= end:
                break
            time.sleep(0.05)
        return missing

    def _together(self, stage: str, cards: Mapping[int, Card], seconds: float) -> None:
        """Wait for the others to come through a stage; one that does not is heard of later."""
        self.store.set(f"{stage}/{self.place.rank}", "")
        self._wait([f"{stage}/{rank}" for rank in cards], seconds)

    def _tell(self) -> None:
        meeting, store = self.meeting, self.store
        own = [asdict(f) for f in self.own if f.level != "ok"]
        store.set(f"report/{self.place.rank}", json.dumps({**meeting.numbers(), "own": own}))
        self._wait(["over"], 2 * GRACE_SECONDS)
        store.add("left", 1)
        meeting.findings += _of_pairs(meeting) + _of_versions(meeting.hosts)

    def _hear(self, cards: Mapping[int, Card]) -> None:
        """All hosts' reports, and what follows from them together."""
        meeting, store = self.meeting, self.store
        others = [rank for rank in cards if rank != 0]
        silent = self._wait([f"report/{rank}" for rank in others], GRACE_SECONDS)
        for rank in others:
            if f"report/{rank}" in silent:
                remedy = "look at that host's own output"
                meeting.problem(f"{cards[rank]} stopped answering during the tests", remedy)
                continue
            report = json.loads(store.get(f"report/{rank}"))
            meeting.pairs += [Pair(**pair) for pair in report["pairs"]]
            meeting.rates += [Rate(**rate) for rate in report["rates"]]
            for finding in map(lambda f: Finding(**f), report["own"]):
                text = f"{cards[rank]}: {finding.text}"
                meeting.findings.append(Finding(finding.level, finding.group, text, finding.remedy))
        store.set("over", "")
        if not self.place.agent:  # the store ends with this process
            end = time.monotonic() + 2.0
            while store.add("left", 0) < len(others) - len(silent) and time.monotonic() < end:
                time.sleep(0.05)
        for part in (_of_pairs, _of_rates, _of_clocks):
            meeting.findings += part(meeting)
        meeting.findings += _of_versions(meeting.hosts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _of_pairs(meeting: Meeting) -> list[Finding]:
    """Who cannot reach whom, target by target."""
    by_rank = {card.rank: card for card in meeting.hosts}
    found = []
    for target, card in by_rank.items():
        failed = [p for p in meeting.pairs if p.target == target and p.error]
        if failed:
            reasons = ", ".join(sorted({pair.error for pair in failed}))
            text = (
                f"{card} cannot be reached at port {card.port} by "
                f"{_ranks([pair.source for pair in failed])}: {reasons}"
            )
            refused = reasons == "connection refused"
            remedy = (
                "is that its address on the network between the hosts? MASTER_ADDR and "
                "GLOO_SOCKET_IFNAME decide it; a firewall may refuse too"
                if refused
                else _remedy(TimeoutError(), "that host")
            )
            found.append(Finding("problem", GROUP, text, remedy))
    good = [pair.latency for pair in meeting.pairs if not pair.error]
    if good:
        text = (
            f"{len(good)} of {len(meeting.pairs)} connections to ports of the hosts' own choice "
            f"work; latency {_seconds(min(good))} to {_seconds(max(good))} one way"
        )
        found.append(Finding("ok", GROUP, text))
    return found


def _of_rates(meeting: Meeting) -> list[Finding]:
    """Whether one host is slower than the others."""
    good = [rate for rate in meeting.rates if not rate.error]
    found = [
        Finding(
            "problem",
            GROUP,
            f"sending from rank {rate.source} to rank {rate.target} failed: {rate.error}",
            "pings pass and bulk does not: is the MTU alike on all hosts, and on the way?",
        )
        for rate in meeting.rates
        if rate.error
    ]
    if not good:
        return found
    slowest = min(good, key=lambda rate: rate.rate)
    median = statistics.median(rate.rate for rate in good)
    text = (
        f"in a ring, all at once, hosts send {format_rate(slowest.rate)} (rank {slowest.source} "
        f"to {slowest.target}) or more; median {format_rate(median)}"
    )
    if slowest.rate < median / 2:
        remedy = "a round takes as long as its slowest host: look at its card, cable and neighbours"
        return [*found, Finding("warning", GROUP, text, remedy)]
    return [*found, Finding("ok", GROUP, text)]


def _of_clocks(meeting: Meeting) -> list[Finding]:
    """How far the hosts' clocks are from rank 0's."""
    seen = [pair for pair in meeting.pairs if pair.source == 0 and not pair.error]
    off = [pair for pair in seen if abs(pair.offset) - pair.uncertainty > CLOCK_SECONDS]
    found = [
        Finding(
            "warning",
            GROUP,
            f"the clock of rank {pair.target} is {abs(pair.offset):.3g} s "
            f"{'ahead of' if pair.offset > 0 else 'behind'} rank 0's "
            f"(± {_seconds(pair.uncertainty)}): times in logs and metrics do not compare",
            "run an NTP client there (chronyd, systemd-timesyncd)",
        )
        for pair in off
    ]
    if seen and not off:
        worst = max(seen, key=lambda pair: abs(pair.offset))
        text = (
            f"clocks agree: the furthest from rank 0's is off by {_seconds(abs(worst.offset))} "
            f"± {_seconds(worst.uncertainty)}"
        )
        found.append(Finding("ok", GROUP, text))
    return found


def _of_versions(hosts: Sequence[Card]) -> list[Finding]:
    """Whether all hosts run the same software."""
    found = []
    for name in hosts[0].versions if len(hosts) > 1 else ():
        by_version: dict[str, list[int]] = {}
        for card in hosts:
            by_version.setdefault(card.versions.get(name, "none"), []).append(card.rank)
        if len(by_version) > 1:
            told = "; ".join(f"{v} on {_ranks(ranks)}" for v, ranks in by_version.items())
            text = f"{name} differs: {told}"
            remedy = f"install the same {name} on all hosts"
            found.append(Finding("warning" if name == "python" else "problem", GROUP, text, remedy))
    if len(hosts) > 1 and not found:
        text = f"{len(hosts)} hosts, all with the same python, torch and laconic"
        found.append(Finding("ok", GROUP, text))
    return found


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def place_of(environ: Environment) -> Place:
    """Where torchrun's variables put this host. Raises ``ValueError`` where they are incomplete."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ValueError(f"RANK is set, as torchrun does, but {name} is not")
    by_host = "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ
    rank, world = ("GROUP_RANK", "GROUP_WORLD_SIZE") if by_host else ("RANK", "WORLD_SIZE")
    return Place(
        number(environ, rank, 0),
        number(environ, world, 1),
        environ["MASTER_ADDR"],
        number(environ, "MASTER_PORT", 0),
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
