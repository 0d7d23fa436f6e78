"""An option that would have no effect beside others is an error."""

from __future__ import annotations

import pytest

from laconic.cli import main

ADVISE = ["advise", "--params", "1M", "--step-time", "1s", "--bandwidth", "1gbit", "--nodes", "2"]
PLAN = ["plan", "--workers", "4", "--rate", "100mbit", "--parameters", "2m"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([*ADVISE, "--latency", "1ms", "--json", "--all"], "leave out --all"),
        ([*ADVISE, "--latency", "0", "--loss", "1%"], "--loss has no effect"),
        (["advise", "--workload", "digits", "--buffers", "1M"], "--buffers is measured"),
        ([*PLAN, "--loss", "1%"], "--loss has no effect without --latency"),
        ([*PLAN, "--uplink", "1gbit"], "--uplink has no effect without --sites"),
        ([*PLAN, "--egress", "0.05"], "--egress has no effect without --sites"),
        ([*PLAN, "--example"], "--example prints a file"),
        (["plan", "--example", "diloco(100)"], "--example prints a file"),
        (["lab", "--hosts", "2", "clean"], "--hosts has no effect with lab clean"),
        (["lab", "--shell", "1", "--per-host", "2"], "--per-host has no effect with --shell"),
        (["lab", "--shell", "1", "--kill", "1@3s"], "--kill has no effect with --shell"),
        (["lab", "--shell", "1@77", "--latency", "9ms"], "--latency has no effect with --shell"),
        (["lab", "--network-seed", "7", "true"], "seed of jitter and loss"),
        (["compare", "--network-seed", "7", "ddp()"], "seed of jitter and loss"),
        (["doctor", "--timeout", "5"], "--timeout is for several hosts"),
        (["demo", "--kill", "--out", "folder"], "leave out --out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_without_effect_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(words) == 2
    assert why in capsys.readouterr().err
