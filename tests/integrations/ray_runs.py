"""The example for Ray Train on two local workers, of which one is killed once. Prints its end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_train import train  # type: ignore[import-not-found]  # in examples

import laconic


def killed_once(config: dict[str, Any]) -> None:
    """The example's function, with an end of rank 1 before it saves for the third time."""
    save, saved, marker = laconic.save, [0], Path(config["marker"])

    def counted(*arguments: Any, **more: Any) -> None:
        saved[0] += 1
        if saved[0] == 3 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os._exit(1)
        save(*arguments, **more)

    laconic.save = counted
    train(config)


def main() -> None:
    folder = sys.argv[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    trainer = TorchTrainer(
        killed_once,
        train_loop_config={"steps": 200, "save_every": 50, "marker": f"{folder}/marker"},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="laconic", storage_path=folder, failure_config=FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    checkpoint = result.checkpoint
    assert checkpoint is not None and result.metrics is not None
    print(json.dumps({"metrics": result.metrics, "checkpoint": checkpoint.path}))
    ray.shutdown()


if __name__ == "__main__":
    main()
