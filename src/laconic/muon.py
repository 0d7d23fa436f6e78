"""Muon for a model's matrices, beside AdamW for everything else."""

from __future__ import annotations

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
    adamw: tuple[str, ...] = (),
) -> list[Optimizer]:
    """Return ``[torch.optim.Muon, torch.optim.AdamW]`` for ``model``, a list that `attach` takes.

    Muon trains the matrices of hidden layers: parameters of two dimensions, but not those of
    ``nn.Embedding``, nor that of the last ``nn.Linear`` of ``model.modules()``, the output layer.
    AdamW trains all others, and the parameters whose names begin with one of ``adamw``. Muon's
    steps are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so one ``lr``
    serves both. ``momentum`` is Muon's, with Nesterov; ``betas`` are AdamW's. Parameters without
    ``requires_grad`` are left out. Jordan et al. 2024; the scale: Liu et al. 2025, arXiv
    2502.16982.

    Raises ``ValueError`` if torch is older than 2.9, or if the model has no matrix for Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"torch.optim.Muon needs torch 2.9, and this is {torch.__version__}: use "
            "torch.optim.AdamW, or a newer torch"
        )
    check_float("lr", lr, 0.0, strict=True)
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    embedded = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    kept = {id(p) for p in [*embedded, *linear[-1:]]}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        hidden = p.dim() == 2 and id(p) not in kept and not name.startswith(adamw)
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
