"""laconic in Ray Train: the function that Ray runs on every worker attaches it.

    pip install 'ray[train]'
    python examples/ray_train.py --workers 2

Ray connects the workers. Each one saves its own state, Ray gathers the files in one checkpoint, and
a worker that Ray starts again continues from there.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import ray
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import laconic


def train(config):
    torch.manual_seed(ray.train.get_context().get_world_rank())  # each worker has its own data
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    model = prepare_model(model, parallel_strategy=None)  # no DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with laconic.attach(model, optimizer, laconic.diloco(10)) as sync:
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                laconic.load(folder, model, optimizer)
        while sync.step < config["steps"]:
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True) / 16)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if sync.step % config["save_every"] == 0:
                with TemporaryDirectory() as folder:
                    laconic.save(folder, model, optimizer)
                    metrics = {"step": sync.step, "loss": sync.mean(loss)}
                    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    # every worker holds the consensus model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="ray", help="for checkpoints")
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps, "save_every": 50},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="laconic",
            storage_path=str(Path(options.folder).resolve()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
