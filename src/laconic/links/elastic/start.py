"""Starts a worker of an elastic run: finds the coordinator and the other workers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from laconic.errors import LinkError
from laconic.links.addresses import Address, address_of, address_toward, listen, own_address
from laconic.links.elastic.founding import RestoredError, agreed, found
from laconic.links.elastic.link import ElasticLink, end_at_exit
from laconic.links.elastic.members import Members, Rules
from laconic.links.elastic.reception import Reception
from laconic.links.elastic.registry import Registry
from laconic.links.elastic.rendezvous import Rendezvous, Reporting
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, new_id
from laconic.links.handshake import KEY_BYTES
from laconic.links.health import Beacon, key_of
from laconic.links.texts import clean

NO_KEY = "00" * KEY_BYTES


def start(
    address: str,
    job: str,
    about: dict[str, str],
    rules: Rules,
    reports: Reporting,
    recording: Callable[[str], Callable[[dict[str, Any]], None]],
) -> ElasticLink:
    """Find the other workers of ``job`` by the coordinator at ``address``, and connect to them.
    ``about``: what must be the same on all workers, by name. ``reports``: what this worker tells
    the others besides. ``recording(id)``: called with each of this worker's events. The link of a
    newcomer to a run under way is not connected yet. Raises ``ValueError`` where the others are
    about something else."""
    registry = Registry(address, job)
    registry.connect(time.monotonic() + rules.wait)
    while True:
        try:
            return _begin(registry, job, about, rules, reports, recording)
        except RestoredError:
            continue


def _begin(
    registry: Registry,
    job: str,
    about: dict[str, str],
    rules: Rules,
    reports: Reporting,
    recording: Callable[[str], Callable[[dict[str, Any]], None]],
) -> ElasticLink:
    secret, text = registry.secret(), json.dumps(about)
    _check_same(agreed(registry, secret, text), about, job, f"{registry.host}:{registry.port}")
    host = _host_toward(registry.host)
    with ExitStack() as on_error:
        beacon = Beacon(host)
        on_error.callback(beacon.close)
        health = beacon.enroll(secret)
        (mesh, at_mesh), (service, at_service) = _listen(on_error, host), _listen(on_error, host)
        member = Member(new_id(), at_mesh, at_service, health)
        members = Members(registry, member, secret, text, rules)
        members.record = beacon.links[key_of(health)]
        members.record.note = members.farewell = reports.note
        reports.heard = members.signs.notes
        members.status, members.silence = beacon.set, beacon.close
        units = Units(member.id)
        units.note = reports.record = recording(member.id)
        rendezvous = Rendezvous(members, mesh, units, reports)
        reception = Reception(members, service, units)
        link = ElasticLink(members, units, rendezvous, reception, reports)
        on_error.callback(link.close)
        need = rules.workers or rules.min_workers or 2
        at = registry, member, secret
        view, under_way = found(*at, need=need, expected=rules.workers, wait=rules.wait)
        members.start(view)
        if not under_way:
            link.begin(view.ids)
        end_at_exit(link)
        on_error.pop_all()
    return link


def _check_same(said: str, about: dict[str, str], job: str, address: str) -> None:
    try:
        others = dict(json.loads(said))
    except (ValueError, TypeError):
        raise LinkError(f"what is at {clean(address)} is no coordinator of laconic's") from None
    for name, own in about.items():
        if others.get(name) != own:
            there = clean(str(others.get(name)))[:200]
            raise ValueError(
                f"the job {job!r} at {address} has another {name}: {there}, and this worker has "
                f"{own}: start the same program everywhere, or give this one another job="
            )


def _host_toward(coordinator: str) -> str:
    """This host's address for other workers: that of the interface which GLOO_SOCKET_IFNAME names,
    else the one toward the coordinator."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    named = address_of(interface) if interface else None
    return named or address_toward(coordinator) or own_address()


def _listen(on_error: ExitStack, host: str) -> tuple[socket.socket, str]:
    """A socket that listens, and the address to announce."""
    server, announced = listen(host)
    on_error.enter_context(server)
    return server, str(Address(announced, int(server.getsockname()[1]), NO_KEY))
