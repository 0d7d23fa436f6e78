"""The state of the random generators of Python, torch, NumPy and accelerators."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from laconic.device import ACCELERATORS
from laconic.tensors import plain


def random_state() -> dict[str, Any]:
    """The generators' state as plain data; None for those not in use."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": None if numpy is None else _numpy_state(numpy.random.get_state(legacy=False)),
        **{name: a.random_state() if a.in_use() else None for name, a in ACCELERATORS.items()},
    }


def _numpy_state(state: dict[str, Any]) -> Any:
    inner = {k: v if isinstance(v, int) else v.tolist() for k, v in state["state"].items()}
    return plain({**state, "state": inner})


def check_random_state(saved: Mapping[str, Any]) -> None:
    """Raise if ``saved`` is no random state. Tries it on generators of its own."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.RandomState().set_state(saved["numpy"])
    for name, accelerator in ACCELERATORS.items():
        state = saved.get(name) if accelerator.count() else None
        if state is not None and state.shape != accelerator.random_state().shape:
            raise ValueError(
                f"the {name.upper()} generator's state has shape {tuple(state.shape)}: another "
                "version of torch saved it"
            )


def load_random_state(saved: Mapping[str, Any]) -> None:
    """Load ``saved``; skip generators that this process does not have."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.set_state(saved["numpy"])
    for name, accelerator in ACCELERATORS.items():
        if saved.get(name) is not None and accelerator.count():
            accelerator.set_random_state(saved[name])


def _numpy() -> Any:
    """Import NumPy, even if the run has not yet, and return it. None if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None
