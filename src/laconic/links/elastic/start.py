"""Starts a worker of an elastic run: finds the coordinator and the other workers."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from laconic.errors import LinkError
from laconic.links.addresses import Address, listen, own_address
from laconic.links.elastic.client import (
    RETRY_SECONDS,
    SAY_SECONDS,
    Client,
    CoordinatorError,
    OtherRunError,
    UntrustedError,
)
from laconic.links.elastic.coordinator import parse_address
from laconic.links.elastic.embedded import serve
from laconic.links.elastic.leases import Need
from laconic.links.elastic.link import ElasticLink, end_at_exit
from laconic.links.elastic.members import BEAT, Members
from laconic.links.elastic.reception import Reception
from laconic.links.elastic.rendezvous import Rendezvous, Reporting
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View, new_id
from laconic.links.handshake import KEY_BYTES
from laconic.links.health import Beacon, ask_all, key_of
from laconic.links.texts import clean

log = logging.getLogger("laconic")

NO_KEY = "00" * KEY_BYTES


def start(
    address: str,
    job: str,
    about: dict[str, str],
    need: Need,
    wait: float,
    limit: float,
    reports: Reporting,
    recording: Callable[[str], Callable[[dict[str, Any]], None]],
) -> ElasticLink:
    """Find the other workers of ``job`` by the coordinator at ``address``, and connect to them.
    ``about``: what must be the same on all workers, by name. ``wait``: seconds to wait for enough
    workers; ``limit``: the longest silence in seconds. ``reports``: what this worker tells
    the others besides. ``recording(id)``: called with each of this worker's events. The link of a
    newcomer to a run under way is not connected yet. Raises ``ValueError`` where the others are
    about something else."""
    host, port = parse_address(address)
    while True:
        with ExitStack() as on_error:
            own = own_address(host)
            beacon = Beacon(own)
            on_error.callback(beacon.close)
            health = beacon.enroll()
            (mesh, at_mesh), (service, at_service) = _listen(on_error, own), _listen(on_error, own)
            member = Member(new_id(), at_mesh, at_service, health)
            client = Client(host, port, job, member, json.dumps(about), need)
            said = _join(client, wait)
            if said:
                raise _different(said, about, job, client.at)
            units = Units(member.id)
            members = Members(client, member, units, wait, limit)
            on_error.callback(members.close)
            members.record = beacon.links[key_of(health)]
            members.record.secret = members.secret
            members.note, reports.heard = reports.note, members.signs.notes
            members.status, members.silence = beacon.set, beacon.close
            units.note = reports.record = recording(member.id)
            rendezvous = Rendezvous(members, mesh, units, reports)
            reception = Reception(members, service, units)
            link = ElasticLink(members, units, rendezvous, reception, reports)
            on_error.callback(link.close)
            try:
                view, under_way = _found(members, need)
            except OtherRunError:
                continue
            if not under_way:
                link.begin(view.ids)
            end_at_exit(link)
            on_error.pop_all()
        return link


def _found(members: Members, need: Need) -> tuple[View, bool]:
    """Wait for the first view of a run. Returns it; or the present view of a run under way, and
    True, once one of its workers answers. Raises `OtherRunError` if the coordinator has begun with
    another run meanwhile."""
    now = time.monotonic()
    end, say, at = now + members.wait, now + SAY_SECONDS, members.client.at
    while not members.other_run:
        view, now = members.latest, time.monotonic()
        if view is not None and (members.entered_view or _answers(view, members.secret)):
            members.founding = False
            return view, not members.entered_view
        if now >= end:
            raise _not_found(members, need)
        if now >= say:
            log.warning(
                "%d of %d workers have come to the coordinator at %s; waiting for more, up to "
                "%.0f s", members.come, need.expected or need.start, at, end - now,
            )  # fmt: skip
            say = end
        with members.changed:
            if members.latest is view and not members.other_run:
                members.changed.wait(max(min(end, say) - now, 0.0) if view is None else BEAT)
    raise OtherRunError("another run has begun")


def _answers(view: View, secret: bytes) -> bool:
    """Whether a worker of a run under way does."""
    answers = ask_all([m.beacon for m in view.members], secret)
    return not all(answer.lost for answer in answers)


def _not_found(members: Members, need: Need) -> LinkError:
    at, lost = members.client.at, members.coordinator_lost
    if lost:
        return CoordinatorError(lost)
    if members.latest is not None:
        return LinkError(
            f"the workers of the run at {at} cannot be reached from here: are their addresses "
            "right, and their ports open?"
        )
    return LinkError(
        f"{members.come} of {need.start} workers have come to the coordinator at {at} within "
        f"{members.wait:g} s: start more workers, or lower workers= or min_workers="
    )


def _join(client: Client, wait: float) -> str:
    """Join the job as soon as its coordinator answers, or serve its address, if that is this
    host's. Returns what else the job is about, if so."""
    now = time.monotonic()
    until, say = now + wait, now + SAY_SECONDS
    while True:
        try:
            return client.connect(None)
        except UntrustedError:
            raise
        except CoordinatorError as error:
            if serve(client.host, client.port):
                continue
            now = time.monotonic()
            if now >= until:
                raise
            if now >= say:
                log.warning("%s; trying again for %.0f s", error, until - now)
                say = until
        time.sleep(RETRY_SECONDS)


def _different(said: str, about: dict[str, str], job: str, address: str) -> Exception:
    """The error of a worker that is ``about`` something else than what the job is ``said`` to be
    about."""
    try:
        others = dict(json.loads(said))
    except (ValueError, TypeError):
        others = {}
    for name, own in about.items():
        if others.get(name) != own:
            there = clean(str(others.get(name)))[:200]
            return ValueError(
                f"the job {job!r} at {address} has another {name}: {there}, and this worker has "
                f"{own}: start the same program everywhere, or give this one another job="
            )
    return LinkError(f"what is at {clean(address)} is no coordinator of laconic's")


def _listen(on_error: ExitStack, host: str) -> tuple[socket.socket, str]:
    """A socket that listens, and the address to announce."""
    server, announced = listen(host)
    on_error.enter_context(server)
    return server, str(Address(announced, int(server.getsockname()[1]), NO_KEY))
