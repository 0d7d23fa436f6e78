"""Which tensors all ranks have, and whether their values are the same: by digests, so that equal
tensors cost no more than a few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn

from laconic.links.frames import crc32
from laconic.links.link import Link
from laconic.parts import module_buffers
from laconic.tensors import as_bytes, describe, local, parts

PIECE = 2**24
"""The bytes that `_on_accelerator` sums up at a time."""
_MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The odd constants of SplitMix64, as signed numbers."""
_PRIME = 2**32 - 5
_COUNTED = 2**24
"""More than the number of tensors."""


def digest(pieces: Iterable[Tensor]) -> int:
    """A number from 1 to 2**32 that depends on every bit of the plain tensors ``pieces``, and on
    their order: on the CPU the CRC-32 of all bytes, plus 1."""
    crc = 0
    for x in pieces:
        data = as_bytes(x).contiguous()
        if data.device.type == "cpu":
            crc = crc32(data.data_ptr(), data.numel(), crc)
        else:
            crc = (crc * _PRIME + _on_accelerator(data.view(-1))) % 2**32
    return 1 + crc


def _on_accelerator(data: Tensor) -> int:
    """A hash of the bytes ``data``, without copying them to the host: SplitMix64 of each 4 bytes,
    which depends on their position, summed up."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for number, piece in enumerate(torch.split(data, PIECE)):
        words = torch.nn.functional.pad(piece, (0, -piece.numel() % 4)).view(torch.int32)
        x = torch.arange(len(words), device=data.device).add_(number * PIECE).mul_(_MIX[0])
        x += words
        for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
            x.bitwise_xor_((x >> shift) & 2 ** (64 - shift) - 1).mul_(factor)
        total += x.sum()
    return int(total) >> 32 & 2**32 - 1


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def held_by_all(
    link: Link, groups: Sequence[Mapping[str, Tensor]], *, differing: bool = False
) -> list[dict[str, Tensor]]:
    """The tensors of each group that all ranks of ``link`` have, by name, shape and dtype; with
    ``differing``, those of them whose values are not the same on all ranks.

    Sends one number, and one for each tensor; with ``differing`` two for each, or none if nothing
    differs.
    """
    rows = [
        (
            _number(f"{g} {name} {describe(local(t))}"),
            digest(parts(local(t)).values()) if differing and link.size > 1 else 0,
        )
        for g, group in enumerate(groups)
        for name, t in group.items()
    ]
    columns = 2 if differing else 1
    summary = len(rows) + (_number(repr(rows)) % 2**32 * _COUNTED if differing else 0)
    everyone = {int(number) for number in link.gather(torch.tensor([summary])).flatten()}
    most = max(number % _COUNTED for number in everyone)
    if not most or (differing and len(everyone) == 1):
        return [{} for _ in groups]
    padded = torch.zeros(most, columns, dtype=torch.int64)
    padded[: len(rows)] = torch.tensor(rows)[:, :columns] if rows else padded[:0]
    held = [dict((row[0], row[-1]) for row in own) for own in link.gather(padded).tolist()]

    def found(key: int) -> bool:
        values = {own.get(key) for own in held}
        return None not in values and (len(values) > 1 or not differing)

    keys = iter(rows)
    return [{name: t for name, t in group.items() if found(next(keys)[0])} for group in groups]


class BufferWatch:
    """Notes the buffers of ``model`` that rounds average, or with ``every`` all of them, to find
    out which of them training changes."""

    def __init__(self, model: nn.Module, *, every: bool = False) -> None:
        self._model, self._every = model, every
        self._before = self._digests()

    def _named(self) -> dict[str, Tensor]:
        if not self._every:
            return module_buffers(self._model)[0]
        return {name: local(b) for name, b in self._model.named_buffers()}

    def _digests(self) -> dict[str, int]:
        return {name: digest(parts(b).values()) for name, b in self._named().items()}

    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The bytes of each buffer, and of those together that have changed."""
        sizes = {
            name: sum(part.numel() * part.element_size() for part in parts(b).values())
            for name, b in self._named().items()
        }
        now = self._digests()
        changed = sum(size for name, size in sizes.items() if now[name] != self._before.get(name))
        return tuple(sizes.values()), changed
