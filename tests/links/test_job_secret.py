"""A secret that all workers have before they meet: it does not travel, and a wrong one, like any
wrong setting of one rank, is one line on all of them."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic as la
from laconic.links import job_secret
from laconic.links.call_guard import CallGuard
from laconic.links.rendezvous import Rendezvous
from laconic.links.wire import Wire

from tests.elastic.test_coordinator import attached
from tests.links.test_secured import Between
from tests.support import gloo, job_keys, launched
from tests.support.elastic_runs import Coordinator

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
        for purpose, name in (("a", "bc"), ("ab", "c"), ("ab", ""))
        for salt in (b"", b"x")
    ]
    assert len(set(made)) == len(made)


def test_ranks_derive_a_links_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one for each link, and it is not sent. Without a file, it comes from one that a rank
    has put into the store."""
    own = threading.local()
    monkeypatch.setattr(job_secret, "read", lambda: own.secret)

    def meet(rank: int, secret: bytes | None, store: Any) -> bytes:
        own.secret = secret
        with closing(Wire(rank, "127.0.0.1", 60.0, range(2))) as wire:
            guard = CallGuard(wire)
            addresses = guard.meet(Rendezvous(store, rank, 2))
        assert addresses[rank] == wire.address and len({*addresses}) == 2
        return guard.secret

    secrets = set()
    with ThreadPoolExecutor(2) as pool:
        for secret in (ONE, ONE, None):
            store = dist.HashStore()  # type: ignore[attr-defined]
            (found,) = set(pool.map(meet, range(2), [secret] * 2, [store] * 2))
            secrets.add(found)
            assert store.check(["laconic/secret"]) == (secret is None)
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


def test_processes_with_one_file_train(file: Path, jobs: job_keys.Jobs) -> None:
    given = job_keys.variables(jobs.one)
    assert trained(given, given) == ["trained"] * 2


def test_a_process_with_another_file(file: Path) -> None:
    (said,) = set(trained({}, {job_secret.VARIABLE: str(file.with_name("other"))}, {}))
    assert " has another secret in LACONIC_SECRET_FILE than the first worker: give every " in said


def test_a_process_without_tls(jobs: job_keys.Jobs) -> None:
    (said,) = set(trained(job_keys.variables(jobs.one), {}))
    assert re.search(r"rank \d (uses|does not use) TLS, and the first worker does", said)


late = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "value"),
    [("LACONIC_PORTS", "many"), late("LACONIC_TLS", "yes")],
)
def test_a_wrong_setting_of_one_rank(name: str, value: str) -> None:
    """Ends all ranks at once: that rank with a ValueError, the others with its text."""
    wrong, other = reversed(trained({}, {name: value}))
    assert wrong.startswith("builtins.ValueError: ") and name in wrong and value in wrong
    assert other == f"laconic.errors.LinkError: rank 1: {wrong.partition(': ')[2]}"


# -- an elastic run ----


def test_workers_of_an_elastic_run_derive_the_secret(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not travel. A worker with another file, or without, is refused."""
    coordinator = Coordinator(port := gloo.free_port())
    between = Between(port)
    first = attached(between.port)
    for name in ("other", None):
        monkeypatch.setenv(job_secret.VARIABLE, str(file.with_name(name)) if name else "")
        said = "has another secret in LACONIC_SECRET_FILE than this worker"
        with pytest.raises(la.LinkError, match=said) as error:
            attached(port, wait=600.0)
        assert "\n" not in str(error.value)
    assert len(between.passed) > 500 and ONE not in between.passed
    assert ONE.hex().encode() not in between.passed
    first.detach()
    between.close()
    coordinator.kill()
