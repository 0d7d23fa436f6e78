"""The objects of a run whose state is saved, and checks of what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.checkpoints.random_state import random_state
from laconic.engine.attached import check_free, synchronizer_of
from laconic.engine.joint_optimizer import JointOptimizer, as_one, class_names, members
from laconic.engine.saved_state import Stateful
from laconic.engine.synchronizer import Synchronizer
from laconic.tensors import plain

_PREFIX = "laconic: "
"""Begins the names of objects that are laconic's and not the user's."""


@runtime_checkable
class OptimizerFrontEnd(Protocol):
    """Another library's class around an optimizer."""

    def parts_to_save(self) -> tuple[Optimizer, Synchronizer | None]:
        """Return the optimizer and its synchronizer, which are saved in its place."""


@runtime_checkable
class ModuleFrontEnd(Protocol):
    """Another library's class around a module, which may learn of its optimizer later."""

    def parts_to_save(self) -> tuple[nn.Module, Synchronizer]:
        """Return the module and its synchronizer, which are saved in its place."""

    def bind(self, optimizer: Optimizer) -> None:
        """Name the optimizer. Every rank calls it."""

    def copy_masters(self) -> None:
        """Copy float32 masters, if there are any, to the module."""


class _OutsideParameters:
    """The optimizer's parameters that are in no saved module, such as float32 masters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params

    def state_dict(self) -> dict[str, Tensor]:
        return {str(index): p.detach().clone() for index, p in enumerate(self._params)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        for index, p in enumerate(self._params):
            p.copy_(state_dict[str(index)])


@dataclass(frozen=True)
class TrainingState:
    """The objects whose state is saved. ``others``: the user's, by name. ``front``: the wrapper of
    ``model``, if there is one."""

    model: nn.Module
    optimizer: Optimizer
    sync: Synchronizer
    others: Mapping[str, Any]
    front: ModuleFrontEnd | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        sync: Synchronizer | None,
        others: Mapping[str, Any] | None,
    ) -> TrainingState:
        """Collect the objects. A front end is replaced by its parts, so that no state is saved
        twice."""
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module, not {model!r}")
        if not isinstance(others or {}, Mapping):
            raise ValueError(f"others must be a dict of objects by name, not {others!r}")
        optimizer = _attached_as_one(optimizer)
        if isinstance(optimizer, OptimizerFrontEnd):
            optimizer, _ = optimizer.parts_to_save()
        front = own = None
        attached = synchronizer_of(optimizer)
        if isinstance(model, ModuleFrontEnd):
            front, (model, own) = model, model.parts_to_save()
            if own.driver.session.optimizer is None:
                check_free(optimizer)
                attached = own
        elif attached is not None and not attached.driver.session.settings.hooked:
            raise ValueError(
                "a wrapper of the model follows this optimizer: pass it as model, as it has state "
                "of its own"
            )
        if attached is None:
            raise ValueError(
                "no synchronizer belongs to this optimizer: call laconic.attach first, or use "
                "torch.save where nothing is communicated"
            )
        if any(each is not None and each is not attached for each in (sync, own)):
            raise ValueError(
                "sync (or the wrapped module) is not what follows this optimizer: pass what "
                "laconic.attach returned for it, or leave sync out"
            )
        return cls(model, optimizer, attached, dict(others or {}), front)

    def bind(self) -> None:
        """Bind a wrapped module to its optimizer if it is not yet; every rank calls it."""
        if self.front is not None and self.sync.driver.session.optimizer is None:
            self.front.bind(self.optimizer)

    def check_names(self) -> None:
        """Raise unless names in ``others`` can be saved."""
        for name in self.others:
            if not isinstance(name, str) or name == "step" or name.startswith(_PREFIX):
                raise ValueError(f"others: names must be strings other than 'step', not {name!r}")

    def objects(self) -> dict[str, Stateful]:
        """All that has state beside the model, the optimizer and the synchronizer, by name."""
        objects = {k: value for k, value in self.others.items() if isinstance(value, Stateful)}
        inside = {id(p) for module in (self.model, *objects.values()) for p in parameters(module)}
        outside = [p for group in self._groups() for p in group if id(p) not in inside]
        if outside:
            objects[f"{_PREFIX}parameters outside the model"] = _OutsideParameters(outside)
        return objects

    def holders(self) -> dict[str, Stateful]:
        """Those of `objects` that have parameters, by name."""
        kinds = nn.Module, _OutsideParameters
        return {name: each for name, each in self.objects().items() if isinstance(each, kinds)}

    def state_dict(self) -> dict[str, Any]:
        """All state of this rank, as plain data."""
        objects = self.objects()
        return {
            "random": random_state(),
            "sync": self.sync.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": plain(self.optimizer.state_dict()),
            "optimizer of": self._optimizer_of(objects),
            "objects": {name: plain(value.state_dict()) for name, value in objects.items()},
            "plain": {name: plain(v) for name, v in self.others.items() if name not in objects},
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless ``saved``, a rank's `state_dict`, fits these objects."""
        objects, states = self.objects(), saved["objects"]
        for name in sorted(objects.keys() ^ states.keys()):
            if name in states:
                raise ValueError(f"others lacks {name!r}, an object whose state was saved")
            raise ValueError(
                f"no state of others[{name!r}] was saved; objects with state: {sorted(states)}"
            )
        _check_model(self.model, saved["model"])
        if saved["optimizer of"] != self._optimizer_of(objects):
            raise ValueError(
                "the optimizer differs in its class, its groups or the parameters in them "
                f"({saved['optimizer of'][0]} was saved, this is "
                f"{class_names(members(self.optimizer))}): make the same one"
            )

    def _groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.optimizer.param_groups]

    def _optimizer_of(self, objects: Mapping[str, Stateful]) -> list[Any]:
        """The optimizer's class and, by group, its parameters' names (None outside all modules)."""
        modules = {"": self.model, **{k: m for k, m in objects.items() if isinstance(m, nn.Module)}}
        names = {
            id(p): f"{prefix}.{name}" if prefix else name
            for prefix, module in modules.items()
            for name, p in reversed(list(module.named_parameters()))
        }
        groups = [[names.get(id(p)) for p in group] for group in self._groups()]
        return [class_names(members(self.optimizer)), groups]


def _attached_as_one(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """``optimizer``, or of a list what `laconic.attach` made of the same list."""
    one = as_one(optimizer)
    attached = synchronizer_of(members(one)[0])
    bound = None if attached is None else attached.driver.session.optimizer
    if isinstance(one, JointOptimizer) or isinstance(bound, JointOptimizer):
        if not isinstance(bound, JointOptimizer) or members(bound) != members(one):
            raise ValueError(
                f"optimizer is {class_names(members(one))}: pass the optimizers that were given to "
                "laconic.attach, in the same order"
            )
        return bound
    return one


def parameters(value: object) -> list[nn.Parameter]:
    """The parameters of ``value`` if it is a module."""
    return list(value.parameters()) if isinstance(value, nn.Module) else []


def _check_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    here = {key: _kind(value) for key, value in model.state_dict().items()}
    there = {key: _kind(value) for key, value in saved.items()}
    differ = [k for k in {**here, **there} if here.get(k) != there.get(k)]
    if differ:
        first, more = differ[0], f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise ValueError(
            f"the model differs in {first!r}{more}: {there.get(first, 'nothing')} in the "
            f"checkpoint, {here.get(first, 'nothing')} here"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
