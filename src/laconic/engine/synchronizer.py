"""The facade of the engine: what users call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe
from laconic.engine import consensus
from laconic.engine.driver import Driver
from laconic.engine.recorder import Stats
from laconic.engine.session import Choice
from laconic.errors import WorkersChangedError, check_bool
from laconic.links.calls import FINISH
from laconic.links.metered import CallTotals
from laconic.links.polls import Closing
from laconic.metrics import JsonLines

SAVE = "laconic.save (every rank must call it)"
LOAD = "laconic.load"
"""The calls of `Synchronizer.gathering`, as errors name them on all ranks."""
HALF_A_STEP = (
    "backward() has averaged this step's gradients in codes, and a resumed run would do it again, "
    "with other numbers: save after optimizer.step(), or after optimizer.zero_grad() in its place"
)
ELASTIC_SWITCH = (
    "an elastic run cannot switch, since newcomers start with the recipe of the start: finish, and "
    "attach again under another job= with the new recipe"
)


@dataclass(frozen=True)
class WorkersView:
    """Who takes part.

    Attributes:
        epoch: counts the changes of an elastic run; it is 0 where workers do not come and go.
        workers: the workers' permanent ids, by rank.
        place: this worker's rank.

    Examples:
        >>> laconic.attach(model, optimizer, laconic.ddp()).view
        WorkersView(epoch=0, workers=('0',), place=0)
    """

    epoch: int
    workers: tuple[str, ...]
    place: int


class Synchronizer:
    """Keeps a model in step with the other ranks' by the rounds of a recipe.

    `laconic.attach` makes it, and says what happens in each step. ``driver`` is for front ends.

    Examples:
        >>> with laconic.attach(model, optimizer, laconic.local_sgd(8)) as sync:
        ...     for _ in range(20):
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         optimizer.step()
        ...     with sync.consensus():
        ...         validated = model(torch.randn(8, 4))
        >>> sync.step
        20
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        driver.facade = self
        self._session = driver.session

    # -- what the workers agree on ----

    @contextmanager
    def consensus(self, *, mean: bool = True) -> Iterator[nn.Module]:
        """A context in which the model holds the consensus weights, for validation.

        Every rank must enter it. The model holds what `finish` would leave now: the mean of the
        workers' models, and rank 0's integers. Afterwards the worker's own weights are back, bit
        for bit. Steps of the optimizer are refused inside. Inside another `consensus` of the same
        kind it does nothing. Needs memory for one copy of the trained parameters and buffers.
        Optimizers with ``train()`` and ``eval()`` modes, such as schedule-free ones, are in eval
        mode inside, which needs another copy.

        Args:
            mean: False: what the last outer step or elastic round left (the anchor, the center)
                where the recipe keeps such a model; it lacks the steps taken since.
        """
        with consensus.consensus(self.driver.run, mean=mean) as model:
            self.driver.ending.missing = False
            yield model

    def consensus_state_dict(self) -> dict[str, Any]:
        """A copy of the model's ``state_dict()`` with the consensus weights, to ship. Every rank
        must call it."""
        with self.consensus() as model:
            return deepcopy(model.state_dict())  # with its attribute: the modules' versions

    @torch.no_grad()
    def finish(self, *, mean: bool = True) -> None:
        """Leave every worker with the consensus model: the mean of the workers' models, which
        contains every step taken. That includes what no round is about, as far as it differs:
        buffers, and parameters that the optimizer does not move, such as a teacher's. Integers and
        tensors that are not plain have no mean, and become rank 0's.

        Nothing is in flight afterward. Every rank must call it, after the same number of steps.
        Training may go on afterward. A program that ends without it, although its ranks hold
        different models, logs a warning on every rank.

        Args:
            mean: False: see `consensus`; it discards the steps since the last outer step.
        """
        session, run = self._session, self.driver.run
        session.check_complete()
        if session.newcomer is not None:
            session.newcomer.finish()
            session.status("finished")
            return
        with session.checked(FINISH):
            session.refuse_in_consensus("sync.finish()")
            session.joining(fixed=bool(run.rounds))  # raises if x is no longer the optimizer's
            check_bool("mean", mean)
        consensus.write_consensus(run, mean=mean)
        if session.elastic is not None:
            session.gather_json(None)  # after that all have it, and any may end
        if not mean:
            run.rebase()
        self.driver.tell("finish", mean)
        self.driver.ending.missing = False
        session.recorder.event("finish")
        session.status("finished")

    @torch.no_grad()
    def switch(self, recipe: Recipe | str) -> None:
        """Go on under another ``recipe``; every rank must call it, after the same step.

        Nothing is in flight afterward, and all workers start again from the consensus, the mean of
        their models, and from the mean of their optimizers' state where they differed: with AdamW
        that sends about as much as four models. State that some ranks lack starts again. Numbers in
        it, and the GradScaler, continue as rank 0's. The state that rounds keep starts again, too:
        gradients that a codec has not sent yet are dropped.

        Raises ``ValueError``, on every rank, where they ask for different ones.
        """
        session = self._session
        session.check_complete()
        if session.elastic is not None:
            raise ValueError(ELASTIC_SWITCH)
        with session.checked("switch()"):
            given = as_recipe(recipe)
            if not isinstance(given, tuple):
                raise ValueError(f"sync.switch() takes a recipe, and {given!r} is for attach()")
            session.refuse_in_consensus("sync.switch()")
            if not self.attached:
                raise ValueError("sync.switch() after sync.detach(): call laconic.attach instead")
            session.settings.arrange(given)
        self.driver.switch(given)
        self.driver.alignment.align()
        session.end_policy()

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        return self.driver.run.recipe

    @property
    def choices(self) -> list[Choice]:
        """What `laconic.auto` has chosen so far, after which step, and why."""
        policy = self._session.settings.policy
        return [] if policy is None else list(policy.choices)

    # -- ending ----

    @property
    def attached(self) -> bool:
        """Whether the optimizer's steps still run the rounds."""
        return self.driver.attached

    def detach(self) -> None:
        """Remove the hooks from the optimizer and the parameters; no communication. The model keeps
        its present weights."""
        self.driver.detach()

    def drain(self) -> None:
        """Wait until nothing is in flight, whether it arrives or fails: the link is free then."""
        self.driver.run.settle()
        self._session.comm.drain()

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None:  # send nothing more, and tell the other ranks
                driver, session = self.driver, self._session
                driver.tell("failure", error)
                session.recorder.failed(error)
                broken = session.comm.abandon() or any(g.broken for g in driver.run.gradients)
                if driver.run.quorum is not None:
                    broken = driver.run.quorum.abandon() or broken
                session.world.leave(broken)
            self.detach()

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank saves its own, with its model's and optimizer's. Starts no
        communication; waits for what is in flight, and stores it as arrived but not folded. Raises
        ``ValueError`` between ``backward()`` and ``step()`` where gradients are coded, and inside
        `consensus`."""
        self._session.refuse_in_consensus("sync.state_dict()")
        if any(gradients.half_done for gradients in self.driver.run.gradients):
            raise ValueError(HALF_A_STEP)
        return self.driver.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on the same rank. Every rank must call it, after
        `laconic.attach` and after loading the model's and the optimizer's own state. For another
        number of ranks, or where some ranks' states are lost, use `laconic.save` and
        `laconic.load`.

        Raises ``ValueError`` on every rank where any of them cannot load its state.
        """
        self.driver.load([state])

    @contextmanager
    def gathering(
        self, call: str, problem: str | None = None
    ) -> Iterator[Callable[[Any], list[Any]]]:
        """A context for `SAVE` or `LOAD`, which every rank must enter: yields a function that
        returns what each rank passes to it (anything that JSON holds), by rank. That function
        raises `WorkersChangedError` on all ranks that are left if one is lost on the way, and
        ``ValueError`` on all if any has a ``problem``."""
        session = self._session
        ranks: int | None = None

        def gather(value: Any) -> list[Any]:
            nonlocal ranks
            step = session.step if call == SAVE else 0  # before loading steps differ
            session.call(call, step, problem)
            received = session.gather_json(value)
            session.status(f"in {call}")
            if len(received) != (ranks or len(received)):
                raise WorkersChangedError(call)
            ranks = len(received)
            return received

        if session.elastic is not None or problem is not None:
            gather(None)  # from now on a change of ranks is noticed
        yield gather
        session.status("computing")

    def deal_again(self, drawn: Mapping[str, Sequence[int]]) -> None:
        """Deal the samples of `laconic.Elastic`'s samplers, by name, whose loaded states are of
        workers that had ``drawn`` so many."""
        link = self._session.elastic
        if link is not None:
            link.reports.deal_again(drawn, link.units.active, link.units.me)

    def share_bytes(self, data: Tensor, root: int) -> None:
        """Copy rank ``root``'s ``data`` (uint8, of one length on all ranks) into ``data``, inside
        `gathering`."""
        job = partial(self._session.world.broadcast, data, root)
        self._session.comm.call(job, "sharing a checkpoint's files")

    # -- rounds with a quorum ----

    @property
    def closings(self) -> list[Closing]:
        """The rounds with a quorum that have closed so far, and who took part; the same on all
        ranks. Empty in elastic runs, whose traces have them. ``laconic.simulate(..., closings=)``
        repeats them."""
        return [] if self.driver.run.quorum is None else self.driver.run.quorum.closings

    @property
    def seconds(self) -> float:
        """The time, in seconds from some moment on: virtual in `laconic.simulate` with rounds that
        close with a quorum, else real."""
        if self.driver.run.quorum is None:
            return time.monotonic()
        return self.driver.run.quorum.seconds(self.step)

    # -- for the training loop ----

    @property
    def step(self) -> int:
        """Optimizer steps taken since `laconic.attach`."""
        return self._session.step

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        return self._session.world.rank

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._session.workers.size

    @property
    def view(self) -> WorkersView:
        """Who takes part in the rounds now."""
        session = self._session
        if session.elastic is None:
            size = session.workers.size
            return WorkersView(0, tuple(map(str, range(size))), session.workers.rank)
        link = session.elastic
        active, me = link.units.active or link.members.view.ids, link.units.me
        workers = tuple(active if me in active else [*active, me])  # it takes part in the next step
        return WorkersView(link.members.view.number, workers, workers.index(me))

    def on_change(self, callback: Callable[[WorkersView], None]) -> None:
        """Have ``callback`` called with the new `view`, after the step in which workers have come
        or gone."""
        last = self.view.workers

        def compare() -> None:
            nonlocal last
            now = self.view
            if now.workers != last:
                last = now.workers
                callback(now)

        self.driver.on("step ended", compare)

    @property
    def sharded(self) -> bool:
        """Whether each rank of a worker has only a part of the model."""
        return self._session.sharded

    def average_gradients(self) -> None:
        """Average the gradients now, if the recipe does so in this step and no backward pass did:
        for a rank that had no loss to differentiate, before it clips. ``optimizer.step()`` does it
        by itself otherwise."""
        if self._session.newcomer is not None:
            self._session.newcomer.arrive()
        self.driver.run.average_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes average no gradients, to accumulate several. The next
        backward pass outside it averages them as a whole, or, without one, ``optimizer.step()``,
        also inside it. Raises ``ValueError`` for a step with a closure whose passes are all inside.
        """
        with self._session.no_sync():
            yield

    def report_loss(self, loss: Tensor | float) -> None:
        """Report the training loss of this step's batch. Recipes with a leader choose it by these
        losses; other recipes ignore them. No communication."""
        self.driver.run.scores.report(float(torch.as_tensor(loss).detach()))

    def mean(self, value: Tensor | float) -> float:
        """The mean of a number (a loss) over all ranks; every rank must call it."""
        session = self._session
        with torch.inference_mode(False):  # validation may run in that mode; the link does not
            with session.checked("mean()"):
                own = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).cpu().clone()
            session.comm.call(partial(session.world.mean, own), "mean()")
        session.status("computing")
        return float(own)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each of ``tensors`` by its mean over the workers: for what a program keeps beside
        the model, such as moving averages of the weights. Every rank must call it.

        Raises ``ValueError``, on every rank, if one is not of floating point, or if the ranks'
        tensors have different shapes.
        """
        session = self._session
        with torch.inference_mode(False), torch.no_grad():
            with session.checked("average()"):
                averaged = list(tensors)
                for t in averaged:
                    if not isinstance(t, Tensor) or not t.is_floating_point():
                        found = t.dtype if isinstance(t, Tensor) else repr(t)
                        raise ValueError(
                            f"sync.average() needs tensors of a floating-point dtype, not {found}"
                        )
            said = session.gather_json([[str(t.dtype), *t.shape] for t in averaged])
            other = next((rank for rank, about in enumerate(said) if about != said[0]), None)
            if other is not None:
                raise ValueError(
                    "sync.average() needs tensors of the same shapes and dtypes on all ranks, and "
                    f"those of rank {other} are not as rank 0's"
                )
            session.write_mean([averaged], session.workers)
        session.status("computing")

    # -- measuring ----

    def record(self, file: JsonLines, number: int | None = None) -> None:
        """Write this run's records to ``file`` from now on. ``number``: of this rank's file, if it
        is not the rank."""
        session, run, view = self._session, self.driver.run, self.view
        size = session.world.size if session.elastic is None else len(view.workers)
        about = {
            "step": session.step,
            "rank": session.world.rank if number is None else number,
            "ranks": size,
            "workers": session.workers.size if session.elastic is None else size,
            "recipe": run.text(),
            "schedule": [f"{r.name}, {r.when}" for r in run.recipe if r.over != "replica"],
        }
        session.recorder.start(file, self.stats, about)
        if session.elastic is not None:
            self.on_change(self._record_view)

    def _record_view(self, view: WorkersView) -> None:
        about = {"epoch": view.epoch, "ids": list(view.workers), "workers": len(view.workers)}
        now = self.stats()
        lost = {"workers_lost": now.workers_lost, "steps_lost": now.steps_lost}
        self._session.recorder.event("view", **about, **lost)

    def calls(self) -> dict[str, CallTotals]:
        """What went over the links so far, by round and call."""
        # the communication thread adds calls meanwhile: dict() copies in one go
        return {name: copy(call) for name, call in dict(self._session.ledger.by_call).items()}

    def stats(self) -> Stats:
        """Bytes, rounds and waiting so far, on this rank."""
        ledger, link = self._session.ledger, self._session.elastic
        lost = (0, 0) if link is None else (link.reports.workers_lost, link.reports.steps_lost)
        return Stats(
            self._session.step,
            self.driver.rounds_done,
            ledger.bytes_sent,
            ledger.bytes_received,
            dict(ledger.by_collective),
            dict(ledger.by_set),
            self._session.comm.seconds_waiting,
            *lost,
            self.driver.run.drift.found,
        )
