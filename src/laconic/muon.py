"""Muon for a model's matrices, beside AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from laconic.errors import check_float


def muon(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    adamw: Sequence[str] = (),
) -> list[Optimizer]:
    """Return ``[torch.optim.Muon, torch.optim.AdamW]`` for ``model``, a list that `attach` takes.

    Muon trains the matrices of hidden layers: parameters of two dimensions, but not those of
    ``nn.Embedding`` and ``nn.EmbeddingBag``, nor that of the last ``nn.Linear`` of
    ``model.modules()``, which is taken for the output layer. AdamW trains all others. Muon's steps
    are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so one ``lr`` serves
    both. Parameters without ``requires_grad`` are left out. Jordan et al. 2024; the scale: Liu et
    al. 2025, arXiv 2502.16982.

    Args:
        model: the module to train.
        lr: the learning rate of both, above 0.
        momentum: Muon's, with Nesterov, in [0, 1).
        weight_decay: of both, at least 0.
        betas: AdamW's.
        adamw: AdamW also trains the parameters whose names begin with one of these.

    Raises ``ValueError`` if torch is older than 2.9, if the model has no matrix for Muon, or if no
    parameter has a name that begins as ``adamw`` says.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> [type(optimizer).__name__ for optimizer in laconic.muon(model)]
        ['Muon', 'AdamW']
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"torch.optim.Muon needs torch 2.9, and this is {torch.__version__}: use "
            "torch.optim.AdamW, or a newer torch"
        )
    check_float("lr", lr, 0.0, strict=True)
    check_float("momentum", momentum, 0.0, 1.0)
    check_float("weight_decay", weight_decay, 0.0)
    names = [name for name, _ in model.named_parameters()]
    for start in adamw:
        if not any(name.startswith(start) for name in names):
            raise ValueError(
                f"adamw={adamw!r}: no parameter has a name that begins with {start!r}. The names "
                f"are {', '.join(names)}"
            )
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    embeddings = nn.Embedding, nn.EmbeddingBag
    embedded = [m.weight for m in model.modules() if isinstance(m, embeddings)]
    kept = {id(p) for p in [*embedded, *linear[-1:]]}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        hidden = p.dim() == 2 and id(p) not in kept and not name.startswith(tuple(adamw))
        (matrices if hidden else others).append(p)
    if not matrices:
        raise ValueError(
            "the model has no matrix for Muon: none of its hidden layers has a weight of two "
            "dimensions. Use torch.optim.AdamW"
        )
    optimizers: list[Optimizer] = [
        torch.optim.Muon(
            matrices,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    if others:
        optimizers.append(AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay))
    return optimizers
