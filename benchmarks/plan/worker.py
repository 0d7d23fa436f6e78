"""A worker of `benchmarks.plan.emulated`: a small model, and steps that last as long as described.

The emulated hosts share few processors, so a step mostly sleeps: after the forward pass, and before
each layer's gradient, until the time at which a step of the described length would be there.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.elastic import COORDINATOR_VARIABLE
from laconic.policy.facts import BACKWARD

WIDTH, LAYERS = 256, 8
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)


class Clock:
    """A step from ``begin`` that lasts ``seconds``."""

    begin = 0.0
    seconds = 0.0

    def sleep_until(self, share: float) -> None:
        """Sleep until this share of the step is over."""
        time.sleep(max(self.begin + share * self.seconds - time.perf_counter(), 0.0))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, share: float) -> Tensor:
        ctx.clock, ctx.share = clock, share
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.sleep_until(ctx.share)
        return grads[0], None, None


class Layers(nn.Module):
    """Layers whose gradients become available evenly over the last `BACKWARD` of a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            left = i / LAYERS  # of the backward pass, once this layer has its gradient
            x = _Wait.apply(layer(x), self._clock, 1 - BACKWARD * left)  # type: ignore[no-untyped-call]
        self._clock.sleep_until(1 - BACKWARD)
        return x


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    host = int(os.environ["GROUP_RANK"])
    recipe = parse_recipe(spec["recipe"])
    assert isinstance(recipe, tuple), "one of the settings"
    torch.manual_seed(0)
    clock = Clock()
    model = Layers(clock)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    elastic = None
    if os.environ.get(COORDINATOR_VARIABLE):
        elastic = laconic.Elastic(min_workers=2, workers=spec["hosts"], wait=60.0)
    else:
        laconic.init()
    sync = laconic.attach(model, optimizer, recipe, elastic=elastic, timeout=60)
    draw = random.Random(1000 * spec["seed"] + host + os.getpid())
    mean = spec["step"] * spec["slow"].get(str(host), 1.0)
    sigma = math.sqrt(math.log1p(spec["spread"] ** 2))
    data = torch.Generator().manual_seed(host)
    end, begin, own = spec["warmup"] + spec["steps"], 0.0, 0
    limit = spec["seconds"]
    while sync.step < end:
        clock.begin = time.perf_counter()
        clock.seconds = mean * draw.lognormvariate(-(sigma**2) / 2, sigma)
        x = torch.randn(2, WIDTH, generator=data)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if sync.step == spec["warmup"]:
            begin, own = time.time(), 0
        elif begin:
            own += 1
            if limit and time.time() > begin + limit:
                break
    finished = time.time()
    if begin:  # not of a worker that has joined later
        line = {"host": host, "begin": begin, "end": finished, "steps": own}
        print("result " + json.dumps(line), flush=True)
    with suppress(laconic.LinkError):
        sync.finish()


if __name__ == "__main__":
    main()
