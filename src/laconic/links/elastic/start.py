"""Starts a worker of an elastic run: finds the coordinator and the other workers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from laconic.errors import LinkError
from laconic.links.addresses import listen, own_address
from laconic.links.elastic.client import SAY_SECONDS, Client, OtherProgramError, UntrustedError
from laconic.links.elastic.coordinator import parse_address
from laconic.links.elastic.leases import Need
from laconic.links.elastic.link import ElasticLink, open_links
from laconic.links.elastic.members import BEAT, Members
from laconic.links.elastic.reception import Reception
from laconic.links.elastic.rendezvous import Rendezvous, Reporting
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View, new_id
from laconic.links.health import Beacon, ask_all
from laconic.links.texts import clean

log = logging.getLogger("laconic")


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
    with ExitStack() as on_error:
        own = own_address(host)
        beacon = Beacon(own)
        on_error.callback(beacon.close)
        mesh, at_mesh = listen(own)
        on_error.enter_context(mesh)
        member = Member(new_id(), str(at_mesh), beacon.enroll())
        client = Client(host, port, job, member, json.dumps(about), need)
        units = Units(member.id)
        members = Members(client, member, beacon, units, reports.note, wait, limit)
        on_error.callback(members.close)
        reports.heard = members.signs.notes
        units.note = reports.record = recording(member.id)
        rendezvous = Rendezvous(members, mesh, units, reports)
        link = ElasticLink(members, units, rendezvous, Reception(members, beacon, units), reports)
        on_error.callback(link.close)
        try:
            view = _found(members, need)
        except OtherProgramError as error:
            raise _different(error.about, about, job, client.at) from None
        if members.entered_view:
            link.begin(view.ids)
        open_links.add(link)
        on_error.pop_all()
    return link


def _found(members: Members, need: Need) -> View:
    """Wait for the first view of a run; or for the present view of a run under way, until one of
    its workers answers. Raises `LinkError`."""
    begun = time.monotonic()
    end, say = begun + members.wait, begun + SAY_SECONDS
    while True:
        view, lost, now = members.latest, members.coordinator_lost, time.monotonic()
        if view is not None and (members.entered_view or _answers(view, members.client.secret)):
            with members.changed:
                if members.latest is view:  # else there is a newer one, or another run
                    members.founding = False
                    return view
        if isinstance(lost, UntrustedError):
            raise lost
        if now >= end or members.closed:
            raise lost or _not_found(members, need)
        if now >= say:
            wanted = need.expected or need.start
            more = (
                "for more" if members.come < wanted else "until it is sure that no run is under way"
            )
            come = f"{members.come} of {wanted} workers have come to the coordinator"
            why = lost or f"{come} at {members.client.at}"
            log.warning("%s; waiting %s, up to %.0f s", why, more, end - now)
            say = now + (now - begun)
        with members.changed:
            if members.latest is view and members.coordinator_lost is lost:
                members.changed.wait(max(min(end, say) - now, 0.0) if view is None else BEAT)


def _answers(view: View, secret: bytes) -> bool:
    """Whether a worker of a run under way does."""
    answers = ask_all([m.beacon for m in view.members], secret)
    return not all(answer.lost for answer in answers)


def _not_found(members: Members, need: Need) -> LinkError:
    at = members.client.at
    if members.latest is not None:
        return LinkError(
            f"the workers of the run at {at} cannot be reached from here: are their addresses "
            "right, and their ports open?"
        )
    return LinkError(
        f"{members.come} of {need.start} workers have come to the coordinator at {at} within "
        f"{members.wait:g} s: start more workers, or lower workers= or min_workers="
    )


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
