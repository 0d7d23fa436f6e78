"""Makes the link that fits a device, over the ranks of a process group of torch.

CPU tensors travel over laconic's own connections (``"tcp"``). Tensors on an accelerator do, too, by
way of host memory, or by the accelerator's own collectives, of which there are those of NVIDIA
(``"nccl"``). For another accelerator's write a link in a file of its own, and add a row to `OWN`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from laconic.device import accelerator
from laconic.links.link import Link
from laconic.links.nccl import NcclLink, own_group
from laconic.links.rendezvous import Rendezvous
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink

Choice = Literal["auto", "tcp", "nccl"]
CHOICES = ("auto", "tcp", "nccl")
"""What messages between ranks travel by; ``"auto"``: see `_place`."""


OWN: dict[str, Callable[..., NcclLink]] = {"nccl": NcclLink.over}
"""An accelerator's own collectives, by the back end of torch's process groups."""


def own_backend(device: torch.device) -> str | None:
    """The back end for the own collectives of the accelerator ``device``, if torch's default
    process group has it."""
    kind = accelerator(device)
    if kind is None or not dist.is_initialized():
        return None
    known = kind.backend in OWN and kind.backend in str(dist.get_backend_config())
    return kind.backend if known else None


def check_choice_of_link(choice: Choice, device: torch.device) -> None:
    """Raise ``ValueError`` if there is no such link for tensors on ``device``."""
    if choice not in CHOICES:
        raise ValueError(f"link must be one of {', '.join(CHOICES)}, or a Link, not {choice!r}")
    if choice == "nccl" and own_backend(device) != "nccl":
        raise ValueError(
            f"link='nccl' needs a model on GPUs and a process group with NCCL, as laconic.init() "
            f"makes: the model is on {device}. Use link='tcp' or 'auto'"
        )
    if device.type != "cpu" and accelerator(device) is None:
        raise ValueError(f"there is no link for tensors on {device}: move the model to a CPU")


def TorchLink(  # noqa: N802  a user writes it like the classes of other links
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Link:
    """A link over all ranks of ``group``, for tensors on ``device``, over laconic's own
    connections. Every rank of the group must call it. ``timeout``: how long to wait for a rank that
    does not answer."""
    check_choice_of_link("tcp", device)
    link = TcpLink.over(group, timeout)
    return link if accelerator(device) is None else StagedLink(link, device)


def world_link(device: torch.device, timeout: timedelta, choice: Choice = "auto") -> Link:
    """The link over all ranks of torch's default process group. Every rank must call it."""
    check_choice_of_link(choice, device)
    backend, group = own_backend(device), dist.group.WORLD
    assert group is not None, "there is a process group"
    place = _place(device) if backend is not None and choice == "auto" else ""
    # raises what is wrong with any rank's settings on all of them
    places = Rendezvous.of(group).exchange(place, timeout.total_seconds())
    on_one_host = "" not in places and len({*places}) == group.size()
    if backend is not None and (choice == backend or on_one_host):
        return OWN[backend](dist.new_group(timeout=timeout), device, timeout)
    return TorchLink(group, device, timeout)


def _place(device: torch.device) -> str:
    """Which of this host's accelerators ``device`` is, if the launcher has started all ranks here;
    else empty. Where each rank has one of its own, the accelerator's own collectives are faster.
    Between hosts, those over host memory find lost ranks, encrypt, and sum in one order, which
    matters more."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
    return str(device.index or 0) if here else ""


def inner_link(layout: Sequence[Sequence[int]], device: torch.device, timeout: timedelta) -> Link:
    """The link between the ranks of this rank's worker, by the accelerator's own collectives.
    ``layout``: the ranks of each worker. Every rank must call it."""
    backend = own_backend(device)
    assert backend is not None, "the process group has that back end"
    return OWN[backend](own_group(layout, timeout), device, timeout)
