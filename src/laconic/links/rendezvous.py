"""How ranks wait for each other before they have a link: by the store of torch's process group.

A rank that calls `Rendezvous.exchange` puts a text into the store, and the address of its beacon,
and waits for those of the others. So an error can name a rank that never comes, and a rank whose
process has ended is noticed at once.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from laconic.errors import LinkError
from laconic.links import health, job_secret, long_wait, tls
from laconic.links.handshake import SECRET_BYTES
from laconic.links.health import Verdict
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
UNREACHABLE_SECONDS = 10.0
"""A rank counts as lost if its host cannot be reached for so long. A network that restarts a switch
needs less, and waiting for the timeout, which may be minutes, would gain nothing."""
ADVICE = (
    "Look at that rank's own output, then start all ranks again from the last checkpoint; "
    "where a rank is only slow, pass a longer timeout= to laconic.attach"
)


def default_rendezvous() -> Rendezvous | None:
    """At the store of torch's default process group; None if that has one rank, or no store
    (MPI's)."""
    store = dist.distributed_c10d._get_default_store()
    return None if store is None or dist.get_world_size() == 1 else Rendezvous(store)


def publish() -> None:
    """Publish the address of this process's beacon, so that the other ranks notice if it ends
    before there is a link. Does nothing without a process group of several ranks."""
    found = default_rendezvous() if dist.is_initialized() else None
    if found is not None:
        found.publish()


def _difference(who: str, how: str, own: str, first: str) -> str:
    """What is wrong with ``who``, where ``first`` is what the first rank has said."""
    other, _, fingerprint = first.partition(" ")
    if how == other:
        return job_secret.difference(who, own, fingerprint)
    uses, does = ("uses", "does not") if how == TLS else ("does not use", "does")
    return (
        f"{who} {uses} TLS, and the first worker {does}: set the variables that `laconic keys` "
        "prints for every worker, or for none"
    )


class Rendezvous:
    """The ranks of torch's default process group, and its ``store``."""

    def __init__(self, store: Store) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._raw = store
        self._store = dist.PrefixStore("laconic", store)  # type: ignore[attr-defined]
        self._problem: ValueError | LinkError | None = None
        """What is wrong with this rank's settings, raised in `exchange` by every rank."""
        with self._failing():
            try:
                shared, own = job_secret.read(), job_secret.fingerprint()
                how = PLAIN if tls.contexts() is None else TLS
            except ValueError as error:
                self._secret = b""
                self._note(error)
                return
            said = self._text(self._store.compare_set("keys", "", f"{how} {own}"))
            if said != f"{how} {own}":
                said = self._differ(_difference(f"rank {self._rank}", how, own, said))
                # the others raise it in `exchange`; rank 0 too, since the store may end with it
                if self._rank != 0:
                    self._refuse(said)
            if shared is None:
                drawn = secrets.token_hex(SECRET_BYTES)
                found = self._text(self._store.compare_set("secret", "", drawn))
                self._secret = bytes.fromhex(found)
            else:
                self._secret = job_secret.derive(shared, "rendezvous")

    def _note(self, problem: ValueError | LinkError) -> None:
        """Note what is wrong with this rank's settings, and tell the others."""
        self._problem = problem
        self._differ(f"rank {self._rank}: {problem}")

    def _differ(self, text: str) -> str:
        """Tell all ranks what is wrong with this one. Returns the verdict that counts."""
        verdict = health.pack_verdict(Verdict(text, (self._rank,), self._rank))
        return self._text(self._store.compare_set("differs", "", verdict.decode()))

    def publish(self) -> None:
        """Put the address of this process's beacon into the store."""
        if self._problem is not None:
            return
        with self._failing():
            try:
                address = health.beacon().address_for(self._secret)
            except (ValueError, LinkError) as error:
                self._note(error)
            else:
                self._store.set(f"beacon/{self._rank}", address)

    def exchange(self, text: str, timeout: float) -> list[str]:
        """Wait until all ranks have called it as often as this one, and return their texts, by
        rank. Raises `LinkError`, and ``ValueError`` where this rank's settings are wrong."""
        self.publish()
        with self._failing():
            number = self._store.add(f"meetings/{self._rank}", 1)
            here = dist.PrefixStore(  # type: ignore[attr-defined]
                f"meeting/{number}", self._store
            )
            here.set(f"rank/{self._rank}", text)
            here.add("count", 1)
        start = time.monotonic()
        deadline, ask_at, pause = start + timeout, start + ASK_SECONDS, FIRST_POLL
        since: dict[int, float] = {}
        wait = LongWait()
        while True:
            with self._failing():
                complete = here.add("count", 0) >= self._size
                if self._store.check(["differs"]):  # written before that rank was counted
                    here.compare_set("verdict", "", self._text(self._store.get("differs")))
                if here.check(["verdict"]):
                    self._raise(here)
                if complete:
                    return [self._text(here.get(f"rank/{r}")) for r in range(self._size)]
            now = time.monotonic()
            if now >= ask_at or now >= deadline:
                with self._failing():
                    missing = [r for r in range(self._size) if not here.check([f"rank/{r}"])]
                ask_at = now + ASK_SECONDS
                said = self._lost(missing, since)
                lost, why = list(said), "; ".join(f"rank {r} {text}" for r, text in said.items())
                long = wait.due(number, now)
                if long and missing and self._rank == min({*range(self._size)} - {*missing}):
                    at = "laconic.attach", self._late(missing, round(long)), timeout
                    long_wait.report(self._rank, missing, long, *at)
                if not lost and missing and now >= deadline:
                    lost, why = missing, self._late(missing, timeout)
                if lost:
                    text = f"waiting for all ranks: {why}. {ADVICE}"
                    verdict = health.pack_verdict(Verdict(text, tuple(lost), self._rank))
                    with self._failing():  # the first verdict counts
                        here.compare_set("verdict", "", verdict.decode())
                        self._raise(here)
            time.sleep(pause)  # a wait on the store itself would block other threads
            pause = min(1.5 * pause, LAST_POLL)

    def _late(self, missing: list[int], timeout: float) -> str:
        return "; ".join(f"rank {r} has not come within {timeout:g} s" for r in missing)

    def _lost(self, missing: list[int], since: dict[int, float]) -> dict[int, str]:
        """The ``missing`` ranks that cannot come, according to their beacons, and why; ``since``:
        when each first was unreachable."""
        with self._failing():
            known = [r for r in missing if self._store.check([f"beacon/{r}"])]
            addresses = [self._text(self._store.get(f"beacon/{r}")) for r in known]
        answers = health.ask_all(addresses, self._secret, self._rank)
        lost, now = {}, time.monotonic()
        for r, answer in zip(known, answers, strict=True):
            if answer.missing != "unreachable":
                since.pop(r, None)
            first = since.setdefault(r, now) if answer.missing == "unreachable" else now
            if answer.missing == "gone" or now - first >= UNREACHABLE_SECONDS:
                lost[r] = answer.status
        return lost

    def _raise(self, here: Store) -> NoReturn:
        """Raise the verdict. Rank 0 first waits for the others to read it."""
        text = self._text(here.get("verdict"))
        verdict = self._verdict(text)
        gone = [r for r in verdict.ranks if not here.check([f"rank/{r}"])]
        readers, until = here.add("readers", 1), time.monotonic() + LINGER_SECONDS
        while self._rank == 0 and readers < self._size - len(gone) and time.monotonic() < until:
            time.sleep(FIRST_POLL)
            readers = here.add("readers", 0)
        self._refuse(text)

    def _verdict(self, text: str) -> Verdict:
        verdict = health.unpack_verdict(text.encode())
        assert verdict is not None, "only ranks of the job write it"
        return verdict

    def _refuse(self, text: str) -> NoReturn:
        if self._problem is not None:
            raise self._problem
        verdict = self._verdict(text)
        raise LinkError(verdict.text, ranks=verdict.ranks)

    def _text(self, value: bytes) -> str:
        return bytes(value).decode()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A context for the store: an error inside names the process that holds the store."""
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            reason = clean(str(error).splitlines()[0])
            store = self._raw
            while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
                store = store.underlying_store
            if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
                raise LinkError(
                    f"torch's store fails while ranks wait for each other: {reason}"
                ) from error
            # torchrun's agent holds the store in some setups, rank 0 in all others
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            keeper = "the launcher" if agent else "rank 0"
            raise LinkError(
                f"the connection to torch's store at {store.host}, port {store.port}, is lost: "
                f"{keeper}, which keeps it, is gone. {ADVICE}. ({reason})",
                ranks=[] if agent else [0],
            ) from error
