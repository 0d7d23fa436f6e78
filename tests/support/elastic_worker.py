"""One worker of an elastic run, for tests: ``worker.py NAME RECIPE STEPS COORDINATOR [OPTION=..]``.

Writes a line for each event: ready, view, done with a digest of the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from typing import Any

import torch

import laconic


def main(name: str, recipe: str, steps: int, coordinator: str, options: dict[str, Any]) -> None:
    def say(event: str, **more: Any) -> None:
        print(json.dumps({"event": event, "time": time.monotonic(), **more}), flush=True)

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 100),
        torch.nn.BatchNorm1d(100),
        torch.nn.Tanh(),
        torch.nn.Linear(100, 5),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if options.pop("hold", False):
        sys.stdin.readline()
    pace = options.pop("pace", 0.003)
    elastic = laconic.Elastic(coordinator, **options)
    recipes = {"laconic": laconic}
    sync = laconic.attach(model, optimizer, eval(recipe, recipes), elastic=elastic, timeout=60)
    say("ready", step=sync.step, workers=len(sync.view.workers))
    sync.on_change(lambda view: say("view", workers=len(view.workers), step=sync.step))
    generator = torch.Generator().manual_seed(int(name))
    while sync.step < steps:
        x = torch.randn(16, 20, generator=generator)
        loss = (model(x) - x[:, :5].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        time.sleep(pace)
    sync.finish()
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            digest.update(tensor.detach().numpy().tobytes())
    say("done", digest=digest.hexdigest(), loss=loss.item(), workers=len(sync.view.workers))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]))
