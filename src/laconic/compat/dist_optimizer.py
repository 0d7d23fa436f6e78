"""DistOptimizer: what follows the step of an optimizer when workers share parameters.

EASGD and LSGD, in the form of the Synchronous Distributed Training Library's guide.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.algorithms import elastic_recipes, recipes
from laconic.algorithms.round import Recipe, Round, unchanged
from laconic.algorithms.schedules import every
from laconic.engine.attached import check_free, claim
from laconic.engine.driver import Driver
from laconic.engine.model_checks import check_devices, check_tensors, check_unwrapped
from laconic.engine.recorder import Stats
from laconic.engine.session import Settings
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, check_float, check_int
from laconic.links import Link
from laconic.links.rank_sets import agreed_link, layout_of, refused_by_all, sets_of
from laconic.tensors import copies, is_sharded, local, restore, sums

FRESH_START: dict[str, Any] = {"counter": 0, "sync": None}
NO_STATS = Stats(0, 0, 0, 0, {}, {}, 0.0)


class DistOptimizer:
    """The base of `EASGD` and `LSGD`: what follows a step when workers share parameters.

    Call `step` on every rank after every ``local_optimizer.step()``.

    x is a worker's parameters. ``center`` is the last common value. It starts as rank 0's
    parameters, which the constructor broadcasts. Every `step` increments the count and then calls

    - `dist_train_step`: records statistics of the step; changes and sends nothing;
    - `local_pulling_step`: ``x <- (1 - p/comm_period)*x + (p/comm_period)*center``; sends nothing;
    - `comm_train_step`, if the count has reached ``comm_period``, after which the count restarts:
      pulls x toward a center and computes the next center, in the order of the algorithm. Only this
      method communicates.

    For your own algorithm, return its rounds from `recipe`, or override any of the three methods.

    Args:
        local_optimizer: the torch optimizer of this worker.
        world_size: the number of ranks, each of which is a worker.
        local_pulling_strength: p, in [0, 1).
        dist_pulling_strength: the strength of the pull in a round.
        comm_period: local steps between rounds, at least 1: with 4, rounds follow steps 4, 8, 12.
        model: the module, to average its floating-point buffers with the rounds. None: they stay
            each worker's own.
        link: a `Link` to use in place of torch's process group. None: that group.
        timeout: seconds after which a rank that does not answer is an error on all others.

    Raises ``ValueError`` on every rank for invalid arguments, and `laconic.LinkError` if a rank is
    lost.

    Examples:
        >>> class Average(laconic.DistOptimizer):
        ...     def recipe(self):
        ...         return laconic.local_sgd(self.comm_period)
        >>> shared = Average(optimizer, 1, 0.0, 0.0, comm_period=4)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> shared.step()
    """

    def __init__(
        self,
        local_optimizer: Optimizer,
        world_size: int,
        local_pulling_strength: float,
        dist_pulling_strength: float,
        comm_period: int,
        *,
        model: nn.Module | None = None,
        link: Link | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        with refused_by_all(link, timeout):
            if not isinstance(local_optimizer, Optimizer):
                raise ValueError(
                    f"the local optimizer must be a torch.optim.Optimizer, not {local_optimizer!r}"
                )
            check_int("world_size", world_size, 1)
            check_int("comm_period", comm_period, 1)
            check_float("local_pulling_strength", local_pulling_strength, 0.0, 1.0)
        self.local_optimizer = local_optimizer
        self.world_size, self.comm_period = world_size, comm_period
        self.local_pulling_strength = local_pulling_strength
        self.dist_pulling_strength = dist_pulling_strength
        self.model = model
        self.counter = 0
        """Number of local steps since the last round."""
        self._link, self._timeout = link, timeout
        self._start: Mapping[str, Any] = FRESH_START
        self._sync: Synchronizer | None = None
        self._detached = False
        self._unfollowed = 0  # steps of the local optimizer without a step() of this object
        self._hooks: list[RemovableHandle] = []
        self.join()

    def recipe(self) -> Recipe:
        """Return the rounds of `comm_train_step`; none if a subclass implements that itself."""
        if type(self).comm_train_step is DistOptimizer.comm_train_step:
            raise ValueError("a DistOptimizer must define recipe() or comm_train_step()")
        return ()

    # -- one step ----

    def step(self) -> None:
        """Run what follows a step of the local optimizer.

        Call it also for steps that the local optimizer skipped, perhaps on this rank only, because
        of a GradScaler. These count, too.
        """
        if self._detached:
            return
        self.join()
        self._joined.driver.count()
        self._unfollowed = 0
        self.counter += 1
        self.dist_train_step()
        self.local_pulling_step()
        if self.counter >= self.comm_period:
            self.comm_train_step()
            self.counter = 0
        self._joined.driver.session.recorder.after_step(skipped=False)

    def local_pulling_step(self) -> None:
        """Pull x toward the most recent center. Does not communicate."""
        self._joined.driver.run.pull()

    def dist_train_step(self) -> None:
        """Record statistics of the local optimizer's step. Does not change parameters."""
        self._joined.driver.observe()

    def comm_train_step(self) -> None:
        """Communicate: compute the center from all workers' x, and pull x toward it.

        EASGD pulls x toward the previous center.
        """
        self._joined.driver.communicate(now=True)

    # -- the other ranks ----

    @property
    def detached(self) -> bool:
        """Whether `detach` has been called."""
        return self._detached

    @property
    def sync(self) -> Synchronizer | None:
        """The synchronizer. None for a copy that has not joined the other ranks."""
        return self._sync

    @property
    def _joined(self) -> Synchronizer:
        assert self._sync is not None, "join() must be called first"
        return self._sync

    @torch.no_grad()
    def join(self) -> None:
        """Join the other ranks.

        All ranks take rank 0's parameters, or each continues from what it copied or loaded. The
        constructor calls this, and so does a copy before its first step. Under ``"DDP"``, if you
        clip or unscale gradients before the step, call it yourself on every rank, before a copy's
        first backward pass.
        """
        if self._sync is not None or self._detached:
            return
        start = self._start
        with refused_by_all(self._link, self._timeout):
            check_free(self.local_optimizer)
            recipe = self.recipe()
            _check_rounds(recipe, self.comm_period)
            whole = _AllParameters(self.model, self.local_optimizer)
            params = whole.of_optimizer()
            if not params or any(p.device.type == "meta" for p in params):
                raise ValueError(
                    "the optimizer needs parameters that are not on the meta device: materialize "
                    "the model first"
                )
            if self.model is not None:
                check_unwrapped(self.model)
            check_devices(whole, params, cpu_buffers=True if self._link is not None else None)
            check_tensors(whole, params)
        self._link = world = agreed_link(self._link, params[0].device, self._timeout)
        fresh = start["sync"] is None
        gathered = world.gather(torch.tensor([self.world_size, int(fresh)]))
        _check_same_start(gathered[:, 1].double().mean().item())
        sizes = gathered[:, 0].tolist()
        if set(sizes) != {world.size}:
            raise ValueError(
                f"world_size must be the number of ranks, {world.size}: by rank it is {sizes}"
            )
        shards = [p for p in params if is_sharded(p)]
        sets = sets_of(world, layout_of(world, 1, None, shards), None, bool(shards))
        tensors = [] if fresh else [*whole.parameters(), *whole.buffers()]
        saved = copies(tensors)
        settings = Settings("average", unchanged, hooked=False)
        driver = Driver(whole, None, recipe, sets, params[0].device, settings)
        sync = Synchronizer(driver)
        try:
            driver.bind(self.local_optimizer)
            restore(saved)
            if not fresh:
                sync.load_state_dict(start["sync"])
        except BaseException:
            sync.detach()
            raise
        self.counter, self._start, self._sync = start["counter"], FRESH_START, sync
        claim(self.local_optimizer, sync)
        weakref.finalize(self, sync.detach).atexit = False
        local_optimizer, own = self.local_optimizer, weakref.ref(self)
        self._hooks = [
            local_optimizer.register_step_pre_hook(lambda *_: _on_local_step(own, done=False)),
            local_optimizer.register_step_post_hook(lambda *_: _on_local_step(own, done=True)),
        ]
        self._note_start()

    def _note_start(self) -> None:
        self._known = [local(p) for g in self.local_optimizer.param_groups for p in g["params"]]
        self._start_sums = sums(self._known)

    def _check_step(self, done: bool) -> None:
        """Check the order of calls, before a step of the local optimizer and after it."""
        if done:
            self._unfollowed += 1
        elif self._unfollowed:
            raise ValueError(
                "the local optimizer was stepped twice in a row: call step() of the CommOptimizer "
                "instead (also through scaler.step()), or DistOptimizer.step() after each step"
            )
        elif self._joined.step == 0 and not torch.equal(sums(self._known), self._start_sums):
            raise ValueError(
                "the parameters changed after all ranks joined, but the center did not: load "
                "weights before wrapping the optimizer, or load the optimizer's state after them"
            )

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's communication state. Every rank saves its own. No communication."""
        if self._sync is None:
            return dict(self._start)
        return {"counter": self.counter, "sync": self._sync.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned, after the model's state. Every rank must call it.

        With None, start again from rank 0's parameters.
        """
        with self.loading():
            saved = FRESH_START if state is None else state
            start = {key: saved[key] for key in FRESH_START}
        if self._sync is not None:
            _check_same_start(self._sync.mean(float(start["sync"] is None)))
            if start["sync"] is not None:
                self._sync.load_state_dict(start["sync"])
                self.counter, self._unfollowed = start["counter"], 0
                self._note_start()
                return
            self._sync.detach()
            for hook in self._hooks:
                hook.remove()
            self._sync, self._start = None, start
            self.join()
        self._start = start

    def loading(self) -> AbstractContextManager[None]:
        """Return a context for what may fail in a load, which all ranks that have joined raise."""
        sync = self._sync
        return (
            nullcontext() if sync is None else sync.driver.session.checked("load_state_dict()", 0)
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: it has no link, and joins the other ranks' copies itself."""
        cleared: dict[str, Any] = {
            "_sync": None,
            "_link": None,
            "_hooks": [],
            "_known": [],
            "_unfollowed": 0,
        }
        return {**self.__dict__, "_start": self.state_dict(), **cleared}

    # -- for the user's loop ----

    def report_loss(self, loss: Tensor | float) -> None:
        """Report the training loss of this step's batch, before `step`. Does not communicate."""
        self.join()
        self._joined.report_loss(loss)

    def finish(self) -> None:
        """Leave every worker with the consensus model. See `Synchronizer.finish`."""
        self.join()
        self._joined.finish()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Return a context in which parameters hold the consensus. See `Synchronizer.consensus`."""
        self.join()
        with self._joined.consensus():
            yield

    def detach(self) -> None:
        """Stop communicating. `step` then does nothing."""
        self._detached = True
        for hook in self._hooks:
            hook.remove()
        if self._sync is not None:
            self._sync.detach()

    def stats(self) -> Stats:
        """Return counters of this rank. See `Synchronizer.stats`."""
        return NO_STATS if self._sync is None else self._sync.stats()


class EASGD(DistOptimizer):
    """``x <- x - (c/n)*(x - center) ; center <- (1 - c)*center + c*mean(x before the pull)``

    Zhang, Choromanska, LeCun, NeurIPS 2015, arXiv 1412.6651, equations 5 and 6; see
    `laconic.easgd`. The arguments are those of `DistOptimizer`. c is ``dist_pulling_strength``, in
    (0, 1], the paper's beta (0.9). n is ``world_size``.

    Examples:
        >>> shared = laconic.EASGD(optimizer, 1, 0.0, dist_pulling_strength=0.9, comm_period=4)
        >>> shared.recipe()
        easgd(4)
    """

    def recipe(self) -> Recipe:
        c = self.dist_pulling_strength
        check_float("dist_pulling_strength", c, 0.0, strict=True, most=1.0)
        return elastic_recipes.easgd(self.comm_period, c, pull=self.local_pulling_strength)


class LSGD(DistOptimizer):
    """``center <- x of the worker with the lowest loss ; x <- (1 - c)*x + c*center``

    Teng et al., NeurIPS 2019, arXiv 1905.10395, Algorithm 1 with one global leader; see
    `laconic.lsgd`. The arguments are those of `DistOptimizer`. c is ``dist_pulling_strength``, in
    [0, 1), the paper's c2 (0.1). p is its p2. The loss is the mean of the last 10 passed to
    `report_loss`. If none is reported, the score is computed from gradients
    (`laconic.algorithms.scores`).

    Examples:
        >>> shared = laconic.LSGD(optimizer, 1, 0.1, dist_pulling_strength=0.1, comm_period=4)
        >>> shared.report_loss(0.5)
    """

    def recipe(self) -> Recipe:
        c = check_float("dist_pulling_strength", self.dist_pulling_strength, 0.0, 1.0)
        p = self.local_pulling_strength
        return elastic_recipes.lsgd(self.comm_period, local_period=0, pull=c, drift=p)


class Gradients(DistOptimizer):
    """Average gradients in every backward pass. There are no other rounds."""

    def recipe(self) -> Recipe:
        return recipes.ddp()


def _on_local_step(own: weakref.ref[DistOptimizer], *, done: bool) -> None:
    """Check a step of the local optimizer, unless its wrapper has been deleted."""
    wrapper = own()
    if wrapper is not None:
        wrapper._check_step(done)


def _check_rounds(recipe: Recipe, period: int) -> None:
    """Check that `DistOptimizer.comm_train_step` can run these rounds: one period, no delay."""
    for r in recipe:
        plain = r.delay == 0 and r.over in ("world", "workers")
        if isinstance(r, Round) and not (plain and r.when == every(period)):
            raise ValueError(
                f"a DistOptimizer's rounds must all run every comm_period={period} steps, over all "
                f"workers and without a delay, not {r.name} at {r.when}, over {r.over!r}, with "
                f"delay {r.delay}: use laconic.attach for other recipes"
            )


def _check_same_start(share: float) -> None:
    """Raise if only some ranks, a ``share`` of them, have no communication state to load."""
    if 0 < share < 1:
        raise ValueError(
            "some ranks load communication state and others have none: load on every rank what "
            "that rank saved, or load none on all of them"
        )


class _AllParameters(nn.Module):
    """``model``, and all other parameters of ``optimizer``."""

    def __init__(self, model: nn.Module | None, optimizer: Optimizer) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer

    def of_optimizer(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        own = super().parameters(recurse)
        yield from {id(p): p for p in (*own, *self.of_optimizer())}.values()
