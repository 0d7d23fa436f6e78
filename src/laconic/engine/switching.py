"""Switching to another recipe in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.compile import check_groups
from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe, workers_differ
from laconic.engine.consensus import write_consensus
from laconic.engine.modes import training_weights
from laconic.engine.recipe_run import RecipeRun, check_alike
from laconic.engine.session import Session


def successor(
    run: RecipeRun, recipe: Recipe, unsent: Mapping[tuple[str, int], Tensor]
) -> tuple[RecipeRun, Callable[[], None]]:
    """Start a run of ``recipe`` on workers that hold the same x. Its gradient rounds send what
    ``run`` left ``unsent``. Also returns a function that makes ``run`` the one at work again."""
    session = run.session
    new = None

    def undo() -> None:
        if new is not None:
            new.detach()
            new.close()
        for gradients in run.gradients:
            gradients.listen()

    run.detach()
    try:
        new = RecipeRun(session, session.settings.arrange(recipe), run.drift)
        new.start_gradient_rounds(unsent)
        new.start()
    except BaseException:  # out of memory, for instance
        undo()
        raise
    return new, undo


class Switcher:
    """Moves one synchronizer from recipe to recipe. ``scaler``: the GradScaler, None without
    one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scalers_differ = False
        self.scaler = session.settings.scaler
        self._scaling = False
        """Whether the scaler has stepped and was not updated yet, so that its scale is in use."""

    def checked(self, recipe: Recipe | str) -> Recipe:
        """``recipe``. Raises ``ValueError`` if the run cannot switch to it."""
        session, given = self._session, as_recipe(recipe)
        if not isinstance(given, tuple):
            raise ValueError(f"sync.switch() takes a recipe, and {given!r} is for attach()")
        session.refuse_in_consensus("sync.switch()")
        check_groups(given, "group" in session.links)
        session.settings.arrange(given)
        return given

    def switch(self, run: RecipeRun, recipe: Recipe, *, begun: bool) -> RecipeRun:
        """Return a run of ``recipe`` that goes on from ``run``'s consensus; see
        `Synchronizer.switch`. ``begun``: the call of all ranks has."""
        session = self._session
        run.take_in()
        if not begun:
            session.call("switch()")
        with training_weights(session.optimizer):
            run.finish()
            write_consensus(run, state=True)
        if workers_differ(run.recipe):
            self._align_optimizer_state()
            self._scalers_differ = True
        run.rebase()  # its rounds go on if the ranks do not agree
        new = RecipeRun(session, session.settings.arrange(recipe), run.drift)
        check_alike(new, module=False, chosen=True)  # so what `successor` raises, all ranks raise
        return successor(run, recipe, run.unsent())[0]

    def _align_optimizer_state(self) -> None:
        """Complete the mean of the workers' optimizer states. Its numbers become rank 0's: ranks
        that skipped steps did not count them. State that some ranks lack, because a parameter had
        no gradient there, is dropped on all."""
        session = self._session
        states, params = session.bound.state, session.params()
        present = session.gather(torch.tensor([float(bool(states.get(p))) for p in params]))
        numbers: list[tuple[dict[str, Any], str]] = []
        for p, everywhere in zip(params, present.amin(0).tolist(), strict=True):
            if not everywhere:
                states.pop(p, None)
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

    def scaler_steps(self) -> None:
        """The scaler is about to step."""
        self._scaling = True

    def scaler_updated(self) -> None:
        """The scaler was updated."""
        self._scaling = False
        self.align_scaler()

    def align_scaler(self) -> None:
        """Give all ranks rank 0's GradScaler after a switch from workers that differed, each with
        overflows of its own: gradients that are averaged must be scaled alike. If its scale is in
        use, that waits until it is updated, between two steps."""
        session, scaler = self._session, self.scaler
        if scaler is None or self._scaling or not self._scalers_differ:
            return
        self._scalers_differ = False
        session.call("switch()")
        state = scaler.state_dict()
        scale, tracker = session.from_rank_0([state["scale"], float(state["_growth_tracker"])])
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)
