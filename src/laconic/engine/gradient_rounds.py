"""Gradient rounds: averaging while the backward pass still runs.

Buckets are in reverse order of the parameters, which is about the order in which gradients appear,
and the same on every rank. A bucket is sent as soon as its gradients are complete and all buckets
before it are sent. The others are sent when the backward pass ends. ``backward()`` returns when all
gradients are averaged, so that clipping and unscaling see the mean.

A mean takes two messages, one after the other, or four. Where round trips are short, each bucket is
averaged before the next one is sent. Where they are long (`Link.overlapping`), buckets share round
trips (`turns_at_once`). The results are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges.coded import LastMean
from laconic.algorithms.round import GradientRound
from laconic.algorithms.schedules import ends
from laconic.algorithms.update import Clock, State, computed, rated
from laconic.buckets import RESHAPED
from laconic.device import Stream, not_compiled, refuse_capture
from laconic.engine.comparison import NonfiniteCheck
from laconic.engine.gradient_channels import GradientChannel, GradientChannels
from laconic.engine.overlap import Overlapping, turns_at_once
from laconic.engine.session import Session
from laconic.errors import LinkError, NotFiniteError
from laconic.links.comm_thread import Pending
from laconic.links.link import AsyncLink
from laconic.tensors import local

REENTRANT = (
    "checkpointing needs use_reentrant=False; put no_sync() around a pass with other passes in it, "
    "and optimizer.step() averages its gradients"
)


JOINED = (
    "parameters were added to the optimizer, or thawed, after backward() had averaged the "
    "gradients of the others in codes, which is not done twice: do that before backward()"
)


class GradientRunner:
    """Averages gradients by ``r.exchange`` and the `combine` of ``r.update`` over ``r.over``.

    It does so in every step that is due: in its backward passes, or else before the optimizer's
    step. ``announce()`` begins the call with the other ranks and returns its label.

    With a GradScaler, a gradient that is not finite becomes NaN on all ranks, and is no error,
    since the scaler skips the step.
    """

    def __init__(self, r: GradientRound, session: Session, announce: Callable[[], str]) -> None:
        self.round = r
        self._session, self._comm = session, session.comm
        self._link = link = session.links[r.over]
        self._elastic = session.elastic is not None
        self._scaler = session.settings.scaler
        self._announce = announce
        self.nonfinite = NonfiniteCheck(session.links["shards"], r.exchange, session.comm)
        self.set = GradientChannels(r.exchange, link, self._elastic)
        self._hooks: dict[int, RemovableHandle] = {}
        self._pending: list[Pending[None]] = []
        """By bucket sent."""
        self._overlap = Overlapping(link, session.comm)
        self._task: int | None = None
        self._stream: Stream | None = None
        """That of the latest gradient, on an accelerator."""
        self._averaged = self.withheld = False
        """Whether this step's gradients are averaged; whether ``no_sync()`` held the last back."""
        self._label = ""
        self.refresh()

    @property
    def channels(self) -> list[GradientChannel]:
        """One for each bucket."""
        return self.set.all

    def refresh(self, *, keep: bool = False) -> bool:
        """Follow groups added and parameters frozen or thawed. Returns whether any were added. With
        ``keep``, in a backward pass, none is removed, since its gradient may still be needed."""
        before = {id(p) for p in self.set.params}
        given = self._session.differentiated()
        chosen = [p for p in given if p.requires_grad or (keep and id(p) in before)]
        params = [p for p in chosen if local(p).numel()]
        if [id(p) for p in params] == [id(p) for p in self.set.params]:
            if self.set.sizes != [(p.numel(), p.dtype) for p in params]:
                raise ValueError(RESHAPED)
            return False
        self._use(params)
        return any(id(p) not in before for p in params)

    @property
    def positions(self) -> list[int]:
        """Those of its parameters in `Session.differentiated`, for `follow`."""
        position = {id(p): k for k, p in enumerate(self._session.differentiated())}
        return [position[id(p)] for p in self.set.params if id(p) in position]

    def follow(self, positions: Sequence[int]) -> None:
        """Average the gradients of the parameters at these `positions`, until `refresh`: a state
        was saved before that had noticed some that were added, frozen or thawed."""
        if positions != self.positions:
            given = self._session.differentiated()
            self._use([given[k] for k in positions])

    def _use(self, params: Sequence[Tensor]) -> None:
        if not self.broken:
            self._discard()
        self.set = replace(self.set, params=params, unsent=self.set.left_over())
        for key in self._hooks.keys() - {id(p) for p in params}:
            self._hooks.pop(key).remove()
        self.listen()

    def listen(self) -> None:
        """Put a hook on every parameter, which is called when its gradient is complete."""
        called = not_compiled(self._on_gradient)
        for p in self.set.params:
            if id(p) not in self._hooks and p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(called)  # type: ignore[no-untyped-call]
                self._hooks[id(p)] = hook

    def detach(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    @property
    def broken(self) -> bool:
        """Whether a backward pass ended with some of its buckets sent and others not."""
        return 0 < len(self._pending) < len(self.channels)

    @property
    def coded(self) -> bool:
        """Whether this step's gradients are averaged, and its state has what their codes left out:
        to average them again would not give the same."""
        return self._averaged and bool(self.round.exchange.slots)

    @property
    def half_done(self) -> bool:
        """Whether they are still to be used: the program has not dropped them."""
        return self.coded and any(p.grad is not None for p in self.set.params)

    def settle(self) -> None:
        """Complete the buckets that a pass which raised has begun, so that the link is free. Ranks
        that have begun different ones wait for each other in vain."""
        if self.broken:
            self._overlap.complete(self._label).wait_quietly()

    def _due(self) -> bool:
        """Whether this step averages gradients."""
        return self._session.newcomer is None and self.round.when(self._session.step + 1)

    # -- during backward ----

    def _begin(self, task: int) -> None:
        from torch._dynamo import compiled_autograd  # slow, but any optimizer imports it

        refuse_capture(self._comm.device, "a backward pass whose gradients are averaged")
        if compiled_autograd.in_compiled_autograd_region:
            raise ValueError(
                "compiled autograd does not say when a backward pass ends, and laconic cannot "
                "average its gradients: set torch._dynamo.config.compiled_autograd = False, or "
                "attach a recipe that averages parameters"
            )
        if self.broken:
            raise LinkError(
                f"{self._label}: a backward pass raised after a part of its gradients was sent (or "
                "another pass ran within it), so this rank cannot rejoin the others: start again "
                f"from the last checkpoint; {REENTRANT}"
            )
        self._discard()
        self.refresh(keep=True)
        if self.round.exchange.slots:  # to ask for the scale waits for a GPU
            self.set.rescale(1.0 if self._scaler is None else self._scaler.get_scale())
        self._task, self._stream = task, None
        for channel in self.channels:
            channel.missing = channel.params

    def _discard(self) -> None:
        """Wait for the buckets of a backward pass that raised after it had sent all of them, since
        their memory is used again."""
        for pending in self._pending:
            pending.wait_quietly()
        self._pending = []

    def _on_gradient(self, p: Tensor) -> None:
        """Handle the complete gradient of ``p``."""
        if not ((due := self._due()) and self._session.sync_gradients):
            self._averaged = False  # the next pass or step averages gradients under no_sync() too
            self.withheld = due
            return
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._begin(task)
            Variable._execution_engine.queue_callback(self._end)
        channels = self.set.of_param.get(id(p))
        if channels is None:  # it left the optimizer: `_begin` has noticed
            return
        if id(p) not in channels[0].missing:
            raise RuntimeError(
                "a parameter's gradient arrived twice in one backward pass, and may have been sent "
                f"before: {REENTRANT}"
            )
        self._follow_stream()
        for channel in channels:
            channel.missing.remove(id(p))
        while (sent := len(self._pending)) < len(self.channels) and not self.channels[sent].missing:
            self._send()

    def _follow_stream(self) -> None:
        """Have the current stream wait for that of the gradients so far: autograd computes each on
        the stream of its forward pass, and a bucket is packed on that of its last gradient."""
        now = self._comm.current_stream()
        if now is not None and self._stream is not None and now != self._stream:
            self._stream.record_event().wait(now)
        self._stream = now

    @torch.no_grad()
    def _send(self) -> None:
        """Send the next bucket, in order."""
        channel = self.channels[len(self._pending)]
        self._follow_stream()
        channel.gather()
        if not self._pending:
            self._label = self._announce()
            self._overlap.use(len(self.channels))
        exchange, step = channel.exchange, self._session.step + 1
        if "residual" in channel.exchange_state and ends(self.round.when, step):
            exchange = LastMean(exchange, channel.owned)
        average = partial(self._average, exchange, channel.flat, channel.exchange_state, step)
        turns = turns_at_once(self.set.largest)
        self._pending.append(self._overlap.begin(average, self._label, turns=turns))
        if len(self._pending) == len(self.channels):
            self._overlap.complete(self._label)

    async def _average(
        self, exchange: Exchange, flat: Tensor, state: State, step: int, link: AsyncLink
    ) -> None:
        """``flat`` <- combine(mean over the ranks of ``flat``). It becomes NaN if it is not finite
        on some rank."""
        update, seed = self.round.update, self._session.settings.seed
        clock = Clock(step, math.nan, step - 1, 0, self._link.size, self._link.rank, seed=seed)
        # another attempt of an elastic run needs the message again
        message = flat.clone() if self._elastic and exchange.slots else flat
        try:
            arrival = await exchange.run(
                link,
                message,
                lambda mean: computed(update, "combine", [mean], {}, clock),
                rated(update, clock),
                state,
            )
            if arrival.flat is not flat:
                flat.copy_(arrival.flat)
        except NotFiniteError as error:
            if self._scaler is None:
                self.nonfinite.report(error)
            flat.fill_(math.nan)

    def _end(self) -> None:
        """End the backward pass: send the remaining buckets, wait, and write the means."""
        if torch._C._current_autograd_node() is not None:  # this pass runs within another
            raise RuntimeError(
                f"a backward pass ran within another, and cannot be averaged alone: {REENTRANT}"
            )
        self._task = None
        while len(self._pending) < len(self.channels):
            self._send()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._write()
        self._averaged, self.withheld = True, False

    def before_step(self) -> None:
        """Average now if no backward pass did: this rank had no gradient, all its backward passes
        were under ``no_sync()``, or parameters were added later."""
        # parameters frozen since their gradients arrived are averaged too
        joined = self.refresh(keep=self._due() and not self._averaged)
        if not (self._due() and self.channels) or (self._averaged and not joined):
            return
        if torch._C._current_autograd_node() is not None:
            raise ValueError(
                "optimizer.step() was called inside the backward pass, by a hook, where gradients "
                "are not averaged yet: call it after backward(), or attach a recipe that averages "
                "parameters, such as laconic.local_sgd(1)"
            )
        if self.coded:
            raise ValueError(JOINED)
        self._begin(-1)
        self._end()
        self.refresh()

    def after_step(self) -> None:
        """Prepare for the next step; free the memory if that step averages nothing."""
        self._averaged = self.withheld = False
        if not self.round.when(self._session.step + 1):
            for channel in self.channels:
                channel.free()

    @torch.no_grad()
    def _write(self) -> None:
        """Write the means to ``.grad``. If no rank had a gradient for a parameter it stays None, so
        that the optimizer skips it, as it would in one process."""
        unused = self._unused()
        for channel in self.channels:
            channel.scatter(unused)

    def _unused(self) -> set[int]:
        """The ids of parameters without a gradient on any rank. All ranks see the same means, so
        they agree which are all zeros. Only for these, which are rare, do they exchange who had a
        gradient, and for frozen ones, which may have a residual."""
        found = self.set.nonzero()
        doubtful = [p for p in self.set.params if id(p) not in found or not p.requires_grad]
        if not self._session.inside.any(bool(doubtful))[0]:
            return set()
        had = torch.tensor([float(p.grad is not None) for p in doubtful])
        had = had.to(self.channels[0].bucket.device)
        self._comm.call(partial(self._link.mean, had), self._label)
        return {id(p) for p, share in zip(doubtful, had.tolist(), strict=True) if share == 0}
