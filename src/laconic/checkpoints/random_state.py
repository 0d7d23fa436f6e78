"""The state of the random generators of Python, torch, NumPy and accelerators."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
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


def load_random_state(saved: Mapping[str, Any]) -> None:
    """Load ``saved``; skip generators that this process does not have."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None:
        with suppress(ImportError):  # the run that saved it had NumPy
            importlib.import_module("numpy").random.set_state(saved["numpy"])
    for name, accelerator in ACCELERATORS.items():
        if saved.get(name) is not None and accelerator.count():
            accelerator.set_random_state(saved[name])
