"""The consensus: the model that all workers together have trained; and the change to another
recipe, which goes on from it.

Optimizers may have modes, such as schedule-free ones: ``train()`` puts the weights at which one
computes gradients into the parameters, and ``eval()`` those that one evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import Recipe, Round
from laconic.algorithms.schedules import every
from laconic.algorithms.updates import Average
from laconic.engine.joint_optimizer import forget, members
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.recipe_run import RecipeRun, check_alike
from laconic.engine.saved_state import loaded, round_state
from laconic.engine.session import Session
from laconic.errors import check_bool
from laconic.parts import optimizer_state
from laconic.tensors import copies, local, reshard, restore, with_mean


@torch.no_grad()
def write_consensus(run: RecipeRun, *, mean: bool = True, state: bool = False) -> None:
    """Have every round come to rest, and write the consensus into the model. All ranks call it.

    ``mean``: the mean over workers of x then; otherwise anchors where rounds keep them, and the
    mean over workers of the rest. What no round is about, and x where workers should not differ, is
    compared: see `_make_equal`. ``state``: average the optimizer's state, too, where workers
    differ. That of optimizers with modes always is, since it holds the weights of the other mode.
    """
    optimizer = run.session.optimizer
    with in_mode(optimizer, training=True), run.outside_step():
        _write_own(run, mean, rest=True)
        with in_mode(optimizer, training=False):
            _write_mean(run, mean)
            if run.differ and (state or modal(optimizer)):
                r = Round(every(1), Average(), Mean(), optimizer_state)
                ParameterRunner(r, run.session, run.scores).start(run.session.step)


def _write_own(run: RecipeRun, mean: bool, *, rest: bool) -> None:
    """Write what this worker contributes. ``rest``: the rounds go on from there; otherwise copies
    of them do this."""
    session = run.session
    reshard(session.model)
    rounds = run.rounds
    if not rest:
        run.undo_before_step()
        needed = [r for r in rounds if r.round.update.quiesce] + _anchored(rounds, mean)
        rounds = [loaded(r, [round_state(r)], run.joined, None) for r in dict.fromkeys(needed)]
    for running in rounds:
        running.finish(session.step)
    if run.quorum is not None:
        run.quorum.catch_up(keep=rest)
    for running in _anchored(rounds, mean):
        running.write_anchor()


def _write_mean(
    run: RecipeRun, mean: bool, saved: list[tuple[Tensor, list[Tensor]]] | None = None
) -> None:
    """Average what `_write_own` wrote, where it differs between workers."""
    session = run.session
    covered = {
        id(segment.tensor)
        for running in _anchored(run.rounds, mean)
        if running.round.exchange.agrees and not modal(session.optimizer)
        for channel in running.channels
        for segment in channel.bucket.segments
    }
    if run.differ:
        groups = [[p for p in group if id(p) not in covered] for group in session.groups()]
        session.write_mean(groups, session.workers)
    _make_equal(run, saved)


def _make_equal(run: RecipeRun, saved: list[tuple[Tensor, list[Tensor]]] | None) -> None:
    """Make equal on all ranks what differs between them and was not just averaged: the mean of
    floating-point and complex numbers, rank 0's values of the rest. Copies of what that changes are
    added to ``saved``."""
    session = run.session
    buffers = {id(b) for b in session.model.buffers()}
    kept = buffers if session.settings.buffers == "keep" else set()
    alone = session.links["replica"].size == 1  # else a worker's ranks may have drifted apart
    if run.differ and alone:
        kept = kept.union(map(id, session.params()))
    rest = {name: t for name, t in session.state().items() if id(t) not in kept}
    differing = list(session.differing(rest).values())
    if saved is not None:
        saved += copies(differing)
    shared = buffers if session.settings.buffers == "broadcast" else ()
    means = [t for t in differing if id(t) not in shared and with_mean(local(t)) is not None]
    for link, named in session.by_link({str(id(t)): t for t in means}):
        numbers = [with_mean(local(t)) for t in named.values()]
        session.write_mean([[x for x in numbers if x is not None]], link)
    averaged = set(map(id, means))
    session.broadcast([t for t in differing if id(t) not in averaged])


def _anchored(rounds: Sequence[ParameterRunner], mean: bool) -> list[ParameterRunner]:
    return [r for r in rounds if r.round.update.anchor and not mean]


@contextmanager
def consensus(run: RecipeRun, *, mean: bool) -> Iterator[nn.Module]:
    """See `Synchronizer.consensus`."""
    session = run.session
    if session.holds_consensus is not None:
        if session.holds_consensus != mean:
            raise ValueError(
                f"sync.consensus(mean={mean}) inside sync.consensus(mean={not mean}): leave the "
                "outer context first"
            )
        yield session.model
        return
    session.check_complete()
    with session.checked("consensus()"):
        session.joining(fixed=bool(run.rounds))  # raises if x is no longer the optimizer's
        check_bool("mean", mean)
    with torch.no_grad():
        saved = copies([*session.params(), *session.model.buffers()])
    try:
        session.hold_consensus(mean)
        with in_mode(session.optimizer, training=True):
            with torch.no_grad():
                _write_own(run, mean, rest=False)
            with in_mode(session.optimizer, training=False, params=session.params()):
                with torch.no_grad():
                    _write_mean(run, mean, saved)
                session.status("in consensus()")
                yield session.model
    finally:
        session.hold_consensus(None)
        restore(reversed(saved))
        reshard(session.model)
        session.status("computing")


def successor(run: RecipeRun, new: RecipeRun) -> Callable[[], None]:
    """Start ``new`` in place of ``run``, on workers that hold the same x. Returns a function that
    makes ``run`` the one at work again."""

    def undo() -> None:
        new.detach()
        new.close()
        for gradients in run.gradients:
            gradients.listen()

    run.detach()
    try:
        new.start_gradient_rounds()
        new.start()
    except BaseException:  # out of memory, for instance
        undo()
        raise
    return undo


def switched(run: RecipeRun, recipe: Recipe) -> RecipeRun:
    """Return a run of ``recipe`` that goes on from ``run``'s consensus; see `Synchronizer.switch`.
    The call of all ranks has begun."""
    session = run.session
    run.take_in()
    write_consensus(run, state=True)
    if run.differ:
        _align_optimizer_state(session)
    run.rebase()  # its rounds go on if the ranks do not agree
    new = RecipeRun(session, recipe, run.drift)
    check_alike(new, module=False)  # so what `successor` raises, all ranks raise
    successor(run, new)
    return new


def _align_optimizer_state(session: Session) -> None:
    """Complete the mean of the workers' optimizer states. Its numbers become rank 0's: ranks
    that skipped steps did not count them. State that some ranks lack, because a parameter had
    no gradient there, is dropped on all."""
    states, params = session.bound.state, session.params()
    present = session.gather(torch.tensor([float(bool(states.get(p))) for p in params]))
    numbers: list[tuple[dict[str, Any], str]] = []
    for p, everywhere in zip(params, present.amin(0).tolist(), strict=True):
        if not everywhere:
            forget(session.bound, p)
            continue
        state = states[p]
        numbers += [(state, name) for name in sorted(state) if _is_number(state[name])]
    if not numbers:
        return
    values = session.from_rank_0([float(state[name]) for state, name in numbers])
    for (state, name), value in zip(numbers, values, strict=True):
        if isinstance(state[name], Tensor):
            state[name].fill_(value)
        else:
            state[name] = type(state[name])(value)


class ScalerAlignment:
    """Gives all ranks rank 0's GradScaler after a switch from workers that differed, each with
    overflows of its own: gradients that are averaged must be scaled alike. ``due``: whether that is
    to be done. ``in_use``: whether the scaler has stepped and was not updated yet, so that its
    scale is in use: alignment waits for the update, between two steps."""

    def __init__(self, session: Session) -> None:
        self._session, self.scaler = session, session.settings.scaler
        self.due = self.in_use = False

    def align(self) -> None:
        """Do it, if it is due."""
        session, scaler = self._session, self.scaler
        if scaler is None or self.in_use or not self.due:
            return
        self.due = False
        session.call("switch()")
        state = scaler.state_dict()
        scale, tracker = session.from_rank_0([state["scale"], float(state["_growth_tracker"])])
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def modal(optimizer: Optimizer | None) -> list[Any]:
    """The optimizers with modes among ``optimizer``'s members. Setting a mode twice does nothing
    the second time."""
    every = () if optimizer is None else members(optimizer)
    return [o for o in every if all(callable(getattr(o, mode, None)) for mode in ("train", "eval"))]


def _trains(optimizer: Any) -> bool:
    """Whether its ``train_mode``, in the groups or its own, is set."""
    own = vars(optimizer).get("train_mode", True)
    return any(group.get("train_mode", own) for group in optimizer.param_groups)


@contextmanager
def in_mode(
    optimizer: Optimizer | None, *, training: bool, params: Sequence[Tensor] = ()
) -> Iterator[None]:
    """A context in which optimizers with modes are in train mode (rounds are about its weights), or
    else in eval mode, and ``params`` may be overwritten. Afterward modes are those of before,
    whatever is called inside, and ``params`` are so up to rounding."""
    every = modal(optimizer)
    changed = [each for each in every if _trains(each) != training]

    def put(optimizers: Sequence[Any], training: bool) -> None:
        for each in optimizers:
            each.train() if training else each.eval()

    put(changed, training)
    before = [local(p).clone() for p in params] if every else []
    try:
        yield
    finally:
        put(every, training)
        for p, values in zip(params, before, strict=False):
            local(p).copy_(values)  # some keep the weights of the other mode in their state
        put(changed, not training)
