"""torchrun on every host of a lab: the options that it needs there are put in for the user."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["Torchrun", "find"]

_MODULE = "torch.distributed.run"
_LOGGING = {
    "log_dir",
    "logs_specs",
    "redirects",
    "tee",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
}
"""Options with which torchrun writes files that are wanted."""


class Torchrun:
    """A command line that starts torchrun, to be run once on every one of `hosts` hosts.

    `per_host` processes on each, None for 1 or what the command line itself says. Raises
    ValueError where torchrun's own options contradict that.
    """

    def __init__(
        self, head: Sequence[str], rest: Sequence[str], hosts: int, per_host: int | None
    ) -> None:
        self._head, self._rest, self._hosts = list(head), list(rest), hosts
        given = _given(rest)
        nodes, processes = given.get("nnodes"), given.get("nproc_per_node")
        if given.get("standalone") and hosts > 1:
            raise ValueError("torchrun --standalone keeps every host to itself: leave it out")
        if nodes is not None and str(nodes).rpartition(":")[2] != str(hosts):
            raise ValueError(f"torchrun's --nnodes {nodes} is not the lab's --hosts {hosts}")
        if processes is not None and per_host is not None and str(processes) != str(per_host):
            raise ValueError(
                f"torchrun's --nproc-per-node {processes} is not the lab's --per-host {per_host}"
            )
        self._given = given
        self.per_host = str(processes or per_host or 1)

    def command(self, host: int, address: str, port: int) -> list[str]:
        """Return the command line for `host`, to meet the others at `address` and `port`.

        Ranks follow the hosts' order, unless the user chose another rendezvous than torchrun's
        static one.
        """
        options = {"nnodes": str(self._hosts), "nproc_per_node": self.per_host}
        if not self._given.keys() & _LOGGING:
            options["log_dir"] = os.devnull  # else it leaves an empty directory in /tmp each time
        if "standalone" in self._given:
            pass
        elif self._given.get("rdzv_backend", "static") != "static":
            options["rdzv_endpoint"] = f"{address}:{port}"
        else:
            options |= {"node_rank": str(host), "master_addr": address, "master_port": str(port)}
        added = [
            word
            for name, value in options.items()
            if name not in self._given
            for word in ("--" + name.replace("_", "-"), value)
        ]
        return [*self._head, *added, *self._rest]


def find(argv: Sequence[str], hosts: int, per_host: int | None) -> Torchrun | None:
    """Return the torchrun that `argv` starts, None if it starts something else.

    `torchrun ...` and `python ... -m torch.distributed.run ...` do. Raises ValueError for options
    that torchrun would refuse, or that contradict the lab's.
    """
    program = Path(argv[0]).name
    length = 0
    if program == "torchrun":
        length = 1
    elif program.startswith("python") and _MODULE in argv:
        at = list(argv).index(_MODULE)
        if argv[at - 1] == "-m" and all(word.startswith("-") for word in argv[1:at]):
            length = at + 1
    return Torchrun(argv[:length], argv[length:], hosts, per_host) if length else None


def _given(words: Sequence[str]) -> dict[str, object]:
    """Return the options of torchrun that are among `words`, which end with the user's program."""
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"torchrun: {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(words)))
