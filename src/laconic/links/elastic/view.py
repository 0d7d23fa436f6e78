"""Views: who takes part. A worker has a permanent id; its rank is its place in the view."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from laconic.links.addresses import Address
from laconic.links.texts import clean

ID_CHARACTERS = 12
_ID = re.compile(f"[0-9a-f]{{{ID_CHARACTERS}}}")
MOST_MEMBERS = 4096
NONCE_BITS = 20
"""The last bits of an epoch are those of the coordinator that has decided it: two coordinators
decide no view of one epoch."""
MOST_WHY = 1000


class Member(NamedTuple):
    """One worker. ``id`` is drawn when its process attaches, and never used again. ``mesh`` and
    ``beacon``: where it accepts the connections of a view; and newcomers, and questions about its
    health (`laconic.links.addresses.Address` as text)."""

    id: str
    mesh: str
    beacon: str

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self.id} at {self.mesh.partition('|')[0]}"


@dataclass(frozen=True)
class View:
    """``epoch``: grows with every view of a run. A member's place in ``members`` is its rank.
    Newcomers are at the end; they are active from the next step on."""

    epoch: int
    members: tuple[Member, ...]
    why: str = ""
    """What has changed, for messages."""
    farewells: tuple[tuple[str, str], ...] = ()
    """The ids of the workers of the view before that are gone, and what they said last."""

    @property
    def number(self) -> int:
        """Counts the views of a run from 1."""
        return self.epoch >> NONCE_BITS

    @property
    def ids(self) -> list[str]:
        """The members' ids, in order."""
        return [member.id for member in self.members]

    def after(self, lost: Mapping[str, str], newcomers: Sequence[Member]) -> View:
        """The next view, but for its epoch: without the ``lost`` members (by id, and why) and with
        ``newcomers`` at its end."""
        members = [m for m in self.members if m.id not in lost]
        new = [m for m in newcomers if m.id not in self.ids][: MOST_MEMBERS - len(members)]
        why = [f"{m.name} {lost[m.id]}" for m in self.members if m.id in lost]
        why += [f"{m.name} joins" for m in new]
        text = "; ".join(why) or "the connections are made again"
        return View(self.epoch, (*members, *new), text[:MOST_WHY])

    def pack(self) -> str:
        """As text."""
        members = [list(member) for member in self.members]
        return json.dumps([self.epoch, members, self.why, self.farewells])

    @classmethod
    def unpack(cls, text: str) -> View:
        """From any text; raises ``ValueError``."""
        try:
            epoch, members, why, farewells = json.loads(text)
            known = tuple(unpack_member(m) for m in members)
            said = tuple((str(id), clean(str(note))) for id, note in farewells)
            view = cls(int(epoch), known, clean(str(why))[:MOST_WHY], said)
        except (ArithmeticError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise ValueError(f"not a view of laconic's: {error}") from None
        if not (1 <= len(view.members) <= MOST_MEMBERS and 0 <= view.epoch <= 2**62):
            raise ValueError(f"a view has an epoch and 1 to {MOST_MEMBERS} members")
        if len(set(view.ids)) < len(view.ids):
            raise ValueError("not a view of laconic's: a member is in it twice")
        return view


def unpack_member(value: Any) -> Member:
    """From what JSON holds; raises ``ValueError``."""
    match value:
        case [str(id), *texts] if _ID.fullmatch(id) and len(texts) == 2:
            addresses = [str(Address.parse(str(text))) for text in texts]
            if all(address.isprintable() for address in addresses):
                return Member(id, *addresses)
    raise ValueError("a member is an id and two addresses")


def new_id() -> str:
    """A permanent id for a worker."""
    return secrets.token_hex(ID_CHARACTERS // 2)
