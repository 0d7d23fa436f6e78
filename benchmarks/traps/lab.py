"""Failure cases of the emulated lab."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from benchmarks.traps import Trapped, trap

NOBODY = 65534
PLANTED = """
import json, os, socket
os.setgroups([]), os.setgid({nobody}), os.setuid({nobody})
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.bind("\\0{name}")
    server.listen()
    print("listening", flush=True)
    while True:
        with server.accept()[0] as peer:
            plan = dict(launcher=1, addresses=["10.0.0.1"], prefix=24, rates=[None], path=[])
            if peer.recv(16):
                net = os.open("/proc/self/ns/net", os.O_RDONLY)
                socket.send_fds(peer, [json.dumps(plan).encode()], [net])
                os.close(net)
"""


@trap("laconic lab --shell as root, after another user created a socket with a lab's name")
@trap("laconic lab --shell as root, where another user has planted a lab's socket")
def planted_lab() -> str:
    from laconic.lab.emulation.join import join

    if os.geteuid() != 0:
        return "not tried: only root can plant a socket as another user"
    name = f"laconic-lab-{os.getpid()}-{os.getpid()}"
    code = textwrap.dedent(PLANTED).format(nobody=NOBODY, name=name)
    planter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert planter.stdout is not None
        if planter.stdout.readline() != "listening\n":
            raise RuntimeError("the socket could not be planted")
        try:
            entry = join(name, 0)
        except ValueError as error:
            return str(error)
        for descriptor in entry.descriptors():
            os.close(descriptor)
        raise Trapped(f"root's shell would enter a namespace that user {NOBODY} chose")
    finally:
        planter.kill()
        planter.wait()
