"""A worker of `benchmarks.plan.emulated`: a small model, and steps that last as long as described.

A step computes, and then sleeps until its time is over: the emulated hosts share few processors.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from contextlib import suppress

import torch

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.elastic import COORDINATOR_VARIABLE

SIDES = (256, 1024, 256)
PARAMETERS = 256 * 1024 + 1024 + 1024 * 256 + 256


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    host = int(os.environ["GROUP_RANK"])
    recipe = parse_recipe(spec["recipe"])
    assert isinstance(recipe, tuple), "one of the settings"
    torch.manual_seed(0)
    a, b, c = SIDES
    model = torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Linear(b, c))
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
        start = time.perf_counter()
        x = torch.randn(2, a, generator=data)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        rest = mean * draw.lognormvariate(-(sigma**2) / 2, sigma) - (time.perf_counter() - start)
        time.sleep(max(rest, 0.0))
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
