"""Advice from numbers alone, without a machine at hand."""

from __future__ import annotations

from laconic.errors import check_choice, check_float, check_int
from laconic.predict import BACKWARD, Facts, Net

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MOST_PARAMS = 10**13
SIDE = 4096
"""Of the square matrices that a model is taken for, where its tensors are not known: recipes that
send matrices of low rank, or tiles, depend on it."""


def facts_from(
    *,
    params: int,
    step_time: float,
    bandwidth: float,
    latency: float,
    nodes: int,
    nprocs_per_node: int = 1,
    backward_share: float = BACKWARD,
    dtype: str = "float32",
    local_bandwidth: float | None = None,
) -> Facts:
    """Facts of a training on ``nodes`` workers of ``nprocs_per_node`` ranks each, as
    `laconic.attach` means it: ``params`` parameters of ``dtype``, ``step_time`` seconds of
    computing per step, of which backward takes ``backward_share``; each node's card does
    ``bandwidth`` bit/s with ``latency`` seconds per message, and the link between ranks of a node
    ``local_bandwidth`` (None: averages inside a node are free).

    The ranks of a node share its card: each carries its part of a round between nodes. An
    all-reduce over all ranks passes each card once, as NCCL's rings do; what every rank sends to
    every other does so once for each rank, but for what stays in the node.

    Raises ``ValueError`` for numbers out of range or at odds with each other.
    """
    if check_int("params", params, 1) > MOST_PARAMS:
        raise ValueError(f"params must be at most {MOST_PARAMS:.0e}, not {params:.3g}")
    check_float("step-time", step_time, 0.0, strict=True)
    check_float("bandwidth", bandwidth, 0.0, strict=True)
    check_float("latency", latency, 0.0)
    check_int("nodes", nodes, 2)
    each = check_int("nprocs-per-node", nprocs_per_node, 1)
    check_float("backward-share", backward_share, 0.0, most=1.0)
    check_choice("dtype", dtype, ITEMSIZES)
    if local_bandwidth is not None:
        if each == 1:
            raise ValueError(
                "local-bandwidth is between the ranks of a node: give nprocs-per-node > 1"
            )
        if local_bandwidth < bandwidth:
            raise ValueError(
                "local-bandwidth is less than bandwidth: the ranks of a node are then nodes of "
                "their own, so count them as such"
            )
    nets = {}
    if each > 1:
        shared = Net(bandwidth / each, latency)
        local = Net(local_bandwidth or float("inf"), 0.0)
        leaving = (nodes - 1) * each / (nodes * each - 1)  # the others stay in the node
        direct = Net(bandwidth / each / leaving, latency)
        nets = {"workers": shared, "direct": direct, "replica": local}
        nets["world"] = Net(bandwidth, latency)
    squares, rest = divmod(params, SIDE * SIDE)
    rows, rest = divmod(rest, SIDE)
    shapes = ((SIDE, SIDE),) * squares + ((rows, SIDE),) * bool(rows) + ((rest,),) * bool(rest)
    return Facts(
        workers=nodes,
        shapes=shapes,
        itemsize=ITEMSIZES[dtype],
        compute=step_time,
        rate=bandwidth,
        latency=latency,
        backward=backward_share,
        ranks=each,
        nets=nets,
    )
