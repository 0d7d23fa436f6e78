"""Measure ping, throughput and loss of an emulated network against what was requested.

    python -m benchmarks.wan [RATE ...]

Four hosts in a ring send over TCP as fast as they may, with a loss of 0.1%. Meanwhile one of two
others pings the other, and sends it packets of which 1% are lost. Connections use BBR if the kernel
has it, because other congestion controls slow down at losses. Needs root, for ping.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev

import psutil
from rich.console import Console
from rich.table import Table

from laconic.lab.emulation.cluster import Cluster, Network
from laconic.units import format_rate, format_share, parse_rate

RATES = ["10mbit", "50mbit", "100mbit", "200mbit", "500mbit", "1gbit"]
LOADED = 4
FREE = (LOADED, LOADED + 1)
WAN = Network(
    *(LOADED + 2, None, 0.05, 0.01, 0.001),
    single={"loss": dict.fromkeys(FREE, 0.01), "bandwidth": dict.fromkeys(FREE)},
)
CONNECTIONS = 4
WARM_SECONDS, SECONDS = 3.0, 6.0
PINGS, GAP = 1000, 0.005
COUNTED = 100_000

DISCARD = """
import socket, threading
def discard(connection):
    while connection.recv_into(bytearray(1 << 20)):
        pass
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        threading.Thread(target=discard, args=server.accept()[:1], daemon=True).start()
"""
SEND = """
import socket, sys, threading
def send():
    with socket.socket() as s:
        try:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pass
        s.connect((sys.argv[1], 7000))
        while True:
            s.send(bytes(1 << 18))
for _ in range(int(sys.argv[2])):
    threading.Thread(target=send).start()
"""
# Counts packets until one is empty.
COUNT = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
    s.bind(("", 7001))
    print("ready", flush=True)
    count = 0
    while True:
        if not s.recv(100):
            break
        count += 1
print(count)
"""
# The other host's kernel answers pings, and this one's says when: programs have to wait for a
# processor here.
PROBE = """
import json, socket, struct, sys, time
count, gap, packets = int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
seconds, SO_TIMESTAMPNS = [], 35
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
    s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    s.connect((sys.argv[1], 0))
    start, sent = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + count * gap + 0.5:
        if sent < count and now >= start + sent * gap:
            data = struct.pack("!BBHHH", 8, 0, 0, 1, sent & 0xffff) + struct.pack("d", time.time())
            total = sum(struct.unpack("!8H", data))
            total = (total & 0xffff) + (total >> 16)
            checksum = ~((total & 0xffff) + (total >> 16)) & 0xffff
            s.send(data[:2] + struct.pack("!H", checksum) + data[4:])
            sent += 1
            continue
        s.settimeout(max(start + sent * gap - now, 1e-3))
        try:
            data, ((_, _, clock),), _, _ = s.recvmsg(100, 100)
            came, nanoseconds = struct.unpack("qq", clock)
            seconds.append(came + nanoseconds / 1e9 - struct.unpack("d", data[28:36])[0])
        except TimeoutError:
            pass
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 7001))
    for number in range(packets):
        s.send(b".")
        if number % 100 == 0:
            time.sleep(0.005)
    time.sleep(0.5)
    for _ in range(20):
        s.send(b"")
print(json.dumps(seconds))
"""


@dataclass(frozen=True)
class Measured:
    """Bit/s of each loaded host, seconds of each ping, shares of lost packets, and the share of a
    processor that the forwarder took."""

    rates: list[float]
    pings: list[float]
    lost: float
    lost_under_load: float
    processor: float


def measure(rate: float) -> Measured:
    with Cluster(replace(WAN, bandwidth=rate)) as cluster:
        addresses = cluster.addresses
        for host in range(LOADED):
            start(cluster, host, DISCARD)
        for host in range(LOADED):
            start(cluster, host, SEND, addresses[(host + 1) % LOADED], CONNECTIONS, wait=False)
        counter = start(cluster, LOADED + 1, COUNT)
        time.sleep(WARM_SECONDS)
        arguments = (addresses[LOADED + 1], PINGS, GAP, COUNTED)
        probe = start(cluster, LOADED, PROBE, *arguments, wait=False)
        ours = psutil.Process().children(recursive=True)
        # the youngest copy of the process that keeps the network
        forwarder = max(p.pid for p in ours if p.cmdline()[3:4] == ["keep"])
        begin, busy, before = time.monotonic(), processor_seconds(forwarder), cluster.counts()
        time.sleep(SECONDS)
        seconds = time.monotonic() - begin
        busy, after = processor_seconds(forwarder) - busy, cluster.counts()
        pings = json.loads(probe.communicate()[0])
        arrived = int(counter.communicate()[0])
    pairs = list(zip(before, after, strict=True))[:LOADED]
    rates = [8 * (b.bytes - a.bytes) / seconds for a, b in pairs]
    frames = sum(b.frames - a.frames for a, b in pairs)
    lost = sum(b.lost - a.lost for a, b in pairs)
    return Measured(rates, pings, 1 - arrived / COUNTED, lost / frames, busy / seconds)


def start(
    cluster: Cluster, host: int, program: str, *arguments: object, wait: bool = True
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
    process = cluster.start(host, argv, env=dict(os.environ), stdout=subprocess.PIPE)
    assert process.stdout is not None
    if wait:
        assert process.stdout.readline() == b"ready\n"
    return process


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    table = Table(title=f"{LOADED} hosts that send all the time: {WAN}")
    for column in ("rate", "measured", "ping", "deviation", "1% loss", "0.1% loss", "processor"):
        table.add_column(column, justify="right")
    for rate in map(parse_rate, sys.argv[1:] or RATES):
        measured = measure(rate)
        table.add_row(
            format_rate(rate),
            format_rate(fmean(measured.rates)),
            f"{median(measured.pings) * 1e3:.1f} ms",
            f"{stdev(measured.pings) * 1e3:.1f} ms",
            format_share(measured.lost),
            format_share(measured.lost_under_load),
            format_share(measured.processor),
        )
    Console(width=100).print(table)
    print(f"a ping's deviation would be {WAN.jitter / 3 * 1e3:.1f} ms by the jitter alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
