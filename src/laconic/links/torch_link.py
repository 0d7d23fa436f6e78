"""The link over a process group of `torch.distributed`: connections of laconic's own for CPU
tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.buckets import Scratch, mean_in_rank_order
from laconic.errors import LinkError
from laconic.links import health
from laconic.links.calls import FINISH, Call, CallPosition
from laconic.links.handshake import SECRET_BYTES
from laconic.links.health import NOTHING, Answer, Request, Verdict
from laconic.links.link import Link, Parts, arrivals, hops
from laconic.links.rendezvous import ADVICE, UNREACHABLE_SECONDS, meeting
from laconic.links.wire import LostError, OtherCallError, Transfer, Wire

ADDRESS_BYTES = 256
FIRST_LOOK, LAST_LOOK = 1.0, 30.0
"""Seconds after which who waits asks where the other ranks are again, twice as long each time, up
to the second figure."""
WATCH_SECONDS = 0.5
"""How often a rank between two calls looks whether its connections still stand."""


class _Calls:
    """The calls that this process makes, over one link to all and those split from it: every rank
    makes the same ones in the same order. Its beacon tells others how far it has come, if they know
    the ``secret`` of the link, and takes in what they find wrong."""

    def __init__(self) -> None:
        self.position = CallPosition()  # only the thread that makes the calls changes it
        self.header = 0, 0
        """What messages carry: the call's serial number and id."""
        self._left = self._broken = False
        beacon = health.beacon()
        self.address = beacon.enroll()
        self.known = beacon.links[health.key_of(self.address)]

    @property
    def secret(self) -> bytes | None:
        """What all ranks of the link know, and nobody else."""
        return self.known.secret

    def share(self, secret: bytes, rank: int, others: Mapping[int, str]) -> None:
        """The ranks share ``secret`` from now on; ``others``: their addresses."""
        self.known.secret, self.known.rank, self.known.others = secret, rank, dict(others)

    def begin(self, call: Call) -> None:
        """The next call."""
        self._left = self._broken = False
        self.position = CallPosition(self.position.serial + 1, health.shown(call))
        self.header = self.position.serial, call.id
        self._tell()

    def leave(self, broken: bool) -> None:
        """No more calls; ``broken``: the last one stays unfinished."""
        self._left, self._broken = True, broken
        self._tell()

    def _tell(self) -> None:
        self.known.position = self.position._replace(left=self._left, broken=self._broken)

    @property
    def finished(self) -> bool:
        """Whether the last call was the one after which ranks may end."""
        call = self.position.call
        return call is not None and call.name == FINISH


_Answers = dict[int, Answer]
"""By rank of the link."""


class TorchLink:
    """Collectives over a process group of laconic's own.

    ``group``: the process group; ``device``: where the tensors are; ``ranks``: the members' ranks
    in the world, for messages. NCCL brings its own collectives. On the CPU every rank sends
    straight to every other and sums in rank order, which the simulator can repeat. Measured with
    4 ranks and 3.5 MB at 100 Mbit/s, a mean takes 1.01 times bytes over rate, as gloo's
    all-reduce does; gloo's own all-to-all takes 1.2 times and its reduce-scatter 2.1 times theirs.
    """

    threaded = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
        calls: _Calls | None = None,
    ) -> None:
        self._group, self._made = group, False
        self._native = device.type == "cuda"
        self._device = device
        self._timeout = timeout
        self.rank = group.rank()
        self.size = group.size()
        self._ranks = list(range(self.size)) if ranks is None else list(ranks)
        self._scratch = Scratch()
        self._calls = calls or _Calls()
        self.joined = time.perf_counter()
        self._beacon = health.beacon()
        self._addresses: list[str] = []
        self._answered: set[int] = set()
        """The ranks whose beacons have answered: one that is gone then has ended."""
        self._closed: set[int] = set()
        """The ranks that have closed their connections in order."""
        self._unreachable: dict[int, float] = {}
        """Since when (`time.monotonic`) there is no connection to a rank's beacon."""
        self._looked, self._look_at, self._patience = -1, 0.0, FIRST_LOOK
        self._watched = 0.0
        seconds = timeout.total_seconds()
        self._wire = Wire(self.rank, health.own_address(), seconds, self._ranks)
        try:
            self._connect()
        except BaseException:
            self._wire.close()
            raise

    @classmethod
    def world(cls, device: torch.device, timeout: timedelta) -> TorchLink:
        """The link over all ranks of the initialised default process group."""
        found = meeting()
        if found is None:
            group = dist.new_group(timeout=timeout)
        else:
            found.meet(timeout.total_seconds())
            with found.together():
                group = dist.new_group(timeout=timeout)
        link = cls(group, device, timeout)
        link._made = True
        return link

    def _connect(self) -> None:
        """Learn the addresses of the other ranks' beacons and rank 0's secret, and connect."""
        own = f"{self._calls.address}/{self._wire.address}/{secrets.token_hex(SECRET_BYTES)}"
        told = [said.split("/") for said in self._share(own)]
        self._addresses = [beacon for beacon, _, _ in told]
        if self._calls.secret is None:
            others = {self._ranks[r]: address for r, address in enumerate(self._addresses)}
            del others[self._ranks[self.rank]]
            self._calls.share(bytes.fromhex(told[0][2]), self._ranks[self.rank], others)
        assert self._calls.secret is not None, "shared now"
        wires = [] if self._native else [address for _, address, _ in told]
        near = [address.startswith(("127.", "::1|")) for address in wires]
        if any(near) and not all(near):
            name = self._ranks[near.index(True)]
            raise LinkError(
                f"rank {name} knows no address of its host but 127.0.0.1: "
                "set MASTER_ADDR there, or GLOO_SOCKET_IFNAME to the interface to use",
                ranks=[name],
            )
        try:
            self._wire.connect(wires, self._calls.secret, self._check_connecting)
        except LinkError as error:
            self._conclude(str(error), error.ranks, error)  # tells it to those who still wait

    def _check_connecting(self) -> None:
        """Raise if a rank's process has ended while ranks wait to be connected."""
        self._heed()
        if self._due():
            answers = self._ask()
            if any(answer.missing == "gone" for answer in answers.values()):
                self._blame(answers, "while the ranks connected")

    def _heed(self, error: Exception | None = None) -> None:
        """Raise what another rank found wrong."""
        verdict = self._calls.known.verdict
        if verdict is not None:
            raise LinkError(verdict.text, ranks=verdict.ranks) from None

    def _share(self, text: str) -> list[str]:
        """Every rank's text, by way of the process group."""
        padded = torch.tensor(list(text.encode().ljust(ADDRESS_BYTES)), dtype=torch.uint8)
        rows = [torch.empty_like(padded, device=self._device) for _ in range(self.size)]
        own = padded.to(self._device)
        self._wait(dist.all_gather(rows, own, group=self._group, async_op=True))
        return [bytes(row.tolist()).decode().strip() for row in rows]

    # -- the call announced, and errors ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self._heed()
        self._calls.begin(call)
        if not (wait or self._native):
            return False  # the headers of the call's messages carry its id
        ids = self.gather(torch.tensor([call.id])).flatten().tolist()
        other = [r for r, number in enumerate(ids) if number != call.id]
        if other:
            answers = self._ask(ranks=other)
            serial = self._calls.position.serial
            positions = {r: self._position(answers.get(r), serial) for r in other}
            self._refuse({**{r: self._calls.position for r in range(self.size)}, **positions})
        return True

    def _position(self, answer: Answer | None, serial: int) -> CallPosition:
        """Where a rank is that has sent something of another call, its ``serial``-th: as its beacon
        says, if it answers."""
        position = None if answer is None else answer.position
        mine = self._calls.position
        if position is None or (position.serial, position.call) == (mine.serial, mine.call):
            return CallPosition(serial)
        return position

    def check(self) -> None:
        if self._wire.forked:
            raise LinkError("a forked process cannot use its parent's link: start it by spawn")
        try:
            self._heed()
            if self._due():
                self._look()
        except LinkError:
            self._wire.shutdown()  # for the thread that waits for messages
            raise

    def _due(self) -> bool:
        """Whether to ask the others again now."""
        now, serial = time.monotonic(), self._calls.position.serial
        if serial != self._looked:
            self._looked, self._look_at, self._patience = serial, now, FIRST_LOOK
        if now < self._look_at:
            return False
        if not self._unreachable:  # else at every look
            self._look_at = now + self._patience
            self._patience = min(2 * self._patience, LAST_LOOK)
        return True

    def _look(self) -> None:
        answers = self._ask()
        self._heed()
        positions = {r: a.position for r, a in answers.items() if a.position is not None}
        self._compare({**positions, self.rank: self._calls.position})
        if self._native:
            return  # who is lost NCCL tells, and nothing else is known of its connections
        serial, closed = self._calls.position.serial, self._wire.closed()
        for r, answer in answers.items():
            ended = r in self._answered or r in closed  # and not kept away by a firewall
            if answer.missing == "gone" and ended and self._departed(r) < serial:
                self._blame(answers, "its connection is closed")
        now, lost = time.monotonic(), dict[int, Answer]()
        for r, answer in answers.items():
            if answer.missing != "unreachable":
                self._unreachable.pop(r, None)
                continue
            silence = now - self._unreachable.setdefault(r, now)
            if min(silence, self._wire.heard(r)) >= UNREACHABLE_SECONDS:
                lost[r] = answer
        if lost:
            self._blame(answers, f"nothing came from it for {UNREACHABLE_SECONDS:g} s", only=lost)

    def check_peers(self) -> None:
        now = time.perf_counter()
        if self._native or now - max(self._watched, self.joined) < WATCH_SECONDS:
            return
        self._watched, status = now, self._beacon.status
        try:
            self._heed()
            self._watch()
        except LinkError as error:
            at = f"{status}, between rounds (the last one: {self._calls.position})"
            self._wire.shutdown()
            raise LinkError(f"{at}: {error}", ranks=error.ranks) from None

    def _watch(self) -> None:
        """Raise if a connection is closed that should not be."""
        ended = {r: e for r, e in self._wire.closed().items() if r not in self._closed}
        if not ended or self._calls.finished:
            return
        answers = self._ask()
        for r, failed in ended.items():
            if self._departed(r) >= 0 or not (failed or answers[r].lost):
                self._closed.add(r)  # in order, or it lives and has closed its link
            elif failed or answers[r].missing == "gone":
                self._blame(answers, "its connection is closed")

    def _departed(self, rank: int) -> int:
        """After how many calls ``rank``'s process ended in order; -1: it did not, as far as is
        known."""
        return self._calls.known.left.get(self._ranks[rank], -1)

    def leave(self, broken: bool) -> None:
        self._calls.leave(broken)

    def _compare(self, positions: Mapping[int, CallPosition]) -> None:
        """Raise if the ranks (of this link) are known to be at ``positions`` that cannot meet."""
        mine = self._calls.position
        if any(
            (p.serial == mine.serial and (p.call != mine.call or p.broken))
            or (p.serial < mine.serial and p.left)
            for p in positions.values()
        ):
            self._refuse(positions)

    def _refuse(self, positions: Mapping[int, CallPosition]) -> NoReturn:
        """The ranks (of this link) are at ``positions``, which cannot meet."""
        where = "; ".join(f"rank {self._ranks[r]}: {positions[r]}" for r in sorted(positions))
        text = (
            f"the ranks are at different places ({where}). Every rank must take the same "
            "optimiser steps and make the same laconic calls; a GradScaler that skips steps "
            "is passed as attach(..., scaler=)"
        )
        # whoever has not seen it yet will only see this process end
        self._conclude(text, [self._ranks[r] for r, p in positions.items() if p.left or p.broken])

    def _ask(self, request: Request = NOTHING, ranks: Sequence[int] = ()) -> _Answers:
        """What the other ranks of this link say, or the other ones of ``ranks``; and tell them
        something."""
        secret = self._calls.secret
        others = [r for r in ranks or range(self.size) if r != self.rank]
        if secret is None:  # the ranks have not met
            return {}
        addresses = [self._addresses[r] for r in others]
        said = health.ask_all(addresses, secret, self._ranks[self.rank], request)
        answers = dict(zip(others, said, strict=True))
        for r, answer in answers.items():
            if answer.verdict is not None:
                self._calls.known.take(answer.verdict)
            if not answer.lost:
                self._answered.add(r)
        return answers

    def _blame(
        self,
        answers: _Answers,
        reason: str,
        error: Exception | None = None,
        only: Iterable[int] = (),
    ) -> NoReturn:
        """Conclude from the other ranks' ``answers`` who is to blame for the ``reason`` why this
        rank cannot go on: a rank that does not answer, or else one that has ended, or else one
        that has not come so far; or ``only`` those. One that has stopped because of another rank
        says so."""
        self._heed(error)
        mine = self._calls.position.serial
        silent = list(only)
        silent = silent or [r for r, a in answers.items() if a.missing in ("silent", "unreachable")]
        gone = [r for r, a in answers.items() if a.missing == "gone" and self._departed(r) < mine]
        behind = [r for r, a in answers.items() if a.position and a.position.serial < mine]
        blamed = silent or gone or behind
        parts = []
        for r in silent + gone or behind or answers:
            answer, departed = answers[r], self._departed(r)
            said = answer.status if answer.lost else f"is {answer.status}"
            if answer.missing == "gone" and departed >= 0:
                said = f"has left: its program ended in order after call {departed} of {mine}"
            parts.append(f"rank {self._ranks[r]} {said}")
        if len(silent) == self.size - 1 > 1:
            parts.append("all others at once: this rank's own network may be down")
        who = "; ".join(parts) or "a rank was lost before the ranks had met"
        text = f"{who}. {ADVICE}. ({reason})"
        self._conclude(text, [self._ranks[r] for r in blamed], error, answers)

    def _conclude(
        self,
        text: str,
        ranks: Iterable[int],
        error: Exception | None = None,
        answers: _Answers | None = None,
    ) -> NoReturn:
        """Tell all ranks of the link that can be told (all but those that are missing from
        ``answers``), and raise it; or what another one has found before."""
        known = self._calls.known
        known.take(Verdict(text, tuple(sorted(ranks)), self._ranks[self.rank]))
        self.status("stopped")
        lost = {r for r, answer in (answers or {}).items() if answer.lost}
        self._ask(Request(known.verdict), [r for r in range(self.size) if r not in lost])
        self._wire.shutdown()  # no message comes any more; this wakes who waits for one
        self._heed(error)
        raise AssertionError("there is a verdict")

    def _wait(self, *works: dist.Work | None) -> None:
        try:
            for work in works:
                assert work is not None, "this process is not a member of its own process group"
                work.wait()
        except RuntimeError as error:
            self._lost(error)
        self.joined = time.perf_counter()

    def _lost(self, error: RuntimeError) -> NoReturn:
        self._heed(error)
        self._blame(self._ask(), str(error).splitlines()[0], error)

    def status(self, text: str) -> None:
        self._beacon.set(text)

    def close(self) -> None:
        self._wire.close()
        if self._made:
            self._made = False
            dist.destroy_process_group(self._group)
            del self._group  # torch closes its connections once nobody holds it

    # -- point to point ----

    def _post(
        self, sends: Sequence[Tensor], receives: Sequence[Tensor], *, ready: bool = True
    ) -> Transfer:
        """``sends[r]`` to every other rank r that there is one for, and theirs into
        ``receives[r]``, all of one length and all at once; or, where they are not ``ready``, each
        when it is."""
        others = hops(self.rank, self.size)[:-1]
        return self._begin(
            {r: sends[r] for r in others if r < len(sends)},
            {r: receives[r] for r in others if r < len(receives)},
            ready=ready,
        )

    def _begin(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, ready: bool = True
    ) -> Transfer:
        with self._named():
            return self._wire.post(sends, receives, self._calls.header, ready=ready)

    def _send(self, transfer: Transfer, rank: int, size: int) -> None:
        """Begin to send the first ``size`` bytes of what is for ``rank``, which are ready now."""
        with self._named():
            transfer.send(rank, size)

    def _finish(self, transfer: Transfer, rank: int | None = None, size: int | None = None) -> None:
        """Until the first ``size`` bytes from ``rank`` are here, None: all of them; without a rank
        until all is done."""
        with self._named():
            transfer.wait(rank, size)
        self.joined = time.perf_counter()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error in here is raised as one that names the ranks that it is about."""
        try:
            yield
        except OtherCallError as error:
            if error.place == self._calls.header:  # a message of another length
                self._conclude(str(error), [], error)
            answer = self._ask(ranks=[error.rank]).get(error.rank)
            self._heed(error)
            there = self._position(answer, error.place[0])
            self._refuse({error.rank: there, self.rank: self._calls.position})
        except LostError as error:
            self._lost(error)

    def _exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        self._finish(self._post(sends, receives))

    # -- collectives ----

    def mean(self, x: Tensor) -> None:
        if self.size == 1:
            return
        if self._native and x.is_cuda:
            self._wait(dist.all_reduce(x, dist.ReduceOp.AVG, group=self._group, async_op=True))
        elif self._native:  # a buffer on the CPU, by gloo, whose older versions have no AVG
            self._wait(dist.all_reduce(x, group=self._group, async_op=True))
            x.div_(self.size)
        elif x.numel() % self.size:
            x.copy_(mean_in_rank_order(self.gather(x).unbind()))
        else:
            self.all_gather(self.reduce_scatter(x), x)

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        if self._native:
            return self._native_reduce_scatter(x, owners)
        slices = x.view(owners or self.size, -1).unbind()
        if self.rank >= len(slices):
            self._exchange(slices, [])
            return x[:0]
        length = slices[0].numel()
        room = self._scratch.take((self.size - 1) * length, x.dtype, x.device)
        pieces = list(torch.split(room, length)) if self.size > 1 else []
        pieces.insert(self.rank, slices[self.rank])
        transfer = self._post(slices, pieces)

        def arrived() -> Iterator[Tensor]:
            for r, piece in enumerate(pieces):
                if r != self.rank:
                    self._finish(transfer, r)
                yield piece

        mean = mean_in_rank_order(arrived(), reuse=True, out=slices[self.rank])
        self._finish(transfer)
        return mean

    def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        slices = list(out.view(owners or self.size, -1).unbind())
        order = [r for r in arrivals(self.rank, self.size) if r < len(slices)]
        parts = parts or Parts([len(slices[0])])
        if self._native or len(parts.ends) == 1:
            parts.fill_all([r for r in order if r == self.rank])
        if self._native:
            self._native_all_gather(mine, out, slices)
            parts.use_all(order)
            return
        if self.rank not in order:
            transfer = self._post([], slices)
        else:
            own = slices[self.rank]
            fill = parts.fill if len(parts.ends) > 1 else None
            if fill is None and mine.data_ptr() != own.data_ptr():
                own.copy_(mine)
            transfer = self._post([own] * self.size, slices, ready=fill is None)
            if fill is not None:
                for part in parts:
                    fill(self.rank, part)
                    if mine.data_ptr() != own.data_ptr():
                        own[part].copy_(mine[part])
                    for r in hops(self.rank, self.size)[:-1]:
                        self._send(transfer, r, part.stop * out.element_size())
        self._take(transfer, parts, order, out.element_size())

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        order = hops(self.rank, self.size)
        parts = parts or Parts([x.shape[1]])
        if self._native or len(parts.ends) == 1:
            parts.fill_all(order)
        if self._native:
            self._wait(dist.all_to_all_single(out, x, group=self._group, async_op=True))
            parts.use_all(arrivals(self.rank, self.size))
            return
        rows, fill = list(out.unbind()), parts.fill if len(parts.ends) > 1 else None
        transfer = self._post(x.unbind(), rows, ready=fill is None)
        if fill is not None:
            for part in parts:
                for r in order:
                    fill(r, part)
                    if r != self.rank:
                        self._send(transfer, r, part.stop * x.element_size())
        rows[self.rank].copy_(x[self.rank])
        self._take(transfer, parts, arrivals(self.rank, self.size), x.element_size())

    def _take(self, transfer: Transfer, parts: Parts, order: Sequence[int], itemsize: int) -> None:
        """Until all is there, and each of the ``parts`` is used once it is."""
        use = parts.use
        if use is not None:
            for part in parts:
                for r in order:
                    if r != self.rank:
                        self._finish(transfer, r, part.stop * itemsize)
                    use(r, part)
        self._finish(transfer)

    def _native_reduce_scatter(self, x: Tensor, owners: int | None) -> Tensor:
        op, slices = dist.ReduceOp.AVG, x.view(owners or self.size, -1).unbind()
        if len(slices) < self.size:  # NCCL reduces to one rank, or cuts for all of them
            for r, piece in enumerate(slices):
                root = dist.get_global_rank(self._group, r)
                self._wait(dist.reduce(piece, root, op, group=self._group, async_op=True))
            return slices[self.rank] if self.rank < len(slices) else x[:0]
        own = torch.empty_like(slices[0])
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self._wait(reduce_scatter(own, x, op, group=self._group, async_op=True))
        return own

    def _native_all_gather(self, mine: Tensor, out: Tensor, slices: Sequence[Tensor]) -> None:
        if len(slices) < self.size:
            for r, piece in enumerate(slices):
                if r == self.rank:
                    piece.copy_(mine)
                self.broadcast(piece, r)
            return
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._wait(all_gather(out, mine.to(out.dtype), group=self._group, async_op=True))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        room = self._scratch.take(x.numel() * len(source), x.dtype, x.device)
        pieces = list(room.view(-1, x.numel()).unbind())
        assert len({*to}) == len(to) and len({*source}) == len(source), "one message each"
        come, go = dict(zip(source, pieces, strict=True)), dict.fromkeys(to, x)
        if self._native:
            self._wait(*self._batch(come, go))
        else:
            self._finish(self._begin(go, come))
        return pieces

    def _batch(
        self, come: Mapping[int, Tensor], go: Mapping[int, Tensor]
    ) -> list[dist.Work | None]:
        """Messages by rank, all at once: NCCL ends a receive before it begins a send that was not
        grouped with it, and two ranks that exchange would each wait for the other."""
        ops = [
            dist.P2POp(op, x, dist.get_global_rank(self._group, r), self._group)
            for op, messages in ((dist.irecv, come), (dist.isend, go))
            for r, x in messages.items()
        ]
        try:
            return [*dist.batch_isend_irecv(ops)] if ops else []
        except RuntimeError as error:
            self._lost(error)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        source = dist.get_global_rank(self._group, root)
        try:
            work = dist.broadcast(x, source, group=self._group, async_op=True)
        except RuntimeError as error:
            self._lost(error)
        self._wait(work)

    def gather(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        everyone = x.new_empty(self.size, *x.shape)
        everyone[self.rank] = x
        rows = list(everyone.unbind())
        if self._native:
            self._wait(dist.all_gather(rows, x, group=self._group, async_op=True))
            return torch.stack(rows)
        self._exchange([rows[self.rank]] * self.size, rows)
        return everyone

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        mine: tuple[dist.ProcessGroup, list[int]] | None = None
        for ranks in sets:  # torch has every rank make every group, its own or not
            everywhere = [dist.get_global_rank(self._group, r) for r in ranks]
            group = dist.new_group(everywhere, timeout=self._timeout)
            if self.rank in ranks:
                mine = group, [self._ranks[r] for r in ranks]
        assert mine is not None, "every rank belongs to one of the sets"
        link = TorchLink(mine[0], self._device, self._timeout, mine[1], self._calls)
        link._made = True
        return link
