"""A firewall between workers of this host that can forget the connections that are open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Sequence

from laconic.links.sockets import borrowed

HERE, THERE = "127.0.0.1", "127.0.0.2"
RESET = struct.pack("ii", 1, 0)


def variables(ports: range) -> dict[str, str]:
    """The environment of workers that listen behind the firewall."""
    found = {"LACONIC_BIND": HERE, "LACONIC_ADDRESS": THERE}
    return {**found, "LACONIC_PORTS": f"{ports[0]}-{ports[-1]}"}


def hasten() -> None:
    """Have this process ask soon, in a version of laconic that does, and not after 10 s."""
    with contextlib.suppress(ImportError):
        from laconic.links import stalls

        stalls.QUIET_SECONDS, stalls.ASK_SECONDS, stalls.LOOK_SECONDS = 1.0, 0.5, 0.2


def drop_packets(port: int) -> int:
    """Have the system drop all packets that come over this process's connections of now, but for
    those with ``port``. Returns how many there are. For Linux."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # in BPF: return 0
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(nothing))
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with borrowed(int(name)) as end:
                if port not in (end.getsockname()[1], end.getpeername()[1]):
                    end.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
                    count += 1
        except (OSError, IndexError, TypeError):  # not a connection of TCP's
            continue
    return count


class Firewall:
    """Passes on what comes to `THERE`, on ``ports``."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._listening = [socket.create_server((THERE, port)) for port in ports]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._forgotten: set[socket.socket] = set()
        self.small_only = False
        """Whether later connections let small pieces pass, and nothing after a larger one."""
        for server in self._listening:
            threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        port = server.getsockname()[1]
        with contextlib.suppress(OSError):  # it was closed
            while True:
                caller, _ = server.accept()
                try:
                    called = socket.create_connection((HERE, port), 5)
                except OSError:
                    caller.close()
                    continue
                called.settimeout(None)
                self._pairs.append((caller, called))
                for a, b in ((caller, called), (called, caller)):
                    at = a, b, self.small_only
                    threading.Thread(target=self._pass_on, args=at, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, small: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if small and len(data) > 1400:
                    self._forgotten.add(source)
                if source not in self._forgotten:
                    to.sendall(data)
            if source not in self._forgotten:
                to.shutdown(socket.SHUT_WR)

    def forget(self) -> int:
        """Drop all that comes over the connections of now. Returns how many there are."""
        pairs = [pair for pair in self._pairs if pair[0].fileno() >= 0]
        self._forgotten.update(*pairs)
        return len(pairs)

    def reset(self) -> None:
        """Answer over the connections of now with a reset."""
        for pair in list(self._pairs):
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes its thread
                end.close()

    def close(self) -> None:
        """End all connections."""
        for end in (*self._listening, *(end for pair in self._pairs for end in pair)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def firewall(ports: Sequence[int]) -> contextlib.closing[Firewall]:
    """One that ends with the context."""
    return contextlib.closing(Firewall(ports))
