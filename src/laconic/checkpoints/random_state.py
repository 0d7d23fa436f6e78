"""The state of the random generators: Python's, torch's and NumPy's."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from laconic.checkpoints.rank_file import plain


def random_state() -> dict[str, Any]:
    """The generators' state as plain data; None for NumPy and CUDA if they are not in use."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": None if numpy is None else _numpy_state(numpy.random.get_state(legacy=False)),
        "cuda": torch.cuda.get_rng_state() if _cuda_in_use() else None,
    }


def _cuda_in_use() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


def _numpy_state(state: dict[str, Any]) -> Any:
    inner = {k: v if isinstance(v, int) else v.tolist() for k, v in state["state"].items()}
    return plain({**state, "state": inner})


def check_random_state(saved: Mapping[str, Any]) -> None:
    """Raise if ``saved`` is no random state. Tries it on generators of its own."""
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.RandomState().set_state(saved["numpy"])
    cuda = saved["cuda"] if torch.cuda.is_available() else None
    if cuda is not None and cuda.shape != torch.cuda.get_rng_state().shape:
        raise ValueError(
            f"the CUDA generator's state has shape {tuple(cuda.shape)}, which is not that of this "
            "version of torch"
        )


def load_random_state(saved: Mapping[str, Any]) -> None:
    """Load ``saved``; skip NumPy and CUDA if this process does not have them."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None and (numpy := _numpy()) is not None:
        numpy.random.set_state(saved["numpy"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])


def _numpy() -> Any:
    """NumPy, which the run may import only later; None if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None
