"""Drives the rounds of a recipe for one model and optimiser, and owns all their state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic import batches, checkpoint
from laconic.errors import check_choice
from laconic.exchanges import Mean
from laconic.gradients import GradientRound
from laconic.lane import Lane
from laconic.links.link import Link
from laconic.links.metered import Ledger, Metered
from laconic.metrics import Metrics, Recorder
from laconic.round import Recipe, Round, describe
from laconic.running import RunningRound, Surroundings
from laconic.schedules import any_of
from laconic.scores import Scores
from laconic.tensors import (
    Scratch,
    bucketize,
    is_sharded,
    local,
    module_buffers,
    optimizer_state,
)
from laconic.updates import Average, Mix, Replace

SAVE = "laconic.save (a call of every rank, as each has state of its own)"
LOAD = "laconic.load"
"""The calls of `Synchronizer.gathering`, as errors name them on all ranks."""


@dataclass(frozen=True)
class Stats:
    """What a synchroniser did so far on this rank; payload bytes, seconds of waiting.

    ``seconds_waiting``: host time in which training stood still for a round. On CUDA a round
    that is not delayed waits on the card, which this does not see.
    """

    steps: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    bytes_by_collective: Mapping[str, int]
    seconds_waiting: float


class Synchronizer:
    """The rounds of ``recipe`` at work on ``model`` and ``optimizer``; made by `laconic.attach`.

    One step's way: ``backward()`` runs the gradient rounds; ``optimizer.step()`` moves x; the
    optimiser's post-step hook counts the step and, round by round in recipe order, folds what is
    due and sends what falls due.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        sets: Mapping[str, Link],
        device: torch.device,
        buffers: str,
        seed: int = 0,
    ) -> None:
        ledger = Ledger()
        self._links = {name: Metered(link, ledger) for name, link in sets.items()}
        self._world, self._workers = self._links["world"], self._links["workers"]
        self._ledger = ledger
        self._model = model
        self._optimizer = optimizer
        self._recipe = recipe
        self._average_buffers = check_choice("buffers", buffers, ("average", "keep")) == "average"
        threaded = self._world.threaded and self._world.size > 1
        self._lane = Lane(threaded, device, self._world.check)
        self._device = device
        self._sync_gradients = True
        self._fingerprint: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._rounds_done = 0
        self._seed = seed
        window = max((r.exchange.scored for r in recipe), default=0)
        self._scores = Scores(self._held, window) if window else None
        self._recorder = Recorder()
        self._in_consensus = False
        self.step = 0
        """Optimiser steps taken since `laconic.attach`."""
        self._agree_on_setup()
        self._broadcast()
        self._start_rounds()
        self._groups = len(optimizer.param_groups)
        self._handles += [
            optimizer.register_step_pre_hook(self._pre_hook),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._status("computing")

    # -- setting up ----

    def _agree_on_setup(self) -> None:
        groups = [
            [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
            for group in self._optimizer.param_groups
        ]
        rest = [*self._model.parameters(), *self._model.buffers()]
        shapes = [(tuple(t.shape), str(t.dtype)) for t in rest]
        text = repr((self._describe(), groups, shapes, self._workers.size))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        everyone = self._gather(torch.tensor([digest], dtype=torch.int64)).flatten().tolist()
        other = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
        if other:
            raise ValueError(
                f"ranks {other} attach something else than rank 0: recipe, buffers=, the model's "
                "parameters and buffers (shapes, dtypes) and the optimiser's groups (also "
                "requires_grad) must be alike"
            )

    def _describe(self) -> str:
        """What decides which rounds there are, but for the number of ranks."""
        own = tuple(r for r in self._recipe if r.over != "replica")
        buffers = "average" if self._average_buffers else "keep"
        groups = f", group_size={self._links['group'].size}" if "group" in self._links else ""
        return f"{describe(own)}, buffers={buffers}, seed={self._seed}{groups}"

    def _broadcast(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Rank 0's parameters and buffers to everyone; shards, to who holds the same shard."""
        if tensors is None:
            tensors = [*self._model.parameters(), *self._model.buffers(), *self._held()]
        unique = list({id(t): t for t in tensors}.values())
        shards = [t for t in unique if is_sharded(t)]
        whole = [t for t in unique if not is_sharded(t)]
        for link, those in ((self._world, whole), (self._workers, shards)):
            for bucket in bucketize([those], 1):
                flat = bucket.pack(bucket.empty())
                self._lane.call(partial(link.broadcast, flat), "sharing rank 0's parameters")
                bucket.unpack(flat)

    def _start_rounds(self) -> None:
        self._shared = Surroundings(
            self._model,
            self._optimizer,
            self._lane,
            Scratch(),
            Scratch(),
            self._links["replica"],
            self._scores,
            self._seed,
        )
        self._rounds = [
            RunningRound(r, self._links[r.over], self._shared) for r in self._all_rounds()
        ]
        self._names = [running.round.name for running in self._rounds]
        self._names += [
            "gradients",
            "first step",
            "groups added",
            "finish()",
            "consensus()",
            "mean()",
            "load_state_dict()",
            SAVE,
            LOAD,
        ]
        if len(self._names) > 256:
            raise ValueError(f"a recipe has at most 240 rounds, not {len(self._recipe)}")
        for running in self._rounds:
            running.grow()
        self._gradient_rounds = [
            (r, self._gradient_round(r)) for r in self._recipe if r.on == "gradients"
        ]

    def _gradient_round(self, r: Round) -> GradientRound:
        link = self._links[r.over]

        def active() -> bool:
            return self._sync_gradients and r.when(self.step + 1)

        def announce() -> str:
            if self.step == 0:
                self._note_fingerprint()
            label = f"{r.name} of step {self.step + 1}"
            self._status(label)
            code = self._names.index("gradients")
            self._lane.announce(partial(link.agree, self.step, code, self._names, wait=False))
            return label

        return GradientRound(link, self._lane, self._optimizer, active, announce)

    def _all_rounds(self) -> list[Round]:
        """The recipe's parameter rounds, each followed by the averaging of optimiser state that
        it asks for; and the averaging of module buffers with all of them."""
        rounds: list[Round] = []
        for r in self._recipe:
            if r.on == "params":
                rounds.append(r)
                if r.optimizer_state == "average":
                    rounds.append(Round(r.when, Average(), Mean(), optimizer_state, over=r.over))
        if self._average_buffers and module_buffers(self._model, self._optimizer)[0]:
            rounds += self._buffer_rounds(rounds)
        return rounds

    def _buffer_rounds(self, rounds: Sequence[Round]) -> list[Round]:
        """Module buffers along with ``rounds``, as late as these: mixed with those of the peers
        where a round gossips, which an average over all would make pointless; else averaged."""
        found: list[Round] = []
        for r in rounds:
            like = Round(r.when, Replace(), Mean(), module_buffers, over="world", delay=r.delay)
            if r.exchange.gossips:
                like = replace(like, update=Mix(), exchange=r.exchange, over=r.over)
            same = [f for f in found if replace(f, when=r.when) == like]
            if same:
                found[found.index(same[0])] = replace(like, when=any_of(same[0].when, r.when))
            else:
                found.append(like)
        return found

    # -- one step ----

    @torch.no_grad()
    def _before_step(self, closure: bool) -> None:
        """The optimiser is about to step; with a closure, its gradients are still to come."""
        if len(self._optimizer.param_groups) > self._groups:
            self._grow()
        if closure:
            for _, gradient_round in self._gradient_rounds:
                gradient_round.refresh()
        else:
            if self.step == 0:
                self._note_fingerprint()
            self.average_gradients()
        for running in self._rounds:
            running.before_step(self.step + 1)
        if self._scores is not None:
            self._scores.before_step()

    @torch.no_grad()
    def _after_step(self, *, skipped: bool = False) -> None:
        self.step += 1
        self._status("computing")
        if self.step == 1:
            self._note_fingerprint()
            self._call("first step", self.step)
            self._warn_of_identical_gradients()
        for r, gradient_round in self._gradient_rounds:
            gradient_round.after_step(r.when(self.step + 1))
        if self._scores is not None:
            self._scores.after_step()
        for running in reversed(self._rounds):
            running.after_step(self.step)
        for code, running in enumerate(self._rounds):
            running.fold_due(self.step)
            if running.round.when(self.step):
                self._run(code, running)
        self._recorder.after_step(skipped=skipped)

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [*args, options.get("closure")]
        closures = [g for g in given if callable(g) and not isinstance(g, Optimizer)]
        self._before_step(closure=bool(closures))

    def _run(self, code: int, running: RunningRound) -> None:
        if running.round.update.settles:
            for other in self._rounds:
                if other is not running:
                    other.settle(self.step, averaged=running.round.exchange.agrees)
        self._status(running.label(self.step))
        if running.communicates:
            agree = running.link.agree
            self._lane.announce(partial(agree, self.step, code, self._names, wait=False))
        running.start(self.step)
        self._rounds_done += 1
        self._status("computing")

    def _call(self, name: str, step: int) -> None:
        """Tell the other ranks which call of the user's comes next, after which step."""
        self._status(f"{name} after step {self.step}")
        code = self._names.index(name)
        self._lane.call(
            partial(self._world.agree, step, code, self._names, wait=True),
            f"{name} after step {self.step}",
        )

    def _status(self, text: str) -> None:
        self._world.status(f"{text} ({self.step} steps done)")

    def _grow(self) -> None:
        """Parameter groups were added: they join with rank 0's values."""
        new = self._optimizer.param_groups[self._groups :]
        self._call("groups added", self.step)
        self._agree_on_setup()
        self._broadcast([p for group in new for p in group["params"]])
        for running in self._rounds:
            running.grow()
        self._groups = len(self._optimizer.param_groups)

    # -- are the workers reading the same batches? ----

    def _note_fingerprint(self) -> None:
        if self._fingerprint is None:
            self._fingerprint = batches.fingerprint(self._held(), self._device)

    def _warn_of_identical_gradients(self) -> None:
        assert self._fingerprint is not None, "noted before or after the first step"
        batches.warn_if_identical(self._gather(self._fingerprint).tolist())

    def _gather(self, x: Tensor) -> Tensor:
        return self._lane.call(
            partial(self._world.gather, x.to(self._device)), "comparing the ranks"
        )

    # -- what the workers agree on ----

    @torch.no_grad()
    def _write_consensus(self) -> None:
        """Consensus weights (and averaged buffers) into the model: anchors where rounds keep
        them, and the mean over workers where these, or x, differ; without parameter rounds
        replicas are equal already."""
        for running in self._rounds:
            running.write_at_rest(self.step)
        anchored = [running for running in self._rounds if running.round.update.anchor]
        covered = {
            id(segment.tensor)
            for running in anchored
            if running.round.exchange.agrees
            for bucket in running.buckets
            for segment in bucket.segments
        }
        for running in anchored:
            running.write_anchor()
        if self._workers_differ():
            groups = [
                [p for p in group["params"] if id(p) not in covered]
                for group in self._optimizer.param_groups
            ]
            self._write_mean(groups, self._workers)
        if self._average_buffers:
            buffers = module_buffers(self._model, self._optimizer)
            self._write_mean([list(group.values()) for group in buffers], self._world)

    def _write_mean(self, groups: Sequence[Sequence[Tensor]], link: Link) -> None:
        for bucket in bucketize(groups, link.size):
            flat = bucket.pack(bucket.empty())
            self._lane.call(partial(link.mean, flat), "consensus")
            bucket.unpack(flat)

    def _workers_differ(self) -> bool:
        """Whether workers can hold different x: always, unless gradients alone are averaged."""
        kinds = {(r.on, r.over) for r in self._recipe}
        averaged = kinds & {("gradients", "world"), ("gradients", "workers")}
        return not averaged or any(on == "params" for on, _ in kinds)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """A context in which the model holds the consensus weights, for validation; every rank
        must enter it. Afterwards the worker's own weights are back, bit for bit.

        Needs room for one copy of the model."""
        tensors = [*self._held(), *self._model.buffers()]
        self._call("consensus()", self.step)
        kept = [local(t).clone() for t in tensors]
        self._in_consensus = True
        try:
            self._write_consensus()
            self._status("in consensus()")
            yield self._model
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                local(tensor).copy_(values)
            self._in_consensus = False
            self._status("computing")

    def consensus_state_dict(self) -> dict[str, Any]:
        """A copy of the model's ``state_dict()`` with the consensus weights, to ship. Every rank
        must call it."""
        with self.consensus() as model:
            return {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in model.state_dict().items()
            }

    @torch.no_grad()
    def finish(self) -> None:
        """Fold what is in flight and leave every worker with the consensus model.

        Every rank must call it, after the same number of steps. Training may go on afterwards.
        """
        self._call("finish()", self.step)
        for running in self._rounds:
            running.settle(self.step, averaged=True)
        self._write_consensus()
        self._recorder.event("finish")
        self._status("finished")

    @property
    def attached(self) -> bool:
        """Whether the optimiser's steps still run the rounds."""
        return bool(self._handles)

    def step_skipped(self) -> None:
        """Count a step that the optimiser did not take: a GradScaler skips one after an overflow,
        on this rank alone perhaps, and ranks that disagree on the step would wait in vain."""
        with torch.no_grad():
            self._before_step(closure=False)
            if self._scores is not None:
                self._scores.skip_step()
            self._after_step(skipped=True)

    def detach(self) -> None:
        """Take the hooks off the optimiser and the parameters; no communication. The model keeps
        the weights that it has."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for _, gradient_round in self._gradient_rounds:
            gradient_round.detach()
        self._lane.close()
        self._recorder.close()
        self._status("detached")

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._recorder.failed(error)
            broken = self._lane.abandon() or any(g.broken for _, g in self._gradient_rounds)
            self._world.leave(broken)
        self.detach()

    # -- saving ----

    def _held(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank saves its own, with its model's and optimiser's. Starts no
        communication; waits for what is in flight, and stores it as arrived but not folded."""
        return {
            **self._header(),
            "step": self.step,
            "rounds": [checkpoint.round_state(running) for running in self._rounds],
            "scores": None if self._scores is None else self._scores.state_dict(),
        }

    def _header(self) -> dict[str, Any]:
        return checkpoint.header(
            self._describe(),
            self._world.size,
            self._workers.size,
            self._world.rank,
            self._held(),
        )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Put back what `state_dict` returned: this rank's own, or, for another number of ranks,
        the list of all ranks' (sharded state is then cut anew). Every rank must call it, after
        `laconic.attach` and after loading the model's and the optimiser's own state.

        Raises ``ValueError`` on every rank where any of them cannot load its part.
        """
        parts = [state] if isinstance(state, Mapping) else list(state)
        self._call("load_state_dict()", 0)  # ranks may have come to it after different steps
        loaded: list[Callable[[], None]] = []
        problem = self._load(parts, loaded)
        everyone = self._gather(torch.tensor([float(problem is not None)])).flatten().tolist()
        failed = [rank for rank, value in enumerate(everyone) if value]
        if failed:
            raise ValueError(problem or f"ranks {failed} could not load their state: see there")
        for put_back in loaded:
            put_back()

    @property
    def rank(self) -> int:
        """This process's place among all ranks."""
        return self._world.rank

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._workers.size

    @contextmanager
    def gathering(self, call: str) -> Iterator[Callable[[Any], list[Any]]]:
        """A context for `SAVE` or `LOAD`, which every rank must enter: yields a function that
        returns what each rank passes to it (anything that JSON holds), by rank."""
        if self._in_consensus:
            raise ValueError(
                "inside sync.consensus() the model holds the consensus weights and not this "
                "worker's own: save and load outside it"
            )

        def gather(note: Any) -> list[Any]:
            self._call(call, self.step if call == SAVE else 0)  # before loading, steps may differ
            own = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
            lengths = self._gather(torch.tensor([len(own)])).flatten().tolist()
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(own)] = own
            rows = self._gather(padded).tolist()
            self._status(f"in {call}")
            return [json.loads(bytes(row[:n])) for row, n in zip(rows, lengths, strict=True)]

        yield gather
        self._status("computing")

    def _load(
        self, parts: Sequence[Mapping[str, Any]], loaded: list[Callable[[], None]]
    ) -> str | None:
        """Append to ``loaded`` what puts the state back; return what is wrong, if something is,
        rather than raise it on one rank alone."""
        try:
            mine = checkpoint.own_part(parts, self._header())
            for index, running in enumerate(self._rounds):
                rounds = [part["rounds"][index] for part in parts]
                loaded.append(checkpoint.load_round(running, rounds, mine))
            if self._scores is not None and mine is not None:
                loaded.append(self._scores.loader(parts[mine]["scores"]))
            loaded.append(partial(setattr, self, "step", int(parts[mine or 0]["step"])))
        except ValueError as error:
            return str(error)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            return f"this is not what sync.state_dict() returned: {type(error).__name__}: {error}"
        return None

    # -- for the user's loop ----

    def average_gradients(self) -> None:
        """Average the gradients now, if the recipe does so in this step and no backward pass did:
        for a rank that had no loss to differentiate, before it clips. ``optimizer.step()`` does it
        by itself otherwise."""
        for _, gradient_round in self._gradient_rounds:
            gradient_round.before_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes average no gradients, to accumulate several; those
        of the next backward pass outside it (or the step) are averaged as a whole."""
        before, self._sync_gradients = self._sync_gradients, False
        try:
            yield
        finally:
            self._sync_gradients = before

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the training loss of this step's batch, by which recipes with a leader choose it; no
        communication. For other recipes it does nothing."""
        if self._scores is not None:
            self._scores.report(float(torch.as_tensor(loss).detach()))

    def mean(self, value: Tensor | float) -> float:
        """The mean of a number (a loss) over all ranks; every rank must call it."""
        with torch.inference_mode(False):  # validation may run in that mode; the link does not
            own = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).clone()
        own = own.to(self._device)
        self._call("mean()", self.step)
        self._lane.call(partial(self._world.mean, own), "mean()")
        self._status("computing")
        return float(own)

    def record(self, places: Sequence[Metrics]) -> None:
        """Have ``places`` told how this run goes, from now on."""
        about = {
            "step": self.step,
            "rank": self._world.rank,
            "ranks": self._world.size,
            "workers": self._workers.size,
            "recipe": self._describe(),
            "schedule": [f"{r.name}, {r.when}" for r in self._recipe if r.over != "replica"],
        }
        self._recorder = Recorder(places, self.stats, self._ledger, self._optimizer, about)

    def stats(self) -> Stats:
        """Bytes, rounds and waiting so far, on this rank."""
        return Stats(
            self.step,
            self._rounds_done,
            self._ledger.bytes_sent,
            self._ledger.bytes_received,
            dict(self._ledger.by_collective),
            self._lane.seconds_waiting,
        )

    def observe_waiting(self, observer: Callable[[float, float], None]) -> None:
        """Have ``observer(start, end)`` (`time.perf_counter`) called after every time that training
        stood still for a round: what adds up to ``stats().seconds_waiting``."""
        self._lane.observer = observer
