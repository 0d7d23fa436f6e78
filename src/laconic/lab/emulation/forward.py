"""The process that delays and drops packets between emulated hosts.

Each host's `eth0` is a TAP device. One process reads what the hosts send, and writes it to the
receiver's device when its time has come. `forward.c` does that; this file starts it. The keeper
(`namespaces.py`) loads the file by its path, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["VERSION", "Counts", "Forward", "ForwardError", "add_tap", "counts"]

VERSION: Final = 1
"""What the library must report, as for `laconic.native.load`."""

_MTU: Final = 1500  # packets as on the internet, so that a loss costs as much as there
_QUEUE: Final = 16384  # frames that a host's device holds until they are read: 0.2 s at 1 Gbit/s
_DEVICE: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP_NO_PI: Final = 0x0002 | 0x1000  # Ethernet frames, with nothing in front of them
_COUNTERS: Final = struct.Struct("=4Q")  # as struct counters in forward.c
_COMPILE: Final = (
    "latency, jitter and loss need laconic's C extensions: install a C compiler, such as gcc, then "
    "laconic again, by pip install -e '.[lab]' in its repository"
)


class _Host(ctypes.Structure):
    """As struct host in forward.c."""

    _fields_ = (
        ("tap", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("latency", ctypes.c_int64),
        ("jitter", ctypes.c_int64),
        ("loss", ctypes.c_double),
    )


class ForwardError(OSError):
    """Packets cannot be delayed or dropped here. The message gives the reason in one line."""


@dataclass(frozen=True)
class Forward:
    """What happens to packets between hosts.

    `library` is the path of the compiled forward.c, or None if there is none. `latency` and
    `jitter` are in seconds, `loss` from 0 to 1, one value for each host. `seed` is that of the
    random numbers.
    """

    library: str | None
    latency: list[float]
    jitter: list[float]
    loss: list[float]
    seed: int

    def start(self, taps: Sequence[int]) -> tuple[int, int]:
        """Start the forwarder on the hosts' devices, as a copy of this process.

        Returns its number and the descriptor of its counters. Raises ForwardError if the library is
        not compiled.
        """
        if self.library is None:
            raise ForwardError(0, _COMPILE)
        library = ctypes.CDLL(self.library)
        hosts = (_Host * len(taps))()
        rows = zip(taps, self.latency, self.jitter, self.loss, strict=True)
        for host, (tap, latency, jitter, loss) in zip(hosts, rows, strict=True):
            host.tap, host.loss = tap, loss
            host.latency, host.jitter = round(latency * 1e9), round(jitter * 1e9)
        counters = os.memfd_create("laconic-lab-counters")
        os.ftruncate(counters, _COUNTERS.size * len(taps))
        shared = ctypes.c_char.from_buffer(mmap.mmap(counters, _COUNTERS.size * len(taps)))
        process = os.fork()
        if not process:
            # A network does not wait for programs. Without this, it waited for a processor half of
            # the time on a busy machine. A nice value does not help: it only counts within the
            # session (autogroup).
            with contextlib.suppress(OSError):  # needs root
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            seed = ctypes.c_uint64(self.seed)
            os._exit(library.laconic_forward(hosts, len(taps), seed, ctypes.byref(shared)))
        return process, counters


def add_tap(route: Any, name: str, host: int) -> int:
    """Create the device of a host in the current network namespace.

    `route` is pyroute2's. The device lasts as long as the descriptor that is returned. Raises
    ForwardError if the kernel refuses.
    """
    descriptor = _open_tap(name)
    (link,) = route.link_lookup(ifname=name)
    # From this address the forwarder knows the receiver.
    address = f"02:00:00:00:01:{host:02x}"
    route.link("set", index=link, address=address, mtu=_MTU, txqlen=_QUEUE)
    return descriptor


def _open_tap(name: str) -> int:
    descriptor = -1
    try:
        descriptor = os.open(_DEVICE, os.O_RDWR)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        reason = f"latency, jitter and loss need {_DEVICE}: {error.strerror}"
        raise ForwardError(error.errno, reason) from error
    return descriptor


@dataclass(frozen=True)
class Counts:
    """What a host has sent: bytes and frames, and how many frames were lost by chance or refused
    by the receiver's device."""

    bytes: int
    frames: int
    lost: int
    failed: int


def counts(data: bytes) -> list[Counts]:
    """Return the counts of all hosts from the forwarder's counters."""
    return [Counts(*values) for values in _COUNTERS.iter_unpack(data)]
