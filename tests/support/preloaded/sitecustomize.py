"""Run this Python program in a fork of a process that has imported torch already.

Importing torch and laconic costs a Python process three to five seconds of processor time. The
tests put this folder first in PYTHONPATH and the address of `server` in LACONIC_PRELOADED. Python
imports this file before a program begins. It hands the program (arguments, environment, working
directory, open files, namespaces) to the server, forwards signals to the fork, and ends as the fork
ends. A fork dies with the process that asked for it.

Not forwarded: SIGSTOP. The fork has another process id than this process, and the server as its
parent. Programs run without the server where they need a terminal, another user, settings of ATen
or MKL, interpreter options other than -u and -B, or other copies of Python or laconic than the
server's.
"""

from __future__ import annotations

import os
import sys


def _program() -> tuple[str, str, list[str], bool] | None:
    """What the command line asks for: its kind, the code, module or file, the arguments after it,
    and whether output is unbuffered. None for what only a new interpreter can do."""
    words = sys.orig_argv[1:]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while words and words[0] in ("-u", "-B"):
        unbuffered |= words.pop(0) == "-u"
    if not words:
        return None
    if words[0] in ("-c", "-m") and len(words) > 1:
        return words[0], words[1], words[2:], unbuffered
    if words[0].startswith("-") or not os.path.isfile(words[0]):
        return None
    return "file", words[0], words[1:], unbuffered


def _run_elsewhere(address: str) -> None:
    program = _program()
    if program is None or program[1].startswith("from multiprocessing.resource_tracker"):
        return
    path, uid, user, prefix, package = address.split("|")
    if (uid, user, prefix) != (str(os.geteuid()), os.readlink("/proc/self/ns/user"), sys.prefix):
        return
    if any(name.startswith(("ATEN_", "MKL_")) for name in os.environ):  # torch has read them
        return
    if any(os.isatty(number) for number in range(3)):
        return

    import importlib.util
    import json
    import resource
    import signal
    import socket

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.util.find_spec("laconic")
    if spec is None or spec.origin != package:
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # the tests have ended
        connection.close()
        return
    files = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # which listed them
        if int(name) != connection.fileno():
            files.append(int(name))
    if len(files) > 200 or max(files, default=0) >= 500:
        connection.close()
        return
    signals = [signal.Signals(n) for n in signal.valid_signals() if n < signal.SIGRTMIN]
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = os.umask(0)
    os.umask(umask)
    request = json.dumps(
        {
            "pid": os.getpid(),
            "program": program,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "files": files,
            "ignored": [n for n in signals if signal.getsignal(n) is signal.SIG_IGN],
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
            "umask": umask,
            "affinity": list(os.sched_getaffinity(0)),
        }
    ).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "little")], files)
    connection.sendall(request)
    fork = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    if not fork:
        os.write(2, b"the preloaded server did not start the program\n")
        os._exit(70)

    def forward(number: int, frame: object) -> None:
        os.kill(fork, number)

    own = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP,
           signal.SIGTTIN, signal.SIGTTOU)  # fmt: skip
    for number in signals:
        if number not in own and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    ended = connection.recv(8, socket.MSG_WAITALL)
    if len(ended) < 8:
        os.write(2, b"the preloaded server has ended\n")
        os._exit(70)
    code = int.from_bytes(ended, "little", signed=True)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code)


_address = os.environ.get("LACONIC_PRELOADED")
if _address and sys.platform == "linux":
    _run_elsewhere(_address)
