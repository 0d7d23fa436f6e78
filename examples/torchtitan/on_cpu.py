"""torchtitan on CPUs, with a small model, and a record of what each rank does. For the test."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks when it is imported
torch.cpu.current_device = lambda: 0  # for barrier(device_ids=)
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # needs triton
if not hasattr(dist, "set_timeout"):  # torch 2.13
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

import torchtitan_diloco  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.train import main  # noqa: E402

divide = FSDPModule.set_gradient_divide_factor


def sum_gradients(module: FSDPModule, factor: float) -> None:
    """Without NCCL's premultiplied sum, which gloo does not have."""
    divide(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = sum_gradients
metrics.build_device_memory_monitor = lambda: SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
    reset_peak_stats=lambda: None,
)


class Recording(torchtitan_diloco.SitesTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan_diloco.SitesTrainer.Config):
        pass

    def train_step(self, data_iterator: Any) -> None:
        batches: list[int] = []

        def watched() -> Any:
            for batch in data_iterator:
                batches.append(digest(batch[0]["input"]))
                yield batch

        super().train_step(watched())
        local = [p.to_local() for p in self.model_parts[0].parameters()]
        row = {
            "step": self.step,
            "shard": digest(*local),
            "shard_bytes": sum(p.nbytes for p in local),
            "sent": self.sync.stats().bytes_sent,
            "batches": batches,
        }
        with open(f"{self.config.dump_folder}/rank{dist.get_rank()}.jsonl", "a") as out:
            out.write(json.dumps(row) + "\n")


def digest(*tensors: torch.Tensor) -> str:
    whole = hashlib.sha256()
    for each in tensors:
        whole.update(each.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()[:12]


def small() -> Recording.Config:
    """torchtitan's debug model with two layers, and attention that CPUs can differentiate."""
    config = torchtitan_diloco.llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return Recording.Config(**{f.name: getattr(config, f.name) for f in fields(config)})


if __name__ == "__main__":
    main()
