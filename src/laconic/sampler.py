"""`ElasticSampler`: each sample once per epoch, for workers that come and go."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from laconic.errors import check_bool, check_int

_SAME = ("num_samples", "shuffle", "seed")
_PLACE = ("worker", "workers", "drawn")
_KEYS = {*_SAME, "gaps", "frontier", *_PLACE}


class Recorded(NamedTuple):
    """A deal of a recorded run: this worker had ``drawn`` so many samples of the deal before, had
    the ``state`` then, and called `ElasticSampler.deal` with the other values."""

    drawn: int
    state: dict[str, Any]
    counts: list[int]
    worker: int
    workers: int


@dataclass(frozen=True)
class _Remaining:
    """The positions that are not drawn: ``gaps`` (ascending, below ``frontier``), and all from
    ``frontier`` on.

    Position ``frontier - 1`` is drawn, so equal sets have equal fields.
    """

    gaps: list[int]
    frontier: int

    def __getitem__(self, index: int) -> int:
        """The remaining position that has ``index`` remaining positions before it."""
        beyond = index - len(self.gaps)
        return self.gaps[index] if beyond < 0 else self.frontier + beyond

    def share(self, worker: int, workers: int, total: int) -> int:
        """How many positions below ``total`` are in the share of ``worker``."""
        return len(range(worker, len(self.gaps) + total - self.frontier, workers))

    def after(self, drawn: Sequence[int]) -> _Remaining:
        """What remains when worker r has drawn ``drawn[r]`` of its share, for each r."""
        workers = len(drawn)
        end = max(r + workers * (n - 1) + 1 for r, n in enumerate(drawn))
        passed = sorted(
            i for r, n in enumerate(drawn) for i in range(r + workers * n, end, workers)
        )
        gaps = [self[i] for i in passed] + self.gaps[end:]
        return _Remaining(gaps, self.frontier + max(0, end - len(self.gaps)))


class ElasticSampler(Sampler[int]):
    """Deals the samples of a dataset to workers that come and go.

    The samples of all epochs form one sequence: the n samples in the order of epoch 0, then in that
    of epoch 1, and so on. A position is an index into this sequence, so sample i of an epoch's
    order is at position ``epoch * n + i``. With ``shuffle``, the order of an epoch is
    ``torch.randperm(n)`` from a generator seeded with the first 4 bytes, little-endian, of the
    SHA-256 of the text ``"{seed},{epoch}"``. Without it the order is 0 to n - 1.

    A deal shares out the positions that are not drawn yet. With k workers, worker r gets the r-th
    of them in ascending order, the (r + k)-th, the (r + 2k)-th, and so on. Before the first deal,
    a single worker has all positions. When a worker joins, leaves or is lost, the engine deals
    again what remains of all shares, and what a lost worker has drawn that the others have not
    received. So the effect of each position counts exactly once, however often the workers change.

    Each iterator continues where the last one stopped, and continues under the new deal when a deal
    changes. This also holds for a new `DataLoader` and after `load_state_dict`. There is no
    ``set_epoch``::

        sampler = ElasticSampler(dataset, seed=1, epochs=3)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for batch in loader:  # this worker's share of all three epochs
            ...

    A `DataLoader` with ``num_workers > 0`` draws indices ahead of training, up to
    ``num_workers * prefetch_factor`` batches. This worker has then drawn those samples. It must
    train on them too: samples that its `DataLoader` drops, such as the prefetched batches of an
    abandoned iterator or an incomplete batch under ``drop_last``, are not dealt again.

    All workers need the same arguments. Methods may be called by different threads.

    Args:
        data_source: anything with a length, or the number of samples itself.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders, at least 0.
        epochs: how many to draw, at least 1. None: iterators never end.

    Examples:
        >>> list(laconic.ElasticSampler(5, shuffle=False, epochs=1))
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        data_source: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
    ) -> None:
        if isinstance(data_source, Sized):
            self.num_samples = check_int("len(data_source)", len(data_source), 1)
        else:
            name = "data_source, unless it has a length,"
            self.num_samples = check_int(name, data_source, 1)
        self.shuffle = check_bool("shuffle", shuffle)
        self.seed = check_int("seed", seed, 0)
        self.epochs = None if epochs is None else check_int("epochs, unless None,", epochs, 1)

        self._condition = threading.Condition(threading.RLock())
        self._frozen = False
        self._remaining = _Remaining([], 0)
        self._worker, self._workers = 0, 1
        self._drawn = 0
        self._recorded: deque[Recorded] = deque()
        # A share is ascending, so it needs one epoch's order at a time.
        self._order: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[int]:
        while (sample := self._draw()) is not None:
            yield sample

    def __len__(self) -> int:
        """The number of samples left for this worker under the current deal.

        Raises ``TypeError`` if ``epochs`` is None.
        """
        if self.epochs is None:
            raise TypeError("ElasticSampler has no length with epochs=None: it never ends")
        total = self.num_samples * self.epochs
        with self._condition:
            return self._remaining.share(self._worker, self._workers, total) - self._drawn

    def follow(self, deals: Sequence[Recorded]) -> None:
        """Repeat the ``deals`` of a recorded run, each once its number of samples is drawn."""
        self._recorded.extend(deals)

    def about(self) -> str:
        """The arguments, which must be the same on all workers."""
        return (
            f"{self.num_samples} samples, shuffle={self.shuffle}, seed={self.seed}, "
            f"epochs={self.epochs}"
        )

    @property
    def drawn(self) -> int:
        """How many samples this worker has drawn of its share since the last deal."""
        with self._condition:
            return self._drawn

    def freeze(self) -> None:
        """Block draws until the next `deal` or `release`."""
        with self._condition:
            self._frozen = True

    def release(self) -> None:
        """Let draws go on without a deal: the run has ended for this worker."""
        with self._condition:
            self._frozen = False
            self._condition.notify_all()

    def deal(self, drawn: Sequence[int], worker: int, workers: int) -> None:
        """Deal what remains of all shares to ``workers`` workers. This one is ``worker``.

        ``drawn[r]`` is the number of samples that worker r of the old deal has drawn of its share,
        or for a lost worker how many of them others have received. Every worker calls it with the
        same arguments, except for ``worker``. A newcomer first freezes its sampler and loads the
        state of another worker from before the deal.
        """
        assert 0 <= worker < workers and len(drawn) == self._workers
        with self._condition:
            self._remaining = self._remaining.after(drawn)
            self._worker, self._workers = worker, workers
            self._drawn = 0
            self._frozen = False
            self._condition.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """The state of all workers' deal and of this worker's progress, as plain data.

        Only ``"worker"`` and ``"drawn"`` differ between workers. ``"gaps"`` holds the positions
        that remain among drawn ones. There are at most as many as the number of workers times the
        difference in draws between the fastest and the slowest worker, in the deal where this was
        largest. All else is single numbers.
        """
        with self._condition:
            return {
                **{name: getattr(self, name) for name in _SAME},
                "gaps": list(self._remaining.gaps),
                "frontier": self._remaining.frontier,
                **{name: getattr(self, f"_{name}") for name in _PLACE},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, from this worker or another. Frozen draws stay frozen.

        ``epochs`` may differ from the saved run's, if all workers agree and nothing beyond it is
        drawn. Raises ``ValueError``, and changes nothing, if the number of samples, ``shuffle`` or
        ``seed`` differ, and for other data.
        """
        if not isinstance(state_dict, Mapping) or set(state_dict) != _KEYS:
            names = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict)
            raise ValueError(
                f"not a state of an ElasticSampler: it must have {sorted(_KEYS)}, not {names}"
            )
        for name in _SAME:
            if state_dict[name] != getattr(self, name):
                raise ValueError(
                    f"the state was saved with {name}={state_dict[name]}, "
                    f"this ElasticSampler has {name}={getattr(self, name)}"
                )
        remaining = _Remaining(list(state_dict["gaps"]), state_dict["frontier"])
        worker, workers, drawn = (state_dict[name] for name in _PLACE)
        if self.epochs is not None:
            total = self.num_samples * self.epochs
            if remaining.frontier > total or drawn > remaining.share(worker, workers, total):
                raise ValueError(f"the state has drawn more than epochs={self.epochs} have")
        with self._condition:
            self._remaining = remaining
            self._worker, self._workers, self._drawn = worker, workers, drawn

    def _draw(self) -> int | None:
        """Count and return the next sample of this worker's share; None if there is none."""
        with self._condition:
            while self._frozen:
                self._condition.wait()
            while self._recorded and self._drawn == self._recorded[0].drawn:
                recorded = self._recorded.popleft()
                self.load_state_dict(recorded.state)
                self.deal(*recorded[2:])
            position = self._remaining[self._worker + self._workers * self._drawn]
            epoch, index = divmod(position, self.num_samples)
            if self.epochs is not None and epoch >= self.epochs:
                return None
            sample = int(self._epoch_order(epoch)[index]) if self.shuffle else index
            self._drawn += 1
            return sample

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            self._order = None  # frees the memory of the last epoch's order
            digest = hashlib.sha256(f"{self.seed},{epoch}".encode()).digest()
            # torch's CPU generator uses 32 bits of a seed.
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
            self._order = epoch, order
        return self._order[1]
