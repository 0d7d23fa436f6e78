"""Which optimizer moves a wrapped module: the first whose step changes its parameters.

Every step of any optimizer in the process is observed. Before the first one x is the common start,
which therefore needs no copy.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.compat.slowmo_arguments import HALF
from laconic.engine.attached import check_free, claim
from laconic.engine.recipe_run import check_alike
from laconic.engine.synchronizer import Synchronizer
from laconic.links.agreement import agree
from laconic.tensors import sums

FP32 = Tensor | Sequence[Tensor] | Mapping[Any, Any] | None


class Binding:
    """Binds the synchronizer of a wrapped ``module`` to its optimizer.

    ``masters``: the module's parameters, each with the float32 master that the optimizer moves in
    its place; empty if there are none. ``waiting``: a saved state to load once the optimizer is
    known. ``finished``: whether all ranks have compared what they are bound to.
    """

    def __init__(self, module: nn.Module, sync: Synchronizer, device: torch.device) -> None:
        self.module = module
        self.masters: list[tuple[Tensor, Tensor]] = []
        self.waiting: Mapping[str, Any] | None = None
        self.finished = False
        self._sync = sync
        self._driver = sync.driver
        self._device = device
        self._problem: str | None = None
        self._common_start: Tensor | None = None
        self._fp32: FP32 = None
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._before_step: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self.note_versions()
        _bindings.add(self)
        _watch_optimizers()

    def end(self) -> None:
        """Observe no more steps."""
        _bindings.discard(self)

    def note_versions(self) -> None:
        """Changes of the parameters until now are not those of an unknown optimizer."""
        self._seen_version = self._versions()

    def copy_masters(self) -> None:
        """Copy the masters, if there are any, to the module."""
        copy(self.masters)

    def restore(self) -> None:
        """Load the state that waits, if the optimizer is bound."""
        self.note_versions()
        if self.waiting is not None and self._driver.session.optimizer is not None:
            self._sync.load_state_dict(self.waiting)
            self.waiting = None

    def follow(self, optimizer: Optimizer, fp32_params: FP32) -> None:
        """Bind to ``optimizer``, or check that it is the bound one. The first time the ranks
        compare what they are bound to, and what is wrong on one of them is raised on all."""
        if self.finished:
            self._identify(optimizer, fp32_params)
            return
        # some ranks may have loaded a state, so their steps may differ
        with self._driver.session.checked("binding the optimizer", 0):
            self._identify(optimizer, fp32_params)
        self._finish()

    def _identify(self, optimizer: Optimizer, fp32_params: FP32) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                "optimizer must be a torch.optim.Optimizer, or the one inside a wrapper, not "
                f"{type(optimizer).__name__}"
            )
        if fp32_params is not None and fp32_params is not self._fp32:
            self.masters = _pairs(list(self.module.parameters()), fp32_params)
            self._fp32 = fp32_params
            held = [p for group in optimizer.param_groups for p in group["params"]]
            storages = {p.untyped_storage().data_ptr() for p in held}
            if any(m.untyped_storage().data_ptr() not in storages for _, m in self.masters):
                self.masters, self._fp32 = [], None
                raise ValueError("fp32_params must share storage with the optimizer's parameters")
        if not self.masters and not self._holds(optimizer):
            raise ValueError(
                "the optimizer holds none of the module's parameters: if it updates float32 "
                "copies of them, pass these as fp32_params="
            )
        bound = self._driver.session.optimizer
        if bound is None:
            self._bind_moved(optimizer)
        elif optimizer is not bound and not _same_parameters(optimizer, bound):
            raise ValueError(
                "perform_slowmo was given another optimizer than the one that moved the module's "
                "parameters first: use one optimizer for all of them, with the same groups"
            )
        elif optimizer is not bound and not _same_groups(optimizer, bound):
            self._replace(optimizer)

    def _bind(self, optimizer: Optimizer) -> None:
        """Bind to an optimizer that has not changed x since the start (or since x was loaded).

        Does not communicate: the optimizer may be about to step, and ranks whose GradScaler skips
        that step are not here.
        """
        try:
            check_free(optimizer)
        except ValueError:
            raise ValueError(
                "this optimizer is attached already: one optimizer moves one wrapped module. Wrap "
                "a module that contains both, or first call detach() on the other wrapper"
            ) from None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.device != self._device for p in held):
            raise ValueError(
                f"the module was on {self._device} when it was wrapped: move it before wrapping it"
            )
        self._before_step.clear()
        self._driver.bind(optimizer)
        claim(self._sync)
        if self.waiting is not None:
            try:
                self._driver.load([self.waiting], alone=True)
            except ValueError as error:  # `_finish` raises it on all ranks
                self._problem = str(error)
            self.waiting = None
        else:
            self._common_start = sums(held)

    def _replace(self, optimizer: Optimizer) -> None:
        """Replace the bound optimizer by another one over the same parameters."""
        check_free(optimizer)
        self._driver.follow(optimizer)
        claim(self._sync)

    def _finish(self) -> None:
        """Finish binding, with checks that need all ranks to be here."""
        problem, self._problem = self._problem, None
        self._compare(problem)
        self.finished = True
        held = [p for group in self._driver.session.bound.param_groups for p in group["params"]]
        known = {id(p) for p in held}
        own = [p for p in self.module.parameters() if p.requires_grad]
        missing = sum(id(p) not in known for p in own)
        if missing and not self.masters:
            warnings.warn(
                f"{missing} trainable parameters of the module are not in the optimizer, so they "
                "are not averaged",
                stacklevel=2,
            )
        if not self.masters and any(p.dtype == torch.float16 for p in held):
            warnings.warn(
                "the optimizer updates float16 parameters: to lose less precision, use float32 "
                "masters and pass them as fp32_params=",
                stacklevel=2,
            )

    def _compare(self, problem: str | None) -> None:
        """Compare what the ranks have bound: the shapes, and the common start (None: the run was
        resumed, and workers differ). Raises ``ValueError`` on all ranks if any has a
        ``problem``."""
        check_alike(self._driver.run, module=False)
        gather, start = self._driver.session.gather, self._common_start
        own = [0.0, 0.0] if start is None else start.tolist()
        row = torch.tensor([float(problem is not None), *own], dtype=torch.float64)
        everyone = gather(row)
        agree(gather, problem, everyone[:, 0])
        rows = everyone.tolist()
        other = [rank for rank, own in enumerate(rows) if own != rows[0]]
        if other:
            raise ValueError(
                f"the optimizer's parameters differ from rank 0's on ranks {other}, before its "
                "first step: load the same weights, or a saved state, on every rank, make float32 "
                "masters from the wrapped module's parameters, and put parameters of your own into "
                "the module"
            )

    def _bind_moved(self, optimizer: Optimizer) -> None:
        """Bind to an optimizer whose step on the module's own parameters was not observed.

        The step was skipped, or it changed masters. In that case their start was saved.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not self.masters and self._versions() != self._seen_version:
            raise ValueError(
                "the module's parameters have changed, and no step of this optimizer was seen: its "
                "class must call torch.optim.Optimizer's __init__, and its step() must run hooks"
            )
        start = self._before_step.pop(optimizer, None)
        moved = [p.clone() for p in held]
        for p, values in zip(held, start or moved, strict=True):
            p.copy_(values)
        self._bind(optimizer)
        if start is None:
            return
        if self._driver.run.reweighted:
            raise ValueError(
                "this run was resumed, and its push weights are not 1: call model.bind(optimizer, "
                "fp32_params) after loading and before the first step"
            )
        self._driver.begin_step(closure=True)
        for p, values in zip(held, moved, strict=True):
            p.copy_(values)

    def about_to_step(self, optimizer: Optimizer) -> None:
        """Handle that ``optimizer``, which may be unrelated, is about to take a step."""
        bound = self._driver.session.optimizer
        if optimizer is bound or optimizer in self._foreign:
            return
        if not self._holds(optimizer):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            own = list(self.module.parameters())
            fits = sum(p.numel() for p in held) == sum(p.numel() for p in own)
            if bound is None and fits and any(p.dtype in HALF for p in own):
                if optimizer not in self._before_step:  # its parameters may be masters
                    self._before_step[optimizer] = [p.detach().clone() for p in held]
            else:
                self._foreign.add(optimizer)
        elif bound is None:
            self._bind(optimizer)
        elif not _same_parameters(optimizer, bound):
            raise ValueError(
                "a second optimizer updates parameters of this module: use one optimizer for all "
                "of them, with the same parameter groups as the first"
            )
        elif not _same_groups(optimizer, bound):
            self._replace(optimizer)

    def _holds(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer holds a parameter of the module."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in held for p in self.module.parameters())

    def _versions(self) -> int:
        """Return a number that grows with every in-place change of a parameter."""
        return sum(p._version for p in self.module.parameters())


_bindings: weakref.WeakSet[Binding] = weakref.WeakSet()
_hook_handles: list[Any] = []


def _watch_optimizers() -> None:
    """Register one hook for the whole process, once.

    torch iterates over such hooks while one of them waits for other workers, so none may be added
    or removed later.
    """
    if not _hook_handles:
        # not as a decorator, because that imports torch's compiler, which takes a second
        hook = torch.compiler.disable(_about_to_step)  # type: ignore[no-untyped-call]
        _hook_handles.append(register_optimizer_step_pre_hook(hook))


@torch.no_grad()
def _about_to_step(optimizer: Optimizer, *_: Any) -> None:
    for binding in list(_bindings):
        binding.about_to_step(optimizer)


@torch.no_grad()
def copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair, such as a master, to the first."""
    for p, master in pairs:
        p.copy_(master.reshape(p.shape))


def _same_parameters(one: Optimizer, other: Optimizer) -> bool:
    groups = ([[id(p) for p in group["params"]] for group in o.param_groups] for o in (one, other))
    return next(groups) == next(groups)


def _same_groups(one: Optimizer, other: Optimizer) -> bool:
    """Return whether they share their groups, as an optimizer and its wrapper do."""
    return [id(g) for g in one.param_groups] == [id(g) for g in other.param_groups]


def _pairs(params: Sequence[Tensor], fp32: FP32) -> list[tuple[Tensor, Tensor]]:
    """Pair each parameter of the module with its float32 master."""
    if isinstance(fp32, Mapping):
        if len(fp32) != 1:
            raise ValueError(f"fp32_params must be a dict with one entry, not {len(fp32)}")
        fp32 = next(iter(fp32.values()))
    sizes = [p.numel() for p in params]
    if not isinstance(fp32, Tensor):
        masters = [m.detach() for m in fp32 or ()]
    else:
        fits = fp32.numel() == sum(sizes)
        masters = list(torch.split(fp32.detach().view(-1), sizes)) if fits else []
    if [m.numel() for m in masters] != sizes or any(m.dtype != torch.float32 for m in masters):
        raise ValueError(
            "fp32_params must be float32: one flat tensor, a list of one tensor per parameter, or "
            f"a dict with one such entry, with the sizes of module.parameters(): {sum(sizes)} in "
            "total"
        )
    return list(zip(params, masters, strict=True))
