"""Where a process listens: its host's own address, and addresses that travel between ranks."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from typing import NamedTuple

from laconic.links.handshake import KEY_BYTES
from laconic.links.texts import clean


class Address(NamedTuple):
    """Where a process listens, and the key of the link that callers ask about."""

    host: str
    port: int
    key: str

    def __str__(self) -> str:
        return f"{self.host}|{self.port}|{self.key}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """From text; raises ``ValueError``."""
        match text.split("|"):
            case [host, port, key] if port.isdecimal() and int(port) < 2**16:
                if len(bytes.fromhex(key)) == KEY_BYTES:
                    return cls(str(ipaddress.ip_address(host)), int(port), key)
        raise ValueError(f"an address is host|port|key, not {clean(text)[:80]!r}")


def address_toward(host: str) -> str | None:
    """The address of this host's interface toward ``host``; None if there is no route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except OSError:
        return None


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface of this host, on Linux; None where it has none."""
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", interface.encode()[:15])
            said = fcntl.ioctl(asking, 0x8915, request)  # SIOCGIFADDR
        return socket.inet_ntoa(said[20:24])
    except (ImportError, OSError):
        return None


def own_address() -> str:
    """This host's address for other ranks. It is the address of the first interface that
    GLOO_SOCKET_IFNAME names; else the one toward MASTER_ADDR; else the one that the host's name
    resolves to. The last also replaces a loopback address where there are several hosts."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    named = address_of(interface) if interface else None
    master = os.environ.get("MASTER_ADDR")
    found = named or (address_toward(master) if master else None)
    world = os.environ.get("WORLD_SIZE")
    several = os.environ.get("LOCAL_WORLD_SIZE", world) != world
    if found is None or (found.startswith("127.") and several and not named):
        found = _address_of_name() or found
    return found or "127.0.0.1"


def _address_of_name() -> str | None:
    try:
        return address_toward(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return None
