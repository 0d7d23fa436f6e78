"""Every recipe and its plain-loop float64 reference, which the tests compare in many ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import laconic as la
from laconic.algorithms.topology import Graph

from tests.references import reference as ref
from tests.references import reference_decade as decade
from tests.references import reference_elastic as elastic
from tests.references import reference_gossip as gossip
from tests.references import reference_leader as leader
from tests.references import reference_newest as newest

ADAM = partial(torch.optim.Adam, lr=0.03)


def pairs(k: int, n: int) -> list[tuple[int, int]]:
    """The random pairs, as the reference wants to be told them."""
    edges = [(r, p) for r in range(n) for p in Graph("random").out_peers(r, n, k)]
    return [(a, b) for a, b in edges if a < b]


ROWS: dict[str, tuple[la.Recipe, ref.Recipe]] = {
    "nothing": ((), ref.Recipe()),
    "ddp": (la.ddp(), ref.ddp()),
    "local_sgd(1)": (la.local_sgd(1), ref.local_sgd(1)),
    "local_sgd(4)": (la.local_sgd(4), ref.local_sgd(4)),
    "local_sgd(4, delay=2)": (la.local_sgd(4, delay=2), ref.local_sgd(4, delay=2)),
    "local_sgd(3, delay=7)": (la.local_sgd(3, delay=7), ref.local_sgd(3, delay=7)),
    "local_sgd(1, delay=1)": (la.local_sgd(1, delay=1), ref.local_sgd(1, delay=1)),
    "local_sgd(4, average)": (
        la.local_sgd(4, optimizer_state="average"),
        ref.local_sgd(4, optimizer_state="average"),
    ),
    "local_sgd(4, reset)": (
        la.local_sgd(4, optimizer_state="reset"),
        ref.local_sgd(4, optimizer_state="reset"),
    ),
    "post_local_sgd(6, 4)": (la.post_local_sgd(6, 4), ref.post_local_sgd(6, 4)),
    "slowmo(None, 4)": (la.slowmo(None, 4, 0.5), ref.slowmo(None, 4)),
    "slowmo(local_sgd(2), 6)": (
        la.slowmo(la.local_sgd(2), 6, 0.6, 0.9),
        ref.slowmo(ref.local_sgd(2), 6, 0.6, 0.9),
    ),
    "slowmo(local_sgd(2), 6, unsharded)": (
        la.slowmo(la.local_sgd(2), 6, 0.5, sharded=False),
        ref.slowmo(ref.local_sgd(2), 6),
    ),
    "slowmo(local_sgd(2), 6, no average)": (
        la.slowmo(la.local_sgd(2), 6, 0.5, average=False),
        ref.slowmo(ref.local_sgd(2), 6, average=False),
    ),
    "slowmo(local_sgd(2), 6, reset)": (
        la.slowmo(la.local_sgd(2), 6, 0.5, optimizer_state="reset"),
        ref.slowmo(ref.local_sgd(2), 6, optimizer_state="reset"),
    ),
    "slowmo(local_sgd(2), 6, average)": (
        la.slowmo(la.local_sgd(2, optimizer_state="average"), 6, 0.5, optimizer_state="average"),
        ref.slowmo(ref.local_sgd(2, optimizer_state="average"), 6, optimizer_state="average"),
    ),
    "slowmo(local_sgd(3, delay=4), 5)": (
        la.slowmo(la.local_sgd(3, delay=4), 5, 0.5),
        ref.slowmo(ref.local_sgd(3, delay=4), 5),
    ),
    "slowmo(post_local_sgd(5, 2), 4)": (
        la.slowmo(la.post_local_sgd(5, 2), 4, 0.5),
        ref.slowmo(ref.post_local_sgd(5, 2), 4),
    ),
    "slowmo(ddp, 3)": (la.slowmo(la.ddp(), 3, 0.5), ref.slowmo(ref.ddp(), 3)),
    "diloco(4)": (la.diloco(4, 0.7, 0.9), ref.diloco(4, 0.7, 0.9)),
    "diloco(4, unsharded)": (la.diloco(4, sharded=False), ref.diloco(4)),
    "diloco(4, no momentum)": (la.diloco(4, 0.5, 0.0), ref.diloco(4, 0.5, 0.0)),
    "diloco(4, delay=3)": (la.diloco(4, delay=3), ref.diloco(4, delay=3)),
    "diloco(3, delay=5)": (la.diloco(3, delay=5), ref.diloco(3, delay=5)),
    "diloco(4, Adam)": (
        la.diloco(4, outer=ADAM),
        ref.diloco(4, outer=ref.adam_outer(lr=0.03)),
    ),
    "diloco(4, Adam, unsharded)": (
        la.diloco(4, outer=ADAM, sharded=False),
        ref.diloco(4, outer=ref.adam_outer(lr=0.03)),
    ),
    "sgp()": (la.sgp(), gossip.sgp()),
    "sgp(peers=2)": (la.sgp(peers=2), gossip.sgp(peers=2)),
    "sgp(delay=1)": (la.sgp(delay=1), gossip.sgp(delay=1)),
    "sgp(ring, 2, delay=3)": (la.sgp("ring", 2, delay=3), gossip.sgp("ring", 2, 3)),
    "sgp(directed_exponential)": (
        la.sgp("directed_exponential"),
        gossip.sgp("directed_exponential"),
    ),
    "sgp(bipartite_exponential, delay=2)": (
        la.sgp("bipartite_exponential", delay=2),
        gossip.sgp("bipartite_exponential", delay=2),
    ),
    "sgp(directed_linear, 3)": (la.sgp("directed_linear", 3), gossip.sgp("directed_linear", 3)),
    "sgp(bipartite_linear)": (la.sgp("bipartite_linear"), gossip.sgp("bipartite_linear")),
    "sgp(complete)": (la.sgp("complete"), gossip.sgp("complete")),
    "sgp(random, delay=1)": (
        la.sgp("random", delay=1),
        gossip.sgp("random_pairs", delay=1, pairing=pairs),
    ),
    "d_psgd()": (la.d_psgd(), gossip.d_psgd()),
    "d_psgd(exponential, delay=2)": (
        la.d_psgd("exponential", delay=2),
        gossip.d_psgd("exponential", 2),
    ),
    "d_psgd(bipartite_linear)": (la.d_psgd("bipartite_linear"), gossip.d_psgd("bipartite_linear")),
    "d_psgd(random)": (la.d_psgd("random"), gossip.d_psgd("random_pairs", pairing=pairs)),
    "easgd(3)": (la.easgd(3), elastic.easgd(3)),
    "easgd(2, 0.5, pull=0.3)": (la.easgd(2, 0.5, pull=0.3), elastic.easgd(2, 0.5, 0.3)),
    "eamsgd(4, pull=0.1)": (la.eamsgd(4, pull=0.1), elastic.eamsgd(4, pull=0.1)),
    "downpour(3)": (la.downpour(3), elastic.downpour(3)),
    "lsgd(3)": (la.lsgd(3), leader.lsgd(3)),
    "lsgd(4, pulls)": (
        la.lsgd(4, local_period=0, pull=0.4, drift=0.3, window=3),
        leader.lsgd(4, pull=0.4, drift=0.3, window=3),
    ),
    "slowmo(sgp(), 4)": (la.slowmo(la.sgp(), 4, 0.6), decade.slowmo(gossip.sgp(), 4, 0.6)),
    "slowmo(sgp(delay=2), 5)": (
        la.slowmo(la.sgp(delay=2), 5, 0.5),
        decade.slowmo(gossip.sgp(delay=2), 5),
    ),
    "slowmo(sgp(bipartite_linear, delay=2), 5)": (
        la.slowmo(la.sgp("bipartite_linear", delay=2), 5, 0.5),
        decade.slowmo(gossip.sgp("bipartite_linear", delay=2), 5),
    ),
    "slowmo(sgp(bipartite_linear, delay=2), 5, no average)": (
        la.slowmo(la.sgp("bipartite_linear", delay=2), 5, 0.5, average=False),
        decade.slowmo(gossip.sgp("bipartite_linear", delay=2), 5, average=False),
    ),
    "slowmo(sgp(), 4, reset)": (
        la.slowmo(la.sgp(), 4, 0.5, optimizer_state="reset"),
        decade.slowmo(gossip.sgp(), 4, optimizer_state="reset"),
    ),
    "slowmo(sgp(), 4, average)": (
        la.slowmo(la.sgp(), 4, 0.5, optimizer_state="average"),
        decade.slowmo(gossip.sgp(), 4, optimizer_state="average"),
    ),
    "slowmo(d_psgd(delay=1), 4)": (
        la.slowmo(la.d_psgd(delay=1), 4, 0.5),
        decade.slowmo(gossip.d_psgd(delay=1), 4),
    ),
    "slowmo(easgd(2, pull=0.2), 6)": (
        la.slowmo(la.easgd(2, pull=0.2), 6, 0.5),
        decade.slowmo(elastic.easgd(2, pull=0.2), 6),
    ),
    "slowmo(downpour(2), 4)": (
        la.slowmo(la.downpour(2), 4, 0.5),
        decade.slowmo(elastic.downpour(2), 4),
    ),
    "slowmo(lsgd(2), 4)": (
        la.slowmo(la.lsgd(2, local_period=0), 4, 0.5),
        decade.slowmo(leader.lsgd(2), 4),
    ),
    "des_loc(2, 4, 6)": (la.des_loc(2, 4, 6), newest.des_loc(2, 4, 6)),
    "des_loc(2)": (la.des_loc(2), newest.des_loc(2, 6, 12)),
    "muloco(4)": (la.muloco(4), ref.diloco(4, 0.7, 0.6)),
    "muloco(4, outer='muon')": (la.muloco(4, outer="muon"), newest.muloco(4, 0.7, 0.6)),
    "muloco(3, outer='muon', delay=2)": (
        la.muloco(3, 0.5, 0.0, outer="muon", delay=2, mix=0.3),
        newest.muloco(3, 0.5, 0.0, 2, 0.3),
    ),
    "streaming_diloco(3, 1, 2, outer='muon')": (
        la.streaming_diloco(3, 1, 2, codec=None, outer="muon"),
        newest.muloco(3, 1.0, 0.6, 2, keep=True),
    ),
    "diloco(4, rda)": (la.diloco(4, 0.7, 0.5, average="rda"), newest.diloco_rda(4, 0.7, 0.5)),
    "diloco(4, rda, delay=3)": (
        la.diloco(4, average="rda", delay=3, mix=0.2),
        newest.diloco_rda(4, 0.7, 0.9, 3, 0.2),
    ),
}
GOSSIP = [row for row in ROWS if "sgp(" in row or "d_psgd(" in row]
NEWER = list(ROWS)[list(ROWS).index("sgp()") :]
IN_PROCESSES = {row: 4 if row in NEWER or place % 2 else 2 for place, row in enumerate(ROWS)}
"""With how many workers `test_links_agree` compares a row, over both links, with its reference."""
BOUND = {row: 1e-8 if "outer='muon'" in row else 1e-10 for row in ROWS}
"""The largest difference from the reference. Muon's direction multiplies small singular values by
up to 423, and with them the rounding errors, which depend on the processor: up to 3e-10 was seen.
"""

GROUPED: dict[str, tuple[la.Recipe, Callable[[int], ref.Recipe]]] = {
    "hierarchical(2, 6)": (
        la.hierarchical(2, 6),
        lambda size: gossip.hierarchical(2, 6, size),
    ),
    "lsgd(4, local_period=2)": (
        la.lsgd(4, local_period=2, local_drift=0.4, local_pull=0.3, window=2),
        lambda size: leader.lsgd(4, 2, local_drift=0.4, local_pull=0.3, window=2, group_size=size),
    ),
    "lsgd(8)": (la.lsgd(8, local_period=2), lambda size: leader.lsgd(8, group_size=size)),
    "slowmo(hierarchical(2, 3), 6)": (
        la.slowmo(la.hierarchical(2, 3), 6, 0.5),
        lambda size: decade.slowmo(gossip.hierarchical(2, 3, size), 6),
    ),
    "slowmo(lsgd(3, local_period=1), 6)": (
        la.slowmo(la.lsgd(3, local_period=1), 6, 0.5),
        lambda size: decade.slowmo(leader.lsgd(3, 1, group_size=size), 6),
    ),
}
"""Recipes with rounds inside groups, and the reference for groups of a size."""

KINDS = [
    "ddp",
    "local_sgd(3, delay=7)",
    "local_sgd(4, average)",
    "post_local_sgd(6, 4)",
    "slowmo(local_sgd(2), 6)",
    "slowmo(local_sgd(2), 6, reset)",
    "diloco(4, Adam)",
    "diloco(3, delay=5)",
    "sgp(ring, 2, delay=3)",
    "sgp(random, delay=1)",
    "d_psgd(exponential, delay=2)",
    "easgd(2, 0.5, pull=0.3)",
    "eamsgd(4, pull=0.1)",
    "downpour(3)",
    "lsgd(4, pulls)",
    "slowmo(sgp(bipartite_linear, delay=2), 5, no average)",
]
"""Rows that among them have every exchange, every kind of state, and messages in flight."""
