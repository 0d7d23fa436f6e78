"""Where a process listens, and the addresses that ranks send to each other.

Three environment variables change where it listens, for firewalls, NATs and VPNs. They apply to
every listener of a worker:

- LACONIC_PORTS, such as ``29500-29599``: the ports to use. Each listener takes the first free one.
- LACONIC_BIND: the address of this host to listen at.
- LACONIC_ADDRESS: the address that other workers connect to, if a NAT or a VPN makes it different.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import struct
from typing import NamedTuple

from laconic.errors import LinkError
from laconic.links import forks
from laconic.links.handshake import KEY_BYTES
from laconic.links.sockets import watch
from laconic.links.texts import clean

PORTS, BIND, ADDRESS = "LACONIC_PORTS", "LACONIC_BIND", "LACONIC_ADDRESS"
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


class Address(NamedTuple):
    """Where a process listens, and the key of the link that callers ask about, if there is one."""

    host: str
    port: int
    key: str = "00" * KEY_BYTES

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


def listen(host: str | None = None) -> tuple[socket.socket, Address]:
    """Return a listening socket, and where other workers connect to it. ``host``: the address to
    listen on, unless LACONIC_BIND is set; None: `own_address`.

    Raises ``ValueError`` if a variable is malformed, and `LinkError` if all ports of LACONIC_PORTS
    are in use.
    """
    bound = _numeric(BIND) or host or own_address()
    announced = _numeric(ADDRESS) or (_unspecific(bound) and (host or own_address())) or bound
    several = ports()
    for port in several:
        try:
            server = listening(bound, port)
            return server, Address(announced, server.getsockname()[1])
        except OSError as error:
            if os.environ.get(BIND) and error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(
                    f"{BIND}={os.environ[BIND]}: this host has no such address"
                ) from error
            if several == range(1) or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise LinkError(
        f"no port of {PORTS}={os.environ[PORTS]} is free at {bound}: a worker needs up to "
        f"{MOST_LISTENERS} at a time, so give {MOST_LISTENERS} for each worker of this host"
    )


MOST_LISTENERS = 2
"""How many ports a worker listens on: its beacon, and one more in an elastic run, or while it makes
a link."""


def ports() -> range:
    """The ports that LACONIC_PORTS allows; only 0, any free port, if it is not set. Raises
    ``ValueError``."""
    text = os.environ.get(PORTS, "").strip()
    if not text:
        return range(1)
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last < 2**16:
        raise ValueError(f"{PORTS} must be a range of ports, such as 29500-29599, not {text!r}")
    return range(first, last + 1)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at a numeric address; "::" stands for those of IPv4, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    with forks.guard:
        server = socket.create_server(
            (host, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both
        )
        forks.close_in_child(server)
    watch(server)
    return server


def _numeric(variable: str) -> str | None:
    """The address that ``variable`` gives, in numeric form, which is what ranks send to each other;
    None if it is not set. Raises ``ValueError``."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        found = socket.getaddrinfo(text.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{variable}={text} is not an address or a host name: {error}") from error
    if variable == ADDRESS and _unspecific(str(found)):
        raise ValueError(f"{variable}={text} is not an address that other workers can call")
    return str(found)


def _unspecific(host: str) -> bool:
    return host in ("0.0.0.0", "::")


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
    """The IPv4 address of a network interface of this host; None if it has none."""
    try:
        import fcntl  # not on Windows

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            request = struct.pack("256s", interface.encode()[:15])
            said = fcntl.ioctl(asking, 0x8915, request)  # SIOCGIFADDR
        return socket.inet_ntoa(said[20:24])
    except (ImportError, OSError):
        return None


def own_address(toward: str | None = None) -> str:
    """This host's address for other ranks. It is the address of the first interface that
    GLOO_SOCKET_IFNAME names; else of the interface ``toward`` that host, or toward MASTER_ADDR;
    else the address that the host's name resolves to. The last also replaces a loopback address if
    there are several hosts."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    named = address_of(interface) if interface else None
    named = named or (address_toward(toward) if toward else None)
    master = os.environ.get("MASTER_ADDR")
    found = named or (address_toward(master) if master else None)
    world = os.environ.get("WORLD_SIZE")
    several = os.environ.get("LOCAL_WORLD_SIZE", world) != world
    if found is None or (found.startswith("127.") and several and not named):
        found = _address_of_name() or found
    return found or "127.0.0.1"


def _address_of_name() -> str | None:
    name = socket.gethostname()
    try:
        return address_toward(socket.gethostbyname(name))
    except OSError:
        return address_toward(name)  # a host with IPv6 only
