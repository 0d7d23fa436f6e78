"""Print the Python frames between the optimizer's hook and the socket, for one dense round.

    python -m benchmarks.frames

Two processes train under ``local_sgd(1)``. Rank 0 records its stack where it hands the round to the
communication thread, and where that thread moves bytes. Only frames of laconic count.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn

import laconic
from laconic.links import frames
from laconic.links.comm_thread import CommThread

SOURCE = str(Path(laconic.__file__).parent)
Stack = list[str]


def laconic_frames() -> Stack:
    """The caller's stack, outermost first, as ``file:function`` of laconic's own code."""
    return [
        f"{Path(frame.filename).relative_to(SOURCE)}:{frame.name}"
        for frame in traceback.extract_stack()[:-2]
        if frame.filename.startswith(SOURCE)
    ]


def train(rank: int, port: int) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = laconic.attach(model, optimizer, laconic.local_sgd(1))
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    handed: list[Stack] = []
    moved: list[Stack] = []
    submit, move = CommThread.submit, frames.move

    def recorded_submit(*given: object) -> object:
        handed.append(laconic_frames())
        return submit(*given)  # type: ignore[arg-type]

    def recorded_move(*given: object) -> object:
        moved.append(laconic_frames())
        return move(*given)  # type: ignore[arg-type]

    CommThread.submit, frames.move = recorded_submit, recorded_move  # type: ignore[assignment, method-assign]
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    CommThread.submit, frames.move = submit, move  # type: ignore[method-assign]
    sync.finish()
    if rank == 0:
        above, send, wait = handed[0], moved[0], max(moved, key=len)
        stacks = {
            "training thread": above,
            "communication thread, sending": send,
            "communication thread, waiting": wait,
        }
        for title, stack in stacks.items():
            print(f"{title}:", *stack, sep="\n  ")
        for what, below in (("sending", send), ("waiting", wait)):
            print(f"{what}: {len(above)} + {len(below)} = {len(above) + len(below)} frames")
        sys.stdout.flush()


def main() -> None:
    from benchmarks.traps import free_port

    mp.spawn(train, (free_port(),), nprocs=2)


if __name__ == "__main__":
    main()
