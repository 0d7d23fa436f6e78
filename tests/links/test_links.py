"""What the modules of laconic.links promise one another."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import laconic
from laconic import simulate
from laconic.links import Link, Metered, simulated
from laconic.links.agreement import MOST_CHARACTERS, agree
from laconic.links.calls import Call, CallPosition
from laconic.links.rank_sets import sets_of
from laconic.links.simulated import current_link
from laconic.links.texts import exchange_texts

from tests.support import gloo

SOURCE = Path(laconic.__file__).parent


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


def test_without_a_problem_there_is_one_small_gather() -> None:
    assert agreed(lambda rank: None) == [("", {"gather": 3 * 4})] * 4


def test_a_problem_is_raised_in_its_own_words_on_all_ranks() -> None:
    said = [text for text, _ in agreed(lambda rank: f"no {rank % 2}" if rank else None)]
    assert said == ["ranks 1, 3: no 1; rank 2: no 0", "no 1", "no 0", "no 1"]


def test_where_all_ranks_have_a_problem_no_text_travels() -> None:
    assert agreed(lambda rank: f"no {rank}")[2] == ("no 2", {"gather": 3 * 4})


def test_a_text_of_another_rank_is_cut_and_printable() -> None:
    texts = agreed(lambda rank: "\x1b[2J" + "ü" * 9000 if rank == 3 else None)
    assert texts[0][0] == ("rank 3:  [2J" + "ü" * 9000)[: MOST_CHARACTERS + len("rank 3: ")]
    assert texts[3][0].startswith("\x1b[2J")


def test_texts_of_any_length_are_exchanged() -> None:
    texts = ["", "a", "ü" * 300, "\0\n"]

    def run(rank: int) -> list[str]:
        link = current_link.get()
        assert link is not None
        assert exchange_texts(link.gather, "") == [""] * 4
        return exchange_texts(link.gather, texts[rank])

    assert simulate(run, workers=4) == [texts] * 4


def test_a_call_has_one_id_in_all_processes() -> None:
    assert Call(7, "finish()").id == 0x3A4D7C8106E30863
    assert len({Call(step, name).id for step in range(50) for name in ("a", "b")}) == 100
    assert str(CallPosition(3, Call(7, "finish()"))) == "finish() after 7 steps"
    assert str(CallPosition(3, left=True)) == "another call, and has left"
    assert str(CallPosition()) == "no call yet"


def broadcast_from_all(rank: int, size: int) -> list[list[float]]:
    link, found = gloo.link_of(size), []
    for root in range(size):
        x = torch.full((1000,), float(rank))
        link.broadcast(x, root)
        found.append(x.unique().tolist())
    link.close()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_broadcast_from_any_root_reaches_all(pool: gloo.Pool, size: int) -> None:
    expected = [[float(root)] for root in range(size)]
    assert pool.run(broadcast_from_all, size, ranks=size) == [expected] * size


def mean_of_bfloat16(rank: int) -> list[float]:
    link = gloo.link_of(3)
    x = torch.full((21,), float(rank), dtype=torch.bfloat16)
    link.mean(x)
    link.close()
    assert x.dtype == torch.bfloat16
    return x.unique().tolist()


def test_a_mean_has_the_dtype_of_what_it_is_the_mean_of(pool: gloo.Pool) -> None:
    """It is summed in float32."""
    assert pool.run(mean_of_bfloat16, ranks=3) == [[1.0]] * 3


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


def imports(path: Path) -> set[str]:
    """The modules of laconic that the module at ``path`` imports when it is imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laconic"):
            found.add(str(node.module))
    return found


def test_links_import_no_algorithm_and_no_engine() -> None:
    above = ("laconic.algorithms", "laconic.engine", "laconic.attach", "laconic.lab")
    for path in (SOURCE / "links").glob("*.py"):
        assert not [module for module in imports(path) if module.startswith(above)], path


def test_only_the_device_module_and_its_links_call_cuda() -> None:
    users = {path.name for path in SOURCE.rglob("*.py") if "torch.cuda." in code_of(path)}
    assert users <= {"device.py", "nccl.py", "gpu_kernels.py"}


def code_of(path: Path) -> str:
    """A module without its strings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def test_all_ranks_name_the_same_sets() -> None:
    """Torch has every rank make every process group, in one order, its own or not."""
    named: dict[int, list[list[list[int]]]] = {rank: [] for rank in range(8)}

    class Noted(Metered):
        def split(self, sets: Sequence[Sequence[int]]) -> Link:
            named[self.rank].append([list(ranks) for ranks in sets])
            return self.link.split(sets)

    def run(rank: int) -> tuple[int, int]:
        link = current_link.get()
        assert link is not None
        layout = [[0, 1], [2, 3], [4, 5], [6, 7]]
        group = sets_of(Noted(link), layout, 2, False)["group"]
        members = group.gather(torch.tensor([rank])).flatten().tolist()
        assert members[group.rank] == rank and group.size == 2
        return members[0], members[1]

    assert simulate(run, workers=8) == [(0, 2), (1, 3)] * 2 + [(4, 6), (5, 7)] * 2
    assert all(sets == named[0] for sets in named.values()) and len(named[0]) == 3


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
    before = np.random.get_state()[1].tolist()
    together = simulate(lambda rank: drawn(rank, 3), workers=3)
    alone = [simulate(lambda _, r=r: drawn(r, 1), workers=1)[0] for r in range(3)]  # type: ignore[misc]
    assert together == alone
    assert np.random.get_state()[1].tolist() == before


def test_a_gaussian_kept_for_later_stays_with_its_worker() -> None:
    """Two workers at the same place of the same numbers, one of which has one left over."""
    np.random.seed(0)
    expected = [float(np.random.randn()) for _ in range(4)]
    np.random.seed(0)
    a, b = simulated.RandomState(), simulated.RandomState()
    found_a = [float(np.random.randn())]
    a.save()
    b.restore()
    found_b = [float(np.random.randn()) for _ in range(2)]
    b.save()
    a.restore()
    a.save()
    b.restore()
    found_b.append(float(np.random.randn()))
    b.save()
    a.restore()
    found_a.append(float(np.random.randn()))
    assert (found_a, found_b) == (expected[:2], expected[:3])
