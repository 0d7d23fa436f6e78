"""What the modules of laconic.links promise one another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from laconic import simulate
from laconic.links import Metered
from laconic.links.agreement import MOST_CHARACTERS, agree
from laconic.links.simulated import current_link

from tests.support import gloo


def agreed(problem_of: Callable[[int], str | None]) -> list[tuple[str, dict[str, int]]]:
    """What each of four ranks raises, and what it sent."""

    def run(rank: int) -> tuple[str, dict[str, int]]:
        link = current_link.get()
        assert link is not None
        metered = Metered(link)
        try:
            agree(metered.gather, problem_of(rank))
        except ValueError as error:
            return str(error), metered.ledger.by_collective
        return "", metered.ledger.by_collective

    return simulate(run, workers=4)


def test_a_problem_is_raised_in_its_own_words_on_all_ranks() -> None:
    """What another rank says is cut and printable. Without a problem there is one small gather."""
    assert agreed(lambda rank: None) == [("", {"gather": 3 * 4})] * 4
    said = [text for text, _ in agreed(lambda rank: f"no {rank % 2}" if rank else None)]
    assert said == ["ranks 1, 3: no 1; rank 2: no 0", "no 1", "no 0", "no 1"]
    texts = agreed(lambda rank: "\x1b[2J" + "ü" * 9000 if rank == 3 else None)
    assert texts[0][0] == ("rank 3:  [2J" + "ü" * 9000)[: MOST_CHARACTERS + len("rank 3: ")]
    assert texts[3][0].startswith("\x1b[2J")


def short_sums(rank: int, kind: str) -> list[torch.Tensor]:
    link = gloo.link_of(3) if kind == "tcp" else gloo.nccl_link_of(3)
    found = []
    for length in (12, 13, 1):
        x = torch.randn(length, generator=torch.Generator().manual_seed(rank)).bfloat16()
        link.mean(x)
        found.append(x)
    x = torch.randn(12, generator=torch.Generator().manual_seed(rank)).bfloat16()
    found.append(link.reduce_scatter(x).clone())
    link.close()
    return found


def test_short_numbers_are_summed_in_float32_by_the_link_for_nccl(pool: gloo.Pool) -> None:
    """Whose own sums would be bfloat16. Here gloo makes its collectives."""
    found, expected = (pool.run(short_sums, kind, ranks=3) for kind in ("nccl", "tcp"))
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2**-8, atol=0)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[3], theirs[3])


def split_twice(rank: int) -> tuple[list[float], list[float], int]:
    """Sums over halves of four ranks, and over pairs of these; and how many process groups it
    took."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    world, before = gloo.link_of(4), len(groups)
    half = world.split([[0, 1], [3, 2]])
    across = world.split([[0, 3], [1, 2]])
    found = half.gather(torch.tensor([float(rank)])).flatten().tolist()
    other = across.gather(torch.tensor([float(rank)])).flatten().tolist()
    for link in (half, across, world):
        link.close()
    return found, other, len(groups) - before


def test_a_split_makes_no_process_group(pool: gloo.Pool) -> None:
    said = pool.run(split_twice, ranks=4)
    assert [half for half, _, _ in said] == [[0, 1], [0, 1], [3, 2], [3, 2]]
    assert [across for _, across, _ in said] == [[0, 3], [1, 2], [1, 2], [0, 3]]
    assert [made for _, _, made in said] == [0] * 4


def drawn(rank: int, workers: int) -> list[float]:
    """Numbers from NumPy's global generator: some between messages, some not, some kept for the
    next call (`randn` makes two at a time)."""
    link = current_link.get()
    assert link is not None
    np.random.seed(rank)
    found = []
    for step in range(6):
        if (step + rank) % 3:
            found.append(float(np.random.randn()))
        if step == 4:
            np.random.set_state(np.random.RandomState(7 + rank).get_state())
        if workers > 1:
            link.mean(torch.zeros(1))
    return found


def test_each_simulated_worker_has_its_own_numpy_numbers() -> None:
    before = np.random.get_state(legacy=False)["state"]["key"].tolist()
    together = simulate(lambda rank: drawn(rank, 3), workers=3)
    alone = [simulate(lambda _, r=r: drawn(r, 1), workers=1)[0] for r in range(3)]  # type: ignore[misc]
    assert together == alone
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == before
