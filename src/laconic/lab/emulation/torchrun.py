"""Run torchrun on every host of a lab, and add the options it needs there."""

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
"""Options by which a user asks torchrun to write files."""


class Torchrun:
    """A command line that starts torchrun, to run once on each of `hosts` hosts.

    `per_host` is the number of processes on each; None takes it from the command line, or 1.
    Raises ValueError if torchrun's own options contradict that.
    """

    def __init__(
        self, head: Sequence[str], rest: Sequence[str], hosts: int, per_host: int | None
    ) -> None:
        self._head, self._rest, self._hosts = list(head), list(rest), hosts
        options = _options(rest)
        nodes, processes = options.get("nnodes"), options.get("nproc_per_node")
        if options.get("standalone") and hosts > 1:
            raise ValueError("torchrun --standalone isolates each host: leave it out")
        if nodes is not None and str(nodes).rpartition(":")[2] != str(hosts):
            raise ValueError(f"torchrun's --nnodes {nodes} differs from the lab's --hosts {hosts}")
        if processes is not None and per_host is not None and str(processes) != str(per_host):
            raise ValueError(
                f"torchrun's --nproc-per-node {processes} differs from the lab's --per-host "
                f"{per_host}"
            )
        self._user_options = options
        self.per_host = str(processes or per_host or 1)

    def command(self, host: int, address: str, port: int) -> list[str]:
        """Return the command line for `host`, with the rendezvous at `address` and `port`.

        Ranks follow the order of the hosts, unless the user chose another rendezvous than
        torchrun's static one.
        """
        options = {"nnodes": str(self._hosts), "nproc_per_node": self.per_host}
        if not self._user_options.keys() & _LOGGING:
            options["log_dir"] = os.devnull  # otherwise it leaves an empty directory in /tmp
        if "standalone" in self._user_options:
            pass
        elif self._user_options.get("rdzv_backend", "static") != "static":
            options["rdzv_endpoint"] = f"{address}:{port}"
        else:
            options |= {"node_rank": str(host), "master_addr": address, "master_port": str(port)}
        added = [
            word
            for name, value in options.items()
            if name not in self._user_options
            for word in ("--" + name.replace("_", "-"), value)
        ]
        return [*self._head, *added, *self._rest]


def find(argv: Sequence[str], hosts: int, per_host: int | None) -> Torchrun | None:
    """Return the torchrun that `argv` starts, or None if it starts something else.

    Recognizes `torchrun ...` and `python ... -m torch.distributed.run ...`. Raises ValueError for
    options that torchrun would refuse or that contradict the lab's.
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


def _options(words: Sequence[str]) -> dict[str, object]:
    """Return torchrun's options in `words`, which end with the user's program."""
    from torch.distributed.run import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"torchrun: {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(words)))
