"""What the modules of laconic.links promise one another."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import simulate
from laconic.device import ACCELERATORS, Accelerator
from laconic.links import Metered
from laconic.links.agreement import MOST_CHARACTERS, agree
from laconic.links.comm_thread import CommThread
from laconic.links.simulated import current_link

from tests.support import gloo


def test_a_problem_is_raised_in_its_own_words_on_all_ranks() -> None:
    """What another rank says is cut and printable. Without a problem there is one small gather."""

    def said(*problems: str | None) -> list[str]:
        def run(rank: int) -> str:
            link = current_link.get()
            assert link is not None
            metered = Metered(link)
            try:
                agree(metered.gather, problems[rank])
            except ValueError as error:
                return str(error)
            return str(metered.ledger.by_collective)

        return simulate(run, workers=4)

    assert said(None, None, None, None) == ["{'gather': 12}"] * 4
    assert said(None, "a", "b", "a") == ["ranks 1, 3: a; rank 2: b", "a", "b", "a"]
    texts = said(None, None, None, "\x1b[2J" + "ü" * 9000)
    assert texts[0] == ("rank 3:  [2J" + "ü" * 9000)[: MOST_CHARACTERS + len("rank 3: ")]
    assert texts[3].startswith("\x1b[2J")


def short_sums(rank: int, kind: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    found = [torch.randn(length, generator=draw).bfloat16() for length in (12, 13, 1)]
    with pytest.MonkeyPatch.context() as patched:
        link = gloo.link_of(3) if kind == "tcp" else gloo.nccl_link_of(3, patched)
        for x in found:
            link.mean(x)
        found.append(link.reduce_scatter(torch.randn(12, generator=draw).bfloat16()).clone())
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


class Counting(Accelerator):
    """A generator whose state is how many numbers were drawn, from a seed on."""

    def __init__(self) -> None:
        self.state = torch.zeros(1)

    def in_use(self) -> bool:
        return True

    def random_state(self) -> Tensor:
        return self.state.clone()

    def set_random_state(self, state: Tensor) -> None:
        self.state.copy_(state)


@pytest.mark.fault("simulated workers drew from one generator of the GPU, such as for dropout")
def test_each_simulated_worker_has_its_own_numbers_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Counting()
    monkeypatch.setitem(ACCELERATORS, "counting", gpu)

    def drawing(rank: int) -> float:
        link = current_link.get()
        assert link is not None
        gpu.state.fill_(100 * rank)
        for _ in range(3):
            gpu.state.add_(1)
            link.mean(torch.zeros(1))
        return float(gpu.state)

    assert simulate(drawing, workers=3) == [3.0, 103.0, 203.0] and not gpu.state


# -- the communication thread ----


def test_a_job_that_is_done_keeps_no_tensor() -> None:
    """Its thread waits for the next one meanwhile, perhaps for long."""
    thread = CommThread(True, torch.device("cpu"), lambda: None)
    flat = torch.ones(4)
    seen = weakref.ref(flat)
    assert float(thread.submit(partial(torch.sum, flat), "a sum").wait()) == 4.0
    del flat
    thread.submit(lambda: None, "another job").wait()
    end = time.monotonic() + 60
    while seen() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert seen() is None
    thread.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_no_job_runs_after_one_that_failed(threaded: bool) -> None:
    """Without a thread, too: as the ranks would no longer be in step."""
    thread = CommThread(threaded, torch.device("cpu"), lambda: None)
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    first, second = thread.submit(fail, "a failure"), thread.submit(partial(ran.append, 1), "a job")
    for pending in (first, second):
        with pytest.raises(ValueError, match="no"):
            pending.wait()
    assert not ran
    thread.close()


def test_the_next_job_raises_what_an_idle_thread_has() -> None:
    thread = CommThread(True, torch.device("cpu"), lambda: None)
    tried = threading.Event()

    def fail() -> None:
        tried.set()
        raise RuntimeError("the accelerator is lost")

    thread.submit(lambda: None, "the thread").wait()
    thread.run_by(None, fail)
    assert tried.wait(60)
    pending = thread.submit(lambda: None, "a job")
    assert pending.ended.wait(60)
    with pytest.raises(RuntimeError, match="the accelerator is lost"):
        pending.wait()
    thread.close()
