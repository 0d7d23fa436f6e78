"""Texts that travel between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""As `Link.gather`: every rank's tensor, stacked."""


def clean(text: str) -> str:
    """``text`` without characters that do not print, such as control characters: it came over the
    network, and a terminal will show it."""
    return "".join(c if c.isprintable() else " " for c in text)


def exchange_texts(gather: Gather, text: str) -> list[str]:
    """Every rank's ``text``, by rank. Two gathers: the lengths, then the texts, padded. All ranks
    must call it."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [int(n) for n in gather(torch.tensor([len(own)])).flatten().tolist()]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    rows = gather(padded).tolist() if max(lengths) else [[] for _ in lengths]
    return [bytes(row[:n]).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]
