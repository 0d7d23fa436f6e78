"""Makes the link that fits a device, over the ranks of a process group of torch.

For a new kind of accelerator write its link in a file of its own, and add a row to `LINKS`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from laconic.links.link import Link
from laconic.links.nccl import NcclLink
from laconic.links.rendezvous import default_rendezvous
from laconic.links.tcp import TcpLink


class Kind(Protocol):
    """How a link is made over a process group: see `TcpLink.over`."""

    def __call__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        *,
        owned: bool = False,
    ) -> Link: ...


LINKS: dict[str, Kind] = {"cpu": TcpLink.over, "cuda": NcclLink.over}
"""By the type of the device that holds the tensors."""


def _kind(device: torch.device) -> Kind:
    if device.type not in LINKS:
        raise ValueError(f"there is no link for tensors on {device}: only for {', '.join(LINKS)}")
    return LINKS[device.type]


def TorchLink(  # noqa: N802  a user writes it like the classes of other links
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Link:
    """A link over all ranks of ``group``, for tensors on ``device``. Every rank of the group must
    call it. ``timeout``: how long to wait for a rank that does not answer."""
    return _kind(device)(group, device, timeout)


def world_link(device: torch.device, timeout: timedelta) -> Link:
    """The link over all ranks of torch's default process group. Every rank must call it."""
    make, found = _kind(device), default_rendezvous()
    if found is None:
        group = dist.new_group(timeout=timeout)
    else:
        found.wait_for_all(timeout.total_seconds())
        with found.naming_lost_ranks():
            group = dist.new_group(timeout=timeout)
    return make(group, device, timeout, owned=True)
