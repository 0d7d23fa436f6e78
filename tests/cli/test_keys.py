"""``laconic keys``."""

from __future__ import annotations

import stat
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.links import job_secret, tls

from tests.support import job_keys

pytest.importorskip("cryptography")


def exports(output: str) -> dict[str, str]:
    """The variables that a shell sets."""
    script = output + "\nenv -0"
    said = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    pairs = (line.partition("=") for line in said.stdout.split("\0") if line)
    return {name: value for name, _, value in pairs if name not in ("PWD", "SHLVL", "_", "OLDPWD")}


def test_the_files_and_variables_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a job's keys"
    assert main(["keys", str(directory)]) == 0
    assert sorted(p.name for p in directory.iterdir()) == [
        "ca.pem",
        "cert.pem",
        "key.pem",
        "secret",
    ]
    job_keys.turn_off(monkeypatch)
    for name, value in exports(capsys.readouterr().out).items():
        monkeypatch.setenv(name, value)
    assert tls.contexts() is not None
    secret = job_secret.read()
    assert secret is not None and len(bytes.fromhex(secret.decode())) == 32
    for name, mode in (("key.pem", 0o600), ("secret", 0o600), ("cert.pem", 0o644)):
        assert stat.S_IMODE((directory / name).stat().st_mode) & ~0o022 == mode & ~0o022
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert main(["keys", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"laconic: {tmp_path}/ca.pem exists") and not said.out
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").symlink_to(tmp_path / "nowhere")
    assert main(["keys", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "nowhere").exists() and len(list((tmp_path / "other").iterdir())) == 1


def test_days(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cryptography import x509

    assert main(["keys", str(tmp_path / "keys"), "--days", "3"]) == 0
    for name in ("ca.pem", "cert.pem"):
        found = x509.load_pem_x509_certificate((tmp_path / "keys" / name).read_bytes())
        left = found.not_valid_after_utc - datetime.now(timezone.utc)
        assert timedelta(days=2.9) < left <= timedelta(days=3)
    for days in ("0", "-1", "36501"):
        assert main(["keys", str(tmp_path / days), "--days", days]) == 2
        assert "--days must be" in capsys.readouterr().err


def test_more_certificates_of_one_ca(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers with different certificates of it trust each other, and have one secret."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["keys", str(first), "--keep-ca", "--days", "10"]) == 0
    assert stat.S_IMODE((first / "ca-key.pem").stat().st_mode) == 0o600
    assert "keep it off the workers' hosts" in capsys.readouterr().out
    assert main(["keys", str(second), "--ca", str(first), "--days", "99"]) == 0
    assert not (second / "ca-key.pem").exists()
    assert (first / "secret").read_bytes() == (second / "secret").read_bytes()
    assert (first / "cert.pem").read_bytes() != (second / "cert.pem").read_bytes()
    assert (first / "ca.pem").read_bytes() == (second / "ca.pem").read_bytes()
    job_keys.turn_on(monkeypatch, second)
    assert tls.contexts() is not None
    capsys.readouterr()
    assert main(["keys", str(tmp_path / "third"), "--ca", str(second)]) == 2
    assert "has no ca-key.pem: it was made without --keep-ca" in capsys.readouterr().err
    (second / "ca-key.pem").write_bytes((first / "key.pem").read_bytes())
    assert main(["keys", str(tmp_path / "third"), "--ca", str(second)]) == 2
    assert "ca-key.pem in" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(["keys", str(tmp_path / "keys")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("laconic: laconic keys needs the package cryptography: pip install -e")
    assert "[tls]" in said and said.count("\n") == 1 and not (tmp_path / "keys").exists()
