"""What the parts of one synchronizer share: the model, the links, the communication thread, and
the calls that all ranks make together."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.round import Recipe
from laconic.buckets import Bucket, Scratch, bucketize
from laconic.engine.comparison import check_first_gradients, fingerprint, held_by_all
from laconic.engine.recorder import Recorder
from laconic.errors import LinkError, after_step, error_text
from laconic.links.agreement import agree
from laconic.links.calls import Call
from laconic.links.comm_thread import CommThread
from laconic.links.elastic.inside import Inside
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.rank_link import RankLink
from laconic.links.link import Link
from laconic.links.metered import Ledger, Metered
from laconic.links.texts import exchange_texts
from laconic.tensors import as_bytes, is_sharded, local, parts, reshard

Sets = Mapping[str, Link]
"""The links by set of ranks."""
PROBLEM = 2**64 - 1
"""The `Call.digest` of a rank that cannot make the call. Digests of values are smaller."""


@dataclass(frozen=True)
class Choice:
    """A policy's choice after ``step``: the recipe's text, the measured facts (of `auto`,
    `laconic.policy.facts.Facts`), and the reason."""

    step: int
    text: str
    facts: Any
    reason: str


class Joining(Protocol):
    """A worker that has loaded the state of an elastic run, and has taken no step."""

    def arrive(self) -> None:
        """Take part from the next step on."""

    def finish(self) -> None:
        """Load what `Synchronizer.finish` leaves on the others."""


class Policy(Protocol):
    """Changes the recipe while a run goes on, such as `laconic.auto`."""

    text: str
    """The call that makes it, such as ``auto()``: the same on all ranks and in saved states."""
    choices: list[Choice]
    """The choices so far, for `Synchronizer.choices`."""

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""

    def start(self, session: Session) -> None:
        """Called once, when the ranks have met, and before any round: it may change `recipe`."""

    def after_step(self) -> bool:
        """Return whether `recipe` has changed. Every rank calls it after the same steps."""

    def state_dict(self) -> dict[str, Any]:
        """The policy's state as plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the present state after a `load_state_dict`."""

    def handover(self) -> dict[str, Any]:
        """Return what another worker needs to continue from this step: `state_dict` and more, as
        plain data with tensors. Waits for what its collectives bring."""

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Continue from another worker's `handover`."""


Buffers = Literal["average", "keep", "broadcast"]
"""What happens to the module's buffers."""


@dataclass(frozen=True)
class Settings:
    """What a front end decides, for every recipe of the run.

    ``buffers``: the choice of `laconic.attach`. ``arrange``: adapts a recipe to the layout of
    ranks. ``scaler``: the GradScaler, unless there is none, or it checks for no overflow.
    ``policy``: what changes the recipe, if anything does. ``hooked``: the optimizer's hooks run the
    rounds; otherwise the front end calls `Driver.advance`. ``elastic``: the link to all workers,
    where they come and go; ``inside``: the other ranks of this worker then. ``offload``: outer
    state is in host memory.
    """

    buffers: Buffers
    arrange: Callable[[Recipe], Recipe]
    seed: int = 0
    scaler: torch.amp.GradScaler | None = None
    policy: Policy | None = None
    hooked: bool = True
    elastic: ElasticLink | RankLink | None = None
    inside: Inside = field(default_factory=Inside)
    offload: bool = False


class Session:
    """The model, its optimizer and the ranks that train it.

    ``step``: optimizer steps taken so far.
    ``before_call()`` prepares what runs for a call of all workers; it returns whether they have
    taken different numbers of steps.
    """

    def __init__(
        self, model: nn.Module, sets: Sets, settings: Settings, before_call: Callable[[], bool]
    ) -> None:
        self.model = model
        self.optimizer: Optimizer | None = None
        self.device = device = next(model.parameters()).device
        self.settings = settings
        self.policy = settings.policy
        """What changes the recipe; None once the user has switched."""
        self._before_call = before_call
        self.ledger = Ledger()
        self.links = {name: Metered(link, self.ledger, name) for name, link in sets.items()}
        self.world, self.workers = self.links["world"], self.links["workers"]
        self.elastic, self.inside = settings.elastic, settings.inside
        self.newcomer: Joining | None = None
        """Until this worker takes part in the rounds of an elastic run that was under way."""
        if self.elastic is None:
            threaded = self.world.threaded and self.world.size > 1
            self.comm = CommThread(threaded, device, self.world.check, queues=self.world.queues)
        else:
            at = self.elastic.threaded, device, self.world.check, self.elastic.unit
            self.comm = CommThread(*at, interrupt=self.elastic.interrupt)
            self.elastic.wake = self.comm.poke
        self.recorder = Recorder()
        self.scratch: defaultdict[int, Scratch] = defaultdict(Scratch)
        """Memory for the messages of parameter rounds, by number: see `memory`."""
        self._first_gradients: Tensor | None = None
        """The `fingerprint` of this rank's first gradients, before any averaging."""
        self.step = 0
        self.in_step = False
        """Whether a step of the optimizer has begun that is not counted yet."""
        self.round_seconds = 0.0
        """Processor seconds in which the training thread sent and folded parameter rounds."""
        self.sync_gradients = True
        """Whether backward passes average gradients."""
        self.holds_consensus: bool | None = None
        """The ``mean`` of the consensus that the model holds; None: it holds the worker's x."""
        self._interrupted: str | None = None
        """See `at_work`."""
        self._order: list[Tensor] = []
        self._x: dict[int, Tensor] = {}
        """The optimizer's parameters that have joined x, by id."""

    # -- parameters ----

    def bind(self, optimizer: Optimizer) -> None:
        """Let ``optimizer`` move the parameters. What it trains joins x, unless it is in x."""
        self.optimizer = optimizer
        self.join(self.joining())

    @property
    def bound(self) -> Optimizer:
        """The optimizer, where there must be one."""
        assert self.optimizer is not None, "the optimizer is bound"
        return self.optimizer

    def held(self) -> list[list[Tensor]]:
        """All parameters of the optimizer, by parameter group."""
        if self.optimizer is None:
            return [list(self.model.parameters())]
        return [group["params"] for group in self.optimizer.param_groups]

    def groups(self) -> list[list[Tensor]]:
        """The papers' x, by parameter group: what the optimizer trains. A parameter joins x when
        it first requires a gradient, or has one, and stays. One that is frozen from the start
        never leaves rank 0's value, so rounds would send it, and round it, in vain."""
        if self.optimizer is None:
            return self.held()
        return [[p for p in group if id(p) in self._x] for group in self.held()]

    def params(self) -> list[Tensor]:
        """The papers' x."""
        return [p for group in self.groups() for p in group]

    def joining(self, *, fixed: bool = False) -> list[Tensor]:
        """The parameters that are trained now and are not in x: they were added to the optimizer,
        or thawed. `join` takes them in. Parameters that are no longer the optimizer's leave x;
        where rounds are about a ``fixed`` x, that raises ``ValueError``."""
        held = [p for group in self.held() for p in group]
        gone = self._x.keys() - {id(p) for p in held}
        if gone and fixed:
            shapes = ", ".join(str(tuple(self._x[key].shape)) for key in sorted(gone)[:3])
            raise ValueError(
                f"{len(gone)} parameters that laconic keeps in step are no longer in the optimizer "
                f"(of shape {shapes}): they were replaced or removed. Before such a change call "
                "sync.finish() and sync.detach(), and laconic.attach after it"
            )
        for key in gone:
            del self._x[key]
        others = [p for p in held if id(p) not in self._x]
        own = {id(p) for p in self.model.parameters()} if others else ()
        return [
            p for p in others if p.requires_grad or p.grad is not None or _moved_outside(p, own)
        ]

    def join(self, params: Sequence[Tensor]) -> None:
        """Take ``params`` into x. Every rank must have given them the same values."""
        self._x.update((id(p), p) for p in params)

    def join_at(self, positions: Collection[int]) -> Callable[[], None]:
        """Let x be the parameters at these ``positions`` in the optimizer's order; others that are
        trained join it with the next step. Returns a function that undoes it."""
        before = self._x
        held = [p for group in self.held() for p in group]
        if max(positions, default=-1) >= len(held):
            raise ValueError(
                f"the state was saved with {max(positions) + 1} parameters or more, and the "
                f"optimizer has {len(held)}: add the same groups before loading it"
            )
        self._x = {}
        self.join([held[k] for k in sorted(positions)])
        return partial(setattr, self, "_x", before)

    @property
    def sharded(self) -> bool:
        """Whether each rank of a worker has only a part of the model."""
        return any(is_sharded(p) for p in self.params())

    def note_order(self) -> None:
        """Record the module's parameters: during backward FSDP replaces them."""
        reshard(self.model)
        own: list[Tensor] = list(self.model.parameters())
        self._order = own if any(is_sharded(p) for p in own) else []

    def differentiated(self) -> list[Tensor]:
        """The parameters that receive gradients, in the module's order.

        Backward passes reach them in roughly the reverse order. The optimizer's order would not
        do: with weight decay for some parameters only, the first gradients would wait for the last.
        A front end's optimizer may move copies in another precision, so there all of the module's
        parameters count.
        """
        params = [p for group in self.held() for p in group]
        own = self._order or list(self.model.parameters())
        wanted, known = {id(p) for p in params}, {id(p) for p in own}
        hooked = self.settings.hooked
        first = [p for p in own if not hooked or id(p) in wanted]
        rest = [p for p in params if id(p) not in known and (hooked or p.grad_fn is None)]
        return first + rest

    def memory(self, bucket: Bucket, number: int = 0) -> Tensor:
        """Memory for one flat copy of ``bucket``, until that of this ``number`` is asked for
        again."""
        return self.scratch[number].take(bucket.length, bucket.dtype, bucket.device)

    # -- calls that all ranks make together ----

    def status(self, text: str) -> None:
        """Record what this rank is doing, for other ranks' error messages."""
        self.world.status(f"{text} ({self.step} steps done)")

    def call(self, name: str, step: int | None = None, problem: str | None = None) -> None:
        """Tell the other ranks which call comes next; raise on all if they make different ones, or
        if any has a ``problem``, as `agree` does. ``step``: None for the present one."""
        label = f"{name} {after_step(self.step)}"
        if self.newcomer is not None:
            raise LinkError(
                f"this worker has just joined the run, and {name} comes before its first step: "
                "take an optimizer step first"
            )
        self.status(label)
        if self._before_call():
            step = 0
        at = self.step if step is None else step
        call = Call(at, name, digest=0 if problem is None else PROBLEM)
        self.comm.call(partial(self.world.begin_call, call, wait=True), label)
        digests = self.world.digests()
        if PROBLEM in (call.digest, *digests) or (self.world.queues and not digests):
            agree(self.gather, problem)

    @contextmanager
    def checked(self, name: str, step: int | None = None) -> Iterator[None]:
        """A context for checks of arguments, at whose end the `call` begins. What is raised inside,
        all ranks raise as a ``ValueError``, and can go on."""
        try:
            yield
        except Exception as error:
            self.call(name, step, error_text(error))
            raise
        self.call(name, step)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x``, stacked."""
        gathered: Tensor = self.comm.call(partial(self.world.gather, x), "comparing the ranks")
        return gathered

    def gather_json(self, value: Any) -> list[Any]:
        """What each rank passes (anything that JSON can hold), by rank."""
        job = partial(exchange_texts, self.world.gather, json.dumps(value))
        return [json.loads(text) for text in self.comm.call(job, "comparing the ranks")]

    def from_rank_0(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's numbers, as many on every rank."""
        flat = torch.tensor(numbers, dtype=torch.float64)
        self.comm.call(partial(self.world.broadcast, flat), "sharing rank 0's optimizer state")
        received: list[float] = flat.tolist()
        return received

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's ``tensors`` to all ranks; a shard, to the ranks with the same shard."""
        unique = {str(id(t)): t for t in tensors}
        for link, named in self.by_link(unique):
            whole = named.values()
            data = [as_bytes(part) for t in whole for part in parts(local(t)).values()]
            for bucket in bucketize([data], 1):
                flat = bucket.pack(bucket.empty())
                self.comm.call(partial(link.broadcast, flat), "sharing parameters")
                bucket.unpack(flat)

    def state(self) -> dict[str, Tensor]:
        """All parameters and buffers of the module, and parameters that only the optimizer has, by
        name."""
        model = self.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        known = {id(t) for t in named.values()}
        groups = enumerate(self.held())
        own = {f"{g} {i}": p for g, group in groups for i, p in enumerate(group)}
        return named | {f"parameter {k}": p for k, p in own.items() if id(p) not in known}

    def by_link(self, tensors: Mapping[str, Tensor]) -> list[tuple[Link, dict[str, Tensor]]]:
        """``tensors`` by the link to those who have the same: all ranks, or, of shards, those with
        the same shard."""
        shards = {name: t for name, t in tensors.items() if is_sharded(t)}
        whole = {name: t for name, t in tensors.items() if name not in shards}
        return [(self.world, whole), (self.workers, shards)]

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``tensors`` that all ranks have, but not with the same values; of shards, those
        that differ from the same shard of other workers. Raises ``ValueError``, on all of these
        ranks, if one of them cannot be written."""
        found: dict[str, Tensor] = {}
        for link, those in self.by_link(tensors):
            if those or link is self.world:  # other ranks may have buffers that this one lacks
                job = partial(held_by_all, link, [those], differing=True)
                found.update(self.comm.call(job, "comparing the models")[0])
        names = self.inside.union(list(found))
        return {name: t for name, t in tensors.items() if name in names}

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all ranks rank 0's values of the ``tensors`` that differ."""
        self.broadcast(list(self.differing(tensors).values()))

    def share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, after a step."""
        call = Call(self.step, "sharing buffers")
        self.status("sharing buffers")
        self.comm.before_next(partial(self.world.begin_call, call, wait=False))
        self.share(dict(self.model.named_buffers()))
        self.status("computing")

    def write_mean(self, groups: Sequence[Sequence[Tensor]], link: Link) -> None:
        """Replace the tensors of ``groups`` by their mean over the ranks of ``link``."""
        multiple = 1 if self.elastic is not None else link.size  # workers come and go meanwhile
        for bucket in bucketize(groups, multiple):
            flat = bucket.pack(bucket.empty())
            self.comm.call(partial(link.mean, flat), "consensus")
            bucket.unpack(flat)

    def note_first_gradients(self) -> Tensor:
        """Note, once, and return what the ranks compare after the first step."""
        if self._first_gradients is None:
            self._first_gradients = fingerprint(self.params(), self.device)
        return self._first_gradients

    def check_first_step(self) -> None:
        """Compare the ranks' first gradients: see `check_first_gradients`."""
        own = self.note_first_gradients()
        self.call("first step")
        check_first_gradients(self.gather(own))

    # -- how far this worker is ----

    def begin_step(self) -> None:
        """A step of the optimizer begins."""
        self.in_step = True

    def count_step(self) -> None:
        """The optimizer's step was taken, or skipped."""
        self.step, self.in_step = self.step + 1, False

    def leave_step(self) -> None:
        """The step that has begun is not counted: laconic follows the optimizer no longer."""
        self.in_step = False

    @contextmanager
    def at_work(self, rounds: str) -> Iterator[None]:
        """A context in which ``rounds`` are at work. If an exception ends them, such as one that a
        signal handler raises, `check_complete` raises from then on."""
        self._interrupted = rounds
        yield
        self._interrupted = None

    @contextmanager
    def timing_rounds(self) -> Iterator[None]:
        """A context whose processor time `round_seconds` counts."""
        start = time.thread_time()
        yield
        self.round_seconds += time.thread_time() - start

    def hold_consensus(self, mean: bool | None) -> None:
        """The model holds the consensus of this ``mean``; None: the worker's x again."""
        self.holds_consensus = mean

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Synchronizer.no_sync`."""
        before, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = before

    def wait_as(self, newcomer: Joining | None) -> None:
        """This worker takes part once ``newcomer`` has arrived; with None, now."""
        self.newcomer = newcomer

    def end_policy(self) -> None:
        """The user has chosen the recipe."""
        self.policy = None

    def follow(self, optimizer: Optimizer) -> None:
        """Let ``optimizer``, which moves the same parameters, replace the bound one."""
        self.optimizer = optimizer

    def restart(self, step: int, *, in_step: bool) -> None:
        """Go on after ``step``, or in the next one: a state was loaded."""
        self.step, self.in_step, self._interrupted = step, in_step, None

    def check_complete(self) -> None:
        """Raise if rounds were interrupted. The other ranks have what they brought."""
        if self._interrupted is not None and not self.comm.failed:
            raise LinkError(
                f"{self._interrupted} were interrupted on this rank by an exception, and it lacks "
                "what they brought: start again from the last checkpoint, on every rank"
            )

    def refuse_in_consensus(self, call: str) -> None:
        """Raise where a call needs, or would change, the worker's own weights."""
        if self.holds_consensus is not None:
            raise ValueError(
                f"{call} inside sync.consensus(), where the model holds the consensus weights, and "
                "not this worker's own: call it after the `with` block"
            )


def _moved_outside(p: Tensor, own: Collection[int]) -> bool:
    """Whether ``p`` is a copy that an optimizer moves in place of one of the model's parameters,
    whose ids are ``own``: it gets its gradients from a front end."""
    return id(p) not in own and (p.is_floating_point() or p.is_complex())
