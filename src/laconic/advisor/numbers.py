"""Build the facts for advice from numbers alone, without a measurement."""

from __future__ import annotations

from laconic.errors import check_choice, check_float, check_int
from laconic.policy.facts import BACKWARD, Facts, Net

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MOST_PARAMS = 10**13
SIDE = 4096
"""Side of the square matrices assumed if the model's tensors are unknown. Recipes that send
low-rank matrices or tiles depend on it."""


def facts_from(
    *,
    params: int,
    step_time: float,
    bandwidth: float,
    one_way: float,
    workers: int,
    ranks: int = 1,
    backward_share: float = BACKWARD,
    dtype: str = "float32",
    local_bandwidth: float | None = None,
    loss: float = 0.0,
) -> Facts:
    """Return facts for training on ``workers`` nodes of ``ranks`` ranks each.

    The model has ``params`` parameters of ``dtype``. A step computes for ``step_time`` seconds, a
    ``backward_share`` of them in the backward pass. Each node's network interface has ``bandwidth``
    bit/s and ``one_way`` seconds per message, half of a round trip. Ranks of a node are connected
    by ``local_bandwidth`` (None: averages inside a node are free). A share ``loss`` of the packets
    between nodes is lost.

    The ranks of a node share its interface: each sends its part of a round between nodes. An
    all-reduce over all ranks passes each interface once, like NCCL's rings. An exchange from every
    rank to every other passes it once per rank, except for what stays in the node.

    Raises ``ValueError`` for numbers out of range or in conflict with each other.
    """
    if check_int("params", params, 1) > MOST_PARAMS:
        raise ValueError(f"params must be at most {MOST_PARAMS:.0e}, not {params:.3g}")
    check_float("step-time", step_time, 0.0, strict=True)
    check_float("bandwidth", bandwidth, 0.0, strict=True)
    check_float("latency", one_way, 0.0)
    check_int("workers", workers, 2)
    check_int("ranks", ranks, 1)
    check_float("backward-share", backward_share, 0.0, most=1.0)
    check_choice("dtype", dtype, ITEMSIZES)
    if not 0 <= check_float("loss", loss, 0.0) < 1:
        raise ValueError(f"loss must be from 0 to less than 1, not {loss!r}")
    if local_bandwidth is not None:
        if ranks == 1:
            raise ValueError(
                "local-bandwidth applies between the ranks of a worker: give ranks > 1"
            )
        if local_bandwidth < bandwidth:
            raise ValueError(
                "local-bandwidth is less than bandwidth: count each rank as a worker of its own"
            )
    nets = {}
    if ranks > 1:
        shared = Net(bandwidth / ranks, one_way)
        external = (workers - 1) * ranks / (workers * ranks - 1)  # the rest stays in the node
        direct = Net(bandwidth / ranks / external, one_way)
        nets = {"workers": shared, "direct": direct, "world": Net(bandwidth, one_way)}
        nets["replica"] = Net(local_bandwidth or float("inf"), 0.0)
    squares, rest = divmod(params, SIDE * SIDE)
    rows, rest = divmod(rest, SIDE)
    shapes = ((SIDE, SIDE),) * squares + ((rows, SIDE),) * bool(rows) + ((rest,),) * bool(rest)
    return Facts(
        workers=workers,
        shapes=shapes,
        itemsize=ITEMSIZES[dtype],
        compute=step_time,
        rate=bandwidth,
        one_way=one_way,
        loss=loss,
        backward=backward_share,
        ranks=ranks,
        nets=nets,
        muon=True,
        own=True,
    )
