"""Keys of a wrapped module's state_dict: those of the module, without the wrapper's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

EXTRA = "_extra_state"


def without_prefix(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner) and key != inner + EXTRA]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def with_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept keys of `state_dict` and of the bare module, and keys with the prefix ``module.``.

    DistributedDataParallel and fairscale add that prefix.
    """
    inner = f"{prefix}module."
    own = {prefix + EXTRA, inner + EXTRA}
    extra = state.get(prefix + EXTRA)
    if extra is not None and not (isinstance(extra, Mapping) and "slowmo" in extra):
        state[inner + EXTRA] = state.pop(prefix + EXTRA)  # the bare module's own
    weight = state.pop(f"{prefix}ps_weight", None)  # in fairscale's states of SGP
    numerator = state.pop(f"{prefix}is_sgp_ps_numerator", False)
    if numerator and weight is not None and float(weight) != 1.0:
        raise ValueError(
            f"divide these weights by their push weight, {float(weight):g}, before loading them"
        )
    inside = wrapper.get_submodule("module")
    names = [name for name in inside.state_dict() if name != EXTRA]
    bare, wrapped = (sum(start + name in state for name in names) for start in (prefix, inner))
    if bare >= wrapped:
        for key in [key for key in state if key.startswith(prefix) and key not in own]:
            state[inner + key[len(prefix) :]] = state.pop(key)
    state.setdefault(prefix + EXTRA, None)
