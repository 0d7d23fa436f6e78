"""The process that has imported torch and laconic, and forks one process for each program.

`sitecustomize` asks it to. It ends, and with it all of its forks, when its stdin closes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from typing import Any

PRELOADED = [
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing",
    "laconic",
    "laconic.cli",
    "laconic.lab.race.worker",
    "sklearn.datasets",
    "scipy.stats",
    "matplotlib.figure",
    "optuna",
    "rich.table",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
]
HIGH = 512
"""The first of the descriptors at which those received are put aside."""
PR_SET_PDEATHSIG = 1
NAMESPACES = ("uts", "ipc", "net", "mnt")
Request = dict[str, Any]


def serve(path: str) -> None:
    """Serve programs until stdin closes."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    forks: dict[int, tuple[socket.socket, int]] = {}  # by process: who asked, and its pidfd
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in forks:
                    _kill(pid)
                os.unlink(path)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, files = _receive(connection)
                except (OSError, ValueError):
                    connection.close()
                    continue
                pid = os.fork()
                if not pid:
                    run(request, files)  # does not return
                for number in files:
                    os.close(number)
                pidfd = os.pidfd_open(pid)
                forks[pid] = connection, pidfd
                selector.register(pidfd, selectors.EVENT_READ, pid)
                selector.register(connection, selectors.EVENT_READ, pid)
                _tell(connection, pid)
            elif key.data in forks:
                connection, pidfd = forks[key.data]
                if key.fileobj is connection:  # who asked for it has ended
                    _kill(key.data)
                    selector.unregister(connection)
                    continue
                _, status = os.waitpid(key.data, 0)
                _tell(connection, os.waitstatus_to_exitcode(status))
                del forks[key.data]
                selector.unregister(pidfd)
                if connection.fileno() in selector.get_map():
                    selector.unregister(connection)
                connection.close()
                os.close(pidfd)


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    connection.settimeout(10)
    size, files, _, _ = socket.recv_fds(connection, 8, 253)
    left = int.from_bytes(size, "little")
    pieces = []
    while left:
        pieces.append(connection.recv(left))
        if not pieces[-1]:
            raise ValueError("half a request")
        left -= len(pieces[-1])
    return json.loads(b"".join(pieces)), files


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked has ended
        connection.sendall(number.to_bytes(8, "little", signed=True))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


# -- in the fork ----


def run(request: Request, files: list[int]) -> None:
    """Become the program that was asked for, run it, and end as it would."""
    try:
        _become(request, files)
    except BaseException as error:
        os.write(2, f"the preloaded server could not start the program: {error!r}\n".encode())
        os._exit(70)
    code = 0
    try:
        _execute(*request["program"][:3])
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _become(request: Request, files: list[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    spaces = [
        os.open(path, os.O_RDONLY)
        for name in NAMESPACES
        if os.stat(path := f"/proc/{request['pid']}/ns/{name}").st_ino
        != os.stat(f"/proc/self/ns/{name}").st_ino
    ]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, HIGH) for number in files]
    os.closerange(0, HIGH)
    for number, place in zip(aside, request["files"], strict=True):
        os.dup2(number, place)
        os.close(number)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    for name, limit in request["limits"].items():
        if resource.getrlimit(getattr(resource, name)) != tuple(limit):
            resource.setrlimit(getattr(resource, name), tuple(limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["env"])
    kind, what, arguments, unbuffered = request["program"]
    sys.stdin = sys.__stdin__ = _stream(0, "r", False, "strict")
    sys.stdout = sys.__stdout__ = _stream(1, "w", unbuffered, "strict")
    sys.stderr = sys.__stderr__ = _stream(2, "w", unbuffered, "backslashreplace")
    sys.orig_argv = request["orig_argv"]
    sys.argv = [what if kind == "file" else kind, *arguments]
    first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.realpath(what)))
    sys.path[:] = [first, *request["path"]]
    sys.path_importer_cache.clear()
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__.update(__builtins__=__builtins__, __annotations__={})
    del sys.modules["server"]
    import numpy
    import torch

    numpy.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _stream(number: int, mode: str, unbuffered: bool, errors: str) -> Any:
    try:
        raw = io.FileIO(number, mode, closefd=False)
    except OSError:
        return None  # closed, as the program was started
    if mode == "r":
        return io.TextIOWrapper(io.BufferedReader(raw), "utf-8", errors)
    stream = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        "utf-8",
        errors,
        line_buffering=number == 2,
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]
    return stream


def _execute(kind: str, what: str, arguments: list[str]) -> None:
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    names = sys.modules["__main__"].__dict__
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), names)
        return
    path = os.path.abspath(what)
    names.update(__file__=path, __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, names)


def _end(code: int) -> None:
    """As the interpreter does, but for taking all modules apart where no thread could notice."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        code = code or 120
        if sys.stderr is not None:
            print(f"Exception ignored in: {sys.stdout!r}", file=sys.stderr)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    if sys.stderr is not None:
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if len(os.listdir("/proc/self/task")) > 1:
        ctypes.pythonapi.Py_Exit(code)
    os._exit(code)


if __name__ == "__main__":
    # forks pickle and import by name; __main__ is theirs
    sys.modules["server"] = sys.modules["__main__"]
    serve(sys.argv[1])
