"""Count the calls of laconic that a parameter passes on its way to the link.

    python -m benchmarks.frames [RECIPE ...]

For each recipe: the deepest stack of laconic's own frames when a bucket is packed in the caller's
thread, and when a collective begins in the communication thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

import laconic as la
from laconic.buckets import Bucket
from laconic.links.null import NullLink

RECIPES = ("local_sgd(2)", "ddp(codec='int4')", "streaming_diloco(4, 2, 1, outer='muon')")
COLLECTIVES = ("mean", "reduce_scatter", "all_gather", "all_to_all")
deepest: dict[str, list[str]] = {}


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which notes the frames that lead to it."""

    def call(*args: Any, **options: Any) -> Any:
        frame, names = sys._getframe(1), [function.__qualname__]
        while frame is not None:
            if f"{la.__name__}/" in frame.f_code.co_filename:
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back  # type: ignore[assignment]
        caller = threading.current_thread() is threading.main_thread()
        where = "caller" if caller else "communication thread"
        deepest[where] = max(deepest.get(where, []), names, key=len)
        return function(*args, **options)

    return call


def main() -> None:
    for name in COLLECTIVES:
        setattr(NullLink, name, watched(getattr(NullLink, name)))
    Bucket.pack = watched(Bucket.pack)  # type: ignore[method-assign]
    for recipe in sys.argv[1:] or RECIPES:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        la.attach(model, optimizer, recipe, link=NullLink(2))
        deepest.clear()
        for _ in range(8):
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for where, names in deepest.items():
            print(f"{recipe}: {len(names)} in the {where}: {' < '.join(names)}")


if __name__ == "__main__":
    main()
