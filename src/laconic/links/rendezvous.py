"""How ranks wait for each other before they have a link: by the store of torch's process group.

A rank that calls `Rendezvous.exchange` puts a text into the store, and the address of its beacon,
and waits for those of the others. So an error can name a rank that never comes, and a rank whose
process has ended is noticed at once.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch.distributed as dist

from laconic.errors import LinkError
from laconic.links import health, job_secret, long_wait, tls
from laconic.links.handshake import SECRET_BYTES
from laconic.links.health import Unreachable
from laconic.links.long_wait import LongWait
from laconic.links.texts import clean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TLS, PLAIN = "tls", "plain"
FIRST_POLL, LAST_POLL = 0.01, 0.5
ASK_SECONDS = 1.0
"""How often a rank asks the beacons of the ranks that have not come."""
LINGER_SECONDS = 5.0
"""How long rank 0 waits, before it raises, for the other ranks to read the verdict: the store may
end with its process."""
ADVICE = (
    "Look at that rank's own output, then start all ranks again from the last checkpoint; "
    "where a rank is only slow, pass a longer timeout= to laconic.attach"
)


def publish() -> None:
    """Publish the address of this process's beacon, so that the other ranks notice if it ends
    before there is a link. Does nothing without a process group of several ranks."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None and group.size() > 1:
        Rendezvous.of(group).publish()


class Entry(NamedTuple):
    """What a rank puts into the store: a ``problem`` with its settings; or whether it uses TLS
    (``how``), the fingerprint of its job's secret, and the address of its beacon. And its
    ``text``."""

    problem: str = ""
    how: str = PLAIN
    fingerprint: str = ""
    beacon: str = ""
    text: str = ""


def _wrong(rank: int, entry: Entry, first: Entry) -> str:
    """What is wrong with the ``entry`` of a rank, where another one has put ``first``; empty if
    nothing is."""
    who = f"rank {rank}"
    if entry.problem:
        return f"{who}: {entry.problem}"
    if first.problem or entry[1:3] == first[1:3]:
        return ""
    if entry.how == first.how:
        return job_secret.difference(who, entry.fingerprint, first.fingerprint)
    uses, does = ("uses", "does not") if entry.how == TLS else ("does not use", "does")
    return (
        f"{who} {uses} TLS, and the first worker {does}: set the variables that `laconic keys` "
        "prints for every worker, or for none"
    )


def _late(ranks: Sequence[int], seconds: float) -> dict[int, str]:
    return dict.fromkeys(ranks, f"has not come within {seconds:g} s")


def _in_words(said: Mapping[int, str]) -> str:
    return "; ".join(f"rank {r} {text}" for r, text in said.items())


class Rendezvous:
    """Rank ``rank`` of ``size`` that share torch's ``store``."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store = dist.PrefixStore("laconic", store)  # type: ignore[attr-defined]
        self.secret = b""
        """What all ranks know, and nobody else, once they have met."""
        self._problem: ValueError | LinkError | None = None
        """What is wrong with this rank's settings, raised in `exchange` by every rank."""
        self._unreachable = Unreachable()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Rendezvous:
        """The rendezvous of the ranks of a process ``group``, at its store."""
        store = dist.distributed_c10d._get_process_group_store(group)
        return cls(store, group.rank(), group.size())

    def publish(self) -> Entry:
        """Put the settings of this rank, and the address of its beacon, into the store."""
        try:
            shared, own = job_secret.read(), job_secret.fingerprint()
            how = PLAIN if tls.contexts() is None else TLS
            if shared is None:
                drawn = secrets.token_hex(SECRET_BYTES)
                with self._failing():
                    found = self._store.compare_set("secret", "", drawn)
                self.secret = bytes.fromhex(found.decode())
            else:
                self.secret = job_secret.derive(shared, "rendezvous")
            beacon = health.beacon().enroll(self.secret)
            entry = Entry(how=how, fingerprint=own, beacon=beacon)
        except (ValueError, LinkError) as error:
            self._problem = error
            return Entry(str(error))
        with self._failing():
            self._store.set(f"beacon/{self._rank}", json.dumps(entry))
        return entry

    def exchange(self, text: str, timeout: float) -> list[str]:
        """Wait until all ranks have called it as often as this one, and return their texts, by
        rank. Raises `LinkError`, and ``ValueError`` where this rank's settings are wrong."""
        entry = self.publish()._replace(text=text)
        with self._failing():
            number = self._store.add(f"meetings/{self._rank}", 1)
            here = dist.PrefixStore(  # type: ignore[attr-defined]
                f"meeting/{number}", self._store
            )
            here.set(f"rank/{self._rank}", json.dumps(entry))
            here.add("count", 1)
        start = time.monotonic()
        deadline, ask_at, pause = start + timeout, start + ASK_SECONDS, FIRST_POLL
        come: dict[int, Entry] = {}
        wait = LongWait()
        while True:
            with self._failing():
                if here.add("count", 0) > len(come):
                    come |= self._read(here, "rank", set(range(self._size)) - set(come))
                    self._compare(here, come)
                if here.check(["verdict"]):
                    self._raise(here, come)
            if len(come) == self._size:
                return [come[r].text for r in range(self._size)]
            now = time.monotonic()
            if now >= ask_at or now >= deadline:
                ask_at = now + ASK_SECONDS
                missing = sorted(set(range(self._size)) - set(come))
                lost = self._lost(here, missing, come)
                if (long := wait.due(number, now)) and self._rank == min(come):
                    why = _in_words(_late(missing, round(long)))
                    at = missing, long, "laconic.attach", why, timeout
                    long_wait.report(self._rank, *at)
                if not lost and now >= deadline:
                    lost = _late(missing, timeout)
                if lost:
                    text = f"waiting for all ranks: {_in_words(lost)}. {ADVICE}"
                    self._conclude(here, text, list(lost))
                    continue
            time.sleep(pause)  # a wait on the store itself would block other threads
            pause = min(1.5 * pause, LAST_POLL)

    def _read(self, store: Store, key: str, ranks: Iterable[int]) -> dict[int, Entry]:
        """What those of the ``ranks`` have put into the ``store`` that have."""
        there = [r for r in ranks if store.check([f"{key}/{r}"])]
        return {r: Entry(*json.loads(store.get(f"{key}/{r}"))) for r in there}

    def _compare(self, here: Store, entries: Mapping[int, Entry]) -> None:
        """Conclude that a rank's settings are wrong, if one's are."""
        for r in sorted(entries):
            if text := _wrong(r, entries[r], entries[min(entries)]):
                self._conclude(here, text, [r])

    def _conclude(self, here: Store, text: str, ranks: Sequence[int]) -> None:
        """Have all ranks raise ``text``, which blames the ``ranks``. The first verdict counts."""
        with self._failing():
            here.compare_set("verdict", "", json.dumps([text, ranks]))

    def _lost(
        self, here: Store, missing: Sequence[int], come: Mapping[int, Entry]
    ) -> dict[int, str]:
        """The ``missing`` ranks that cannot come, according to their beacons, and why."""
        with self._failing():
            known = self._read(self._store, "beacon", missing)
            self._compare(here, {**come, **known})
        addresses = [entry.beacon for entry in known.values()]
        answers = dict(zip(known, health.ask_all(addresses, self.secret), strict=True))
        lost = self._unreachable.lost(answers, time.monotonic())
        lost += [r for r, answer in answers.items() if answer.missing == "gone"]
        return {r: answers[r].status for r in lost}

    def _raise(self, here: Store, come: Mapping[int, Entry]) -> NoReturn:
        """Raise the verdict. Rank 0 first waits for the others to read it."""
        text, ranks = json.loads(here.get("verdict"))
        readers, until = here.add("readers", 1), time.monotonic() + LINGER_SECONDS
        expected = self._size - len([r for r in ranks if r not in come])
        while self._rank == 0 and readers < expected and time.monotonic() < until:
            time.sleep(FIRST_POLL)
            readers = here.add("readers", 0)
        if self._problem is not None:
            raise self._problem
        raise LinkError(text, ranks=tuple(ranks))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A context for the store: an error inside names the process that holds the store."""
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            # torchrun's agent holds the store in some setups, rank 0 in all others
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            keeper = "the launcher" if agent else "rank 0"
            reason = clean(str(error).splitlines()[0])
            raise LinkError(
                f"the connection to torch's store is lost: {keeper}, which keeps it, is gone. "
                f"{ADVICE}. ({reason})",
                ranks=[] if agent else [0],
            ) from error
