"""A secret that all workers have before they meet: it does not travel, and a wrong one, like any
wrong setting of one rank, is one line on all of them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic as la
from laconic.links import job_secret
from laconic.links.call_guard import CallGuard
from laconic.links.elastic.registry import Registry, serve
from laconic.links.elastic.view import Member, View

from tests.support import gloo, job_keys, launched

ONE, OTHER = b"1" * 32, b"2" * 32


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the variable names."""
    path = tmp_path / "secret"
    path.write_bytes(ONE + b"\n")
    (tmp_path / "other").write_bytes(OTHER)
    monkeypatch.setenv(job_secret.VARIABLE, str(path))
    return path


def test_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_secret.read() == ONE
    file.write_bytes(b"short\n")
    with pytest.raises(ValueError, match=rf"{file} \(LACONIC_SECRET_FILE\) has 5 bytes, and a sec"):
        job_secret.read()
    file.unlink()
    with pytest.raises(ValueError, match=rf"cannot read {file} \(LACONIC_SECRET_FILE\): No such"):
        job_secret.read()
    monkeypatch.delenv(job_secret.VARIABLE)
    assert job_secret.read() is None
    made = [
        job_secret.derive(secret, purpose, name, salt)
        for secret in (ONE, OTHER)
        for purpose, name in (("a", "bc"), ("ab", "c"), ("abc", ""))
        for salt in (b"", b"x")
    ]
    assert len(set(made)) == len(made)


def test_ranks_derive_a_links_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one for each link, and it is not sent. Without a file, rank 0 draws it."""
    own, barrier, rows = threading.local(), threading.Barrier(2), dict[int, Tensor]()
    monkeypatch.setattr(job_secret, "read", lambda: own.secret)
    sent: list[bytes] = []

    def meet(rank: int, secret: bytes | None) -> bytes:
        own.secret = secret

        def gather(x: Tensor) -> Tensor:
            rows[rank] = x
            sent.append(bytes(x.to(torch.uint8).tolist()))
            barrier.wait(60)
            stacked = torch.stack([rows[0], rows[1]])
            barrier.wait(60)
            return stacked

        guard = CallGuard(rank, range(2), None)
        assert guard.meet(gather, f"text/{rank}") == ["text/0", "text/1"]
        return guard.secret

    secrets = set()
    with ThreadPoolExecutor(2) as pool:
        for secret in (ONE, ONE, None):
            sent.clear()
            (found,) = set(pool.map(meet, range(2), [secret] * 2))
            secrets.add(found)
            assert (found.hex().encode() in b"".join(sent)) == (secret is None)
    assert len(secrets) == 3


# -- processes ----


def train(pipe: Any) -> str:
    la.init()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with la.attach(model, optimizer, la.local_sgd(2), timeout=200):
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    return "trained"


def trained(*given: dict[str, str]) -> list[str]:
    world = launched.of_torchrun(len(given))
    return launched.results([{**w, **g} for w, g in zip(world, given, strict=True)], train)


@pytest.mark.parametrize("encrypted", [False, True])
def test_processes_with_one_file_train(file: Path, jobs: job_keys.Jobs, encrypted: bool) -> None:
    given = job_keys.variables(jobs.one) if encrypted else {}
    assert trained(given, given) == ["trained"] * 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_process_with_another_file(file: Path, wrong: int) -> None:
    given: list[dict[str, str]] = [{}, {}, {}]
    given[wrong] = {job_secret.VARIABLE: str(file.with_name("other"))}
    (said,) = set(trained(*given))
    assert " has another secret in LACONIC_SECRET_FILE than the first worker: give every " in said


def test_a_process_without_tls(jobs: job_keys.Jobs) -> None:
    given = job_keys.variables(jobs.one)
    (said,) = set(trained(given, {}))
    assert re.search(
        r"rank \d (uses|does not use) TLS, and the first worker does( not)?: set", said
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LACONIC_CONGESTION", "fast"),
        ("LACONIC_PORTS", "many"),
        ("LACONIC_TLS", "yes"),
        ("LACONIC_SECRET_FILE", "/no/such/file"),
    ],
)
def test_a_wrong_setting_of_one_rank(name: str, value: str) -> None:
    """Ends all ranks at once: that rank with a ValueError, the others with its text."""
    wrong, other = reversed(trained({}, {name: value}))
    assert wrong.startswith("builtins.ValueError: ") and name in wrong and value in wrong
    assert other == f"laconic.errors.LinkError: rank 1: {wrong.partition(': ')[2]}"


# -- an elastic run ----

Made = Callable[[Path | None], Registry]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes the registry of a worker with this file."""
    port, registries = gloo.free_port(), list[Registry]()
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
    """It is not stored, and a run under way restores it where another one would begin."""
    first, second = make(file), make(file)
    secret, about = first.secret(), first.about("ours")
    assert secret == second.secret() == first.secret()
    stored = first._read("secret")
    assert stored is not None and secret.hex() not in stored and ONE.hex() not in stored
    second._call(lambda store: store.set("secret", second._drawn()))  # as by a new coordinator
    assert second.secret() != secret
    view = View(5, (Member("0" * 12, *[f"10.0.0.1|1|{'00' * 8}"] * 3),), "why")
    assert first.restore(secret, about, view) == view
    assert second.secret() == secret and second._read("secret") == stored


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("secret", "other"), "has another secret in LACONIC_SECRET_FILE than the first wor"),
        (("secret", None), "has no LACONIC_SECRET_FILE, and the first worker has: give ever"),
        ((None, "secret"), "has LACONIC_SECRET_FILE, and the first worker has none: give ev"),
    ],
)
def test_a_worker_with_a_wrong_file(
    make: Made, file: Path, files: tuple[str | None, str | None], said: str
) -> None:
    first, second = (make(file.with_name(name) if name else None) for name in files)
    first.secret()
    with pytest.raises(ValueError, match=said) as error:
        second.secret()
    assert "\n" not in str(error.value) and "or pass another job= than 'job'" in str(error.value)
