"""A secret that all workers have before they meet: it does not travel, and a wrong one is one
line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links import job_secret
from laconic.links.call_guard import CallGuard
from laconic.links.elastic.registry import Registry, serve
from laconic.links.elastic.view import View
from laconic.links.handshake import SECRET_BYTES

from tests.support import gloo, job_keys

ONE, OTHER = b"1" * 32, b"2" * 32


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the variable names."""
    path = tmp_path / "secret"
    path.write_bytes(ONE + b"\n")
    monkeypatch.setenv(job_secret.VARIABLE, str(path))
    return path


def test_the_file(file: Path) -> None:
    assert job_secret.read() == ONE
    file.write_bytes(b"short\n")
    with pytest.raises(ValueError, match=rf"{file} \(LACONIC_SECRET_FILE\) has 5 bytes, and a sec"):
        job_secret.read()
    file.unlink()
    with pytest.raises(ValueError, match=rf"cannot read {file} \(LACONIC_SECRET_FILE\): No such"):
        job_secret.read()


def test_what_is_derived_differs() -> None:
    made = [
        job_secret.derive(secret, purpose, name, salt)
        for secret in (ONE, OTHER)
        for purpose, name in (("a", "bc"), ("ab", "c"), ("abc", ""))
        for salt in (b"", b"x")
    ]
    assert len(set(made)) == len(made) and {len(m) for m in made} == {SECRET_BYTES}


def test_without_a_file_there_is_none() -> None:
    assert job_secret.read() is None and job_secret.fingerprint() == ""


# -- a link ----


def meet(monkeypatch: pytest.MonkeyPatch, *files: bytes | None) -> list[CallGuard | LinkError]:
    """Ranks with these secrets meet, in threads; the guard or error of each, and what they
    sent."""
    barrier, rows = threading.Barrier(len(files)), dict[int, Tensor]()
    own = threading.local()
    monkeypatch.setattr(job_secret, "read", lambda: own.secret)

    def work(rank: int) -> CallGuard | LinkError:
        own.secret = files[rank]

        def gather(x: Tensor) -> Tensor:
            rows[rank] = x
            barrier.wait(30)
            stacked = torch.stack([rows[r] for r in range(len(files))])
            barrier.wait(30)
            sent.append(bytes(x.to(torch.uint8).tolist()))
            return stacked

        guard = CallGuard(rank, range(len(files)), None)
        try:
            assert guard.meet(gather, f"text/{rank}") == [f"text/{r}" for r in range(len(files))]
        except LinkError as error:
            return error
        return guard

    sent: list[bytes] = []
    with ThreadPoolExecutor(len(files)) as pool:
        met = list(pool.map(work, range(len(files))))
    for guard in met:
        if isinstance(guard, CallGuard):
            assert guard.secret.hex().encode() not in b"".join(sent) or files[0] is None
    return met


def test_ranks_derive_a_links_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    first = meet(monkeypatch, ONE, ONE, ONE)
    second = meet(monkeypatch, ONE, ONE)
    secrets = [{guard.secret for guard in met} for met in (first, second)]  # type: ignore[union-attr]
    assert len(secrets[0]) == len(secrets[1]) == 1 and secrets[0] != secrets[1], "one per link"


def test_without_a_file_rank_0_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    met = meet(monkeypatch, None, None)
    assert len({guard.secret for guard in met}) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((ONE, ONE, OTHER), "rank 2 has another secret in LACONIC_SECRET_FILE than the first work"),
        ((ONE, None, ONE), "rank 1 has no LACONIC_SECRET_FILE, and the first worker has: give eve"),
        ((None, ONE, None), "rank 1 has LACONIC_SECRET_FILE, and the first worker has none: give "),
    ],
)
def test_a_wrong_file_is_the_same_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, files: tuple[bytes | None, ...], said: str
) -> None:
    met = meet(monkeypatch, *files)
    assert len({str(error) for error in met}) == 1 and str(met[0]).startswith(said)
    wrong = next(r for r in range(3) if files[r] != files[0])
    assert all(isinstance(error, LinkError) and error.ranks == (wrong,) for error in met)


# -- processes ----

TRAIN = """
import torch, laconic as la
from laconic.links import call_guard
la.init()
print("begun", flush=True)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with la.attach(model, optimizer, la.local_sgd(2), timeout=600) as sync:
    for _ in range(4):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
print("trained", flush=True)
"""


@contextmanager
def ranks(tmp_path: Path, *given: dict[str, str]) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each environment that is ``given``."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port())}
    processes = []
    for rank, own in enumerate(given):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(given))}
        environment = {**os.environ, **where, **world, **own}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("encrypted", [False, True])
def test_processes_with_one_file_train(
    tmp_path: Path, file: Path, jobs: job_keys.Jobs, encrypted: bool
) -> None:
    given = job_keys.variables(jobs.one) if encrypted else {}
    with ranks(tmp_path, given, given) as processes:
        for process in processes:
            said, errors = process.communicate(timeout=200)
            assert said == "begun\ntrained\n", errors


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_process_with_another_file(tmp_path: Path, file: Path, wrong: int) -> None:
    """One clear line on all ranks, before any link is made."""
    other = tmp_path / "other"
    other.write_bytes(OTHER)
    files = [file, file, file]
    files[wrong] = other
    said = error_of(tmp_path, *({job_secret.VARIABLE: str(path)} for path in files))
    assert " has another secret in LACONIC_SECRET_FILE than the first worker: give every " in said


def test_a_process_without_tls(tmp_path: Path, jobs: job_keys.Jobs) -> None:
    given = job_keys.variables(jobs.one)
    said = error_of(tmp_path, given, given, {})
    assert re.search(
        r"rank \d (uses|does not use) TLS, and the first worker does( not)?: set", said
    )


def error_of(tmp_path: Path, *given: dict[str, str]) -> str:
    """The error of all ranks, which is the same and comes soon."""
    with ranks(tmp_path, *given) as processes:
        ended = [process.communicate(timeout=200) for process in processes]
    # which one comes first is chance
    last = {text.strip().splitlines()[-1].partition("]: ")[2] for _, text in ended}
    assert len(last) == 1, last
    text = last.pop()
    rank = int(text.split()[2])
    assert ended[rank][0] == ("begun\n" if rank == 0 else ""), "rank 0 may have the store"
    return text


# -- an elastic run ----

Made = Callable[[Path | None], Registry]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes the registry of a worker with this file."""
    port, registries = gloo.free_port(), []
    store = serve("127.0.0.1", port)

    def make(file: Path | None) -> Registry:
        monkeypatch.setenv(job_secret.VARIABLE, "" if file is None else str(file))
        registries.append(Registry(f"127.0.0.1:{port}", "job"))
        registries[-1].connect(time.monotonic() + 60)
        return registries[-1]

    yield make
    for registry in registries:
        registry.close(time.monotonic() + 5)
    del store


def test_workers_derive_the_secret(make: Made, file: Path) -> None:
    first, second = make(file), make(file)
    secret = first.secret()
    assert secret == second.secret() == first.secret() and len(secret) == SECRET_BYTES
    stored = first._read("secret")
    assert stored is not None and secret.hex() not in stored and ONE.hex() not in stored


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "one",
            "other",
            "this worker has another secret in LACONIC_SECRET_FILE than the first wor",
        ),
        (
            "one",
            None,
            "this worker has no LACONIC_SECRET_FILE, and the first worker has: give ever",
        ),
        (
            None,
            "one",
            "this worker has LACONIC_SECRET_FILE, and the first worker has none: give ev",
        ),
    ],
)
def test_a_worker_with_a_wrong_file(
    make: Made, tmp_path: Path, first: str | None, second: str | None, said: str
) -> None:
    (tmp_path / "one").write_bytes(ONE)
    (tmp_path / "other").write_bytes(OTHER)
    made = [make(tmp_path / name if name else None) for name in (first, second)]
    made[0].secret()
    with pytest.raises(ValueError, match=said) as error:
        made[1].secret()
    assert "\n" not in str(error.value) and "or pass another job= than 'job'" in str(error.value)
    assert made[0].secret() == made[0].secret()


def test_a_run_restores_what_it_has_derived(make: Made, file: Path) -> None:
    """Into a store that another run has begun to use: the older run counts."""
    old = make(file)
    secret, about, view = old.secret(), old.about("ours"), View(5, (_member(),), "why")
    old._call(lambda store: store.set("secret", "gone"))  # as by a new coordinator
    salt = old._stored[secret]
    new = make(file)
    new._call(lambda store: store.set("secret", new._drawn()))
    drawn = new.secret()
    assert drawn != secret
    assert old.restore(secret, about, view) == view
    assert new.secret() == secret and new._read("secret") == salt


def _member() -> object:
    from laconic.links.elastic.view import Member

    return Member("0" * 12, *(f"10.0.0.1|{port}|{'00' * 8}" for port in (1, 2, 3)))


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    "setting",
    [
        {"LACONIC_CONGESTION": "fast"},
        {"LACONIC_PORTS": "many"},
        {"LACONIC_TLS": "yes"},
        {"LACONIC_SECRET_FILE": "/no/such/file"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_wrong_setting_of_one_rank(tmp_path: Path, setting: dict[str, str], wrong: int) -> None:
    """Ends all ranks at once: that rank with a ValueError, the others with its text."""
    given: list[dict[str, str]] = [{}, {}, {}]
    given[wrong] = setting
    ((name, value),) = setting.items()
    with ranks(tmp_path, *given) as processes:
        # before the timeout of the link
        ended = [p.communicate(timeout=200)[1].strip().splitlines()[-1] for p in processes]
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in ended]
    assert lines[wrong].startswith("ValueError: ")
    assert name in lines[wrong] and value in lines[wrong]
    text = lines[wrong].removeprefix("ValueError: ")
    others = [line for rank, line in enumerate(lines) if rank != wrong]
    assert others == [f"laconic.errors.LinkError: rank {wrong}: {text}"] * 2
