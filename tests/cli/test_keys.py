"""``laconic keys``."""

from __future__ import annotations

import stat
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.links import job_secret, tls

from tests.support import job_keys

x509 = pytest.importorskip("cryptography.x509")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_files_and_variables_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a job's keys"
    assert main(["keys", str(folder), "--days", "3"]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["ca.pem", "cert.pem", "key.pem", "secret"]
    job_keys.turn_off(monkeypatch)
    script = capsys.readouterr().out + "\nenv -0"  # in a shell
    said = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    for name, _, value in (line.partition("=") for line in said.stdout.split("\0")):
        if name.startswith(("LACONIC_", "GLOO_")):
            monkeypatch.setenv(name, value)
    assert tls.contexts() is not None
    secret = job_secret.read()
    assert secret is not None and len(bytes.fromhex(secret.decode())) == 32
    assert mode(folder) == 0o700
    assert mode(folder / "key.pem") == mode(folder / "secret") == 0o600
    for name in ("ca.pem", "cert.pem"):
        found = x509.load_pem_x509_certificate((folder / name).read_bytes())
        left = found.not_valid_after_utc - datetime.now(timezone.utc)
        assert timedelta(days=2.9) < left <= timedelta(days=3)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once there are keys, the command prints the variables."""
    assert main(["keys", str(tmp_path)]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    printed = capsys.readouterr().out
    assert main(["keys", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed
    assert main(["keys", str(tmp_path), "--days", "3"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").symlink_to(tmp_path / "nowhere")
    assert main(["keys", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "nowhere").exists() and len(list((tmp_path / "other").iterdir())) == 1
