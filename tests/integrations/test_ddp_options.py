"""Options of DistributedDataParallel, which laconic does not use, are refused and not ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import laconic as la

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def test_of_accelerate() -> None:
    from laconic.integrations.accelerate import attach

    options = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[options])
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="leave DistributedDataParallelKwargs out"):
        attach(accelerator, model, torch.optim.SGD(model.parameters()), la.local_sgd(2))


@pytest.mark.parametrize(
    "options", [{"ddp_find_unused_parameters": False}, {"ddp_bucket_cap_mb": 25}]
)
def test_of_the_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    from laconic.integrations.transformers import LaconicTrainer

    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[], **options)
    with pytest.raises(ValueError, match=f"leave {next(iter(options))} out"):
        LaconicTrainer(torch.nn.Linear(2, 1), arguments, recipe=la.local_sgd(2))
