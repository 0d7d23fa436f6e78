"""Views and members, as texts that come over the network."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.links.elastic.view import (
    ID_CHARACTERS,
    MOST_MEMBERS,
    MOST_WHY,
    Member,
    View,
    new_id,
    unpack_member,
)

KEY = "00" * 8
NO_VIEW = "a view has 1 to|not a view of laconic's"


def member(number: int) -> Member:
    where = [f"10.0.{number // 250}.{number % 250}|{port}|{KEY}" for port in (1001, 1002, 1003)]
    return Member(f"{number:012x}", *where)


A, B, C, D = (member(n) for n in range(1, 5))
IDS = st.text(string.hexdigits.lower()[:16], min_size=ID_CHARACTERS, max_size=ID_CHARACTERS)
ADDRESSES = st.builds(
    lambda host, port, key: f"{host}|{port}|{key.hex()}",
    st.ip_addresses().filter(lambda ip: ip.version == 4 or "%" not in str(ip)),
    st.integers(0, 2**16 - 1),
    st.binary(min_size=8, max_size=8),
)
MEMBERS = st.builds(Member, IDS, ADDRESSES, ADDRESSES, ADDRESSES)
WHY = st.text(st.characters(categories=["L", "N", "P"]), max_size=60)
VIEWS = st.builds(
    View,
    st.integers(0, 2**62),
    st.lists(MEMBERS, min_size=1, max_size=6, unique_by=lambda m: m.id).map(tuple),
    WHY,
    st.none() | st.tuples(IDS, WHY),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(view=VIEWS)
@settings(deadline=None)
def test_a_view_survives_the_way(view: View) -> None:
    there = View.unpack(view.pack())
    assert there == view and there.why == view.why and there.epoch == view.epoch


@given(text=st.text(max_size=200) | JSON.map(json.dumps))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ValueError) as error:
        View.unpack(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@given(view=VIEWS, at=st.lists(st.integers(0, 4), max_size=4), junk=JSON)
@settings(deadline=None)
def test_a_view_with_one_part_replaced_is_read_or_refused(
    view: View, at: list[int], junk: Any
) -> None:
    value: Any = json.loads(view.pack())
    part = value
    for index in at[:-1]:
        if isinstance(part, list) and index < len(part) and isinstance(part[index], list):
            part = part[index]
    part[at[-1] % len(part) if at else 0] = junk
    try:
        there = View.unpack(json.dumps(value))
    except ValueError:
        return
    assert 0 <= there.epoch <= 2**62 and 1 <= len(there.members) <= MOST_MEMBERS
    assert len(set(there.ids)) == len(there.members) and there.why.isprintable()
    assert all(member.name.isprintable() for member in there.members)
    assert View.unpack(there.pack()) == there


@given(text=st.text(max_size=200))
@settings(deadline=None)
def test_why_is_one_line_of_printable_text(text: str) -> None:
    view = View.unpack(packed(1, [A], text, [A.id, text]))
    assert view.why.isprintable() and len(view.why) == min(len(text), MOST_WHY)
    assert view.farewell is not None and view.farewell[0] == A.id
    assert view.farewell[1].isprintable()


def packed(epoch: Any, members: Any, why: Any = "", farewell: Any = None) -> str:
    return json.dumps([epoch, members, why, farewell])


def test_what_is_packed_is_a_view() -> None:
    """So what is said below to be none has one fault."""
    assert View.unpack(packed(1, [A, B])) == View(1, (A, B))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "[1, [], ''",
        packed(-1, [A]),
        packed(True, [A]),
        packed(1.0, [A]),
        packed("1", [A]),
        packed(2**62 + 1, [A]),
        packed(1, []),
        packed(1, None),
        packed(1, [A, B, A]),
        packed(1, [A, A._replace(mesh=B.mesh)]),
        packed(1, [A[:3]]),
        packed(1, [(*A, "more")]),
        packed(1, [A._replace(id="")]),
        packed(1, [A._replace(id=A.id[:-1])]),
        packed(1, [A._replace(id=A.id + "0")]),
        packed(1, [A._replace(id="not hex at.")]),
        packed(1, [A._replace(id="not hexadec.")]),
        packed(1, [A._replace(id="ABCDEF123456")]),
        packed(1, [A._replace(id="-0x123456789")]),
        packed(1, [A._replace(id="1_0_0_0_0_00")]),
        packed(1, [A._replace(id="\n 1234567890")]),
        packed(1, [A._replace(id=A.id[:-1] + "\n")]),
        packed(1, [A._replace(id="٠" * 12)]),
        packed(1, [A._replace(mesh=f"fe80::1%\x1b[2J|1|{KEY}")]),
        packed(1, [A._replace(beacon=f"fe80::1%\n|1|{KEY}")]),
        packed(1, [(1, *A[1:])]),
        packed(1, [A._replace(mesh="10.0.0.1")]),
        packed(1, [A._replace(mesh=f"host.name|1|{KEY}")]),
        packed(1, [A._replace(service=f"10.0.0.1|65536|{KEY}")]),
        packed(1, [A._replace(service=f"10.0.0.1|-1|{KEY}")]),
        packed(1, [A._replace(beacon=f"10.0.0.1|1|{KEY}00")]),
        packed(1, [A._replace(beacon="10.0.0.1|1|not hex")]),
        "[" * 30_000 + "]" * 30_000,
        "[" * 900 + "]" * 900,
        "1" * 10_000,
        packed(1, [A], "", 1),
        packed(1, [A], "", []),
        packed(1, [A], "", [A.id]),
        packed(1, [A], "", {}),
        json.dumps([1, [list(A)], ""]),
        json.dumps([1, [list(A)], "", None, "more"]),
    ],
)
def test_what_is_no_view(text: str) -> None:
    with pytest.raises(ValueError, match=NO_VIEW):
        View.unpack(text)


def test_the_most_members() -> None:
    members = tuple(member(n) for n in range(MOST_MEMBERS + 1))
    assert len(View.unpack(View(1, members[:-1]).pack()).members) == MOST_MEMBERS
    with pytest.raises(ValueError, match="1 to 4096 members"):
        View.unpack(View(1, members).pack())


@pytest.mark.parametrize("value", [None, 1, "", [], [1, 2, 3, 4], {"id": 1}, list(A)[:3]])
def test_what_is_no_member(value: Any) -> None:
    with pytest.raises(ValueError, match="a member is an id and three addresses"):
        unpack_member(value)


@given(value=MEMBERS)
@settings(deadline=None)
def test_a_member_survives_the_way(value: Member) -> None:
    assert unpack_member(json.loads(json.dumps(value))) == value


def test_names_and_ids() -> None:
    assert A.name == "000000000001 at 10.0.0.1"
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(unpack_member(list(A._replace(id=id))).id == id for id in ids)


def test_places() -> None:
    view = View(3, (C, A, B))
    assert view.ids == [C.id, A.id, B.id]
    assert [view.place(m.id) for m in (A, B, C, D)] == [1, 2, 0, None]


@pytest.mark.parametrize(
    ("lost", "newcomers", "members", "why"),
    [
        ({}, [], [A, B, C], "the connections are made again"),
        ({B.id: "has ended"}, [], [A, C], f"{B.name} has ended"),
        ({}, [D], [A, B, C, D], f"{D.name} joins"),
        (
            {A.id: "has ended", C.id: "leaves"},
            [D],
            [B, D],
            f"{A.name} has ended; {C.name} leaves; {D.name} joins",
        ),
        ({D.id: "has ended"}, [], [A, B, C], "the connections are made again"),
        ({}, [B], [A, B, C], "the connections are made again"),
        ({B.id: "has ended"}, [B], [A, C], f"{B.name} has ended"),
    ],
)
def test_the_view_after(
    lost: dict[str, str], newcomers: Sequence[Member], members: list[Member], why: str
) -> None:
    """Those that stay keep their order, and newcomers are at the end."""
    view = View(7, (A, B, C), "before")
    after = view.after(lost, newcomers)
    assert (after.epoch, list(after.members), after.why) == (8, members, why)
    assert view == View(7, (A, B, C), "before")
    assert View.unpack(after.pack()) == after


def test_newcomers_have_to_fit() -> None:
    """A view that nobody can read must not be proposed."""
    members = tuple(member(n) for n in range(MOST_MEMBERS + 2))
    after = View(1, members[:-3]).after({members[0].id: "leaves"}, members[-3:])
    assert after.members == members[1:-1]
    assert View.unpack(after.pack()) == after


def test_the_reasons_of_many_fit() -> None:
    members = tuple(member(n) for n in range(100))
    after = View(1, members).after({m.id: "has ended" for m in members[1:]}, [])
    assert after.members == members[:1] and len(after.why) == MOST_WHY
