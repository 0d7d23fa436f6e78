from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.units import (
    format_rate,
    parse_count,
    parse_duration,
    parse_rate,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 100e6),
        ("100 Mbit/s", 100e6),
        (" 10 Gbit/s ", 10e9),
        ("56kbit", 56e3),
        ("2.5gbit", 2.5e9),
        (".5 mbit", 0.5e6),
        ("9600 bit", 9600.0),
        ("9600", 9600.0),
        ("1e6", 1e6),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("100 us", 1e-4),
        ("100 µs", 1e-4),
        ("1.5 S", 1.5),
        ("2", 2.0),
        ("10min", 600.0),
        ("1.5 h", 5400.0),
        ("0", 0.0),
        ("0ms", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "mbit", "0", "0mbit", "-1mbit", "nan", "inf", "1e999", "5 parsec", "5ms", "١"],
)
def test_what_is_no_rate_is_named_in_one_line(text: str) -> None:
    refused(text)


def refused(text: str) -> None:
    with pytest.raises(ValueError, match="mbit") as raised:
        parse_rate(text)
    message = str(raised.value)
    assert repr(text) in message and "\n" not in message


@pytest.mark.parametrize("text", ["", "soon", "ms", "-1ms", "nan", "inf", "1e999", "5 y", "5mbit"])
def test_what_is_no_duration_is_named_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="ms") as raised:
        parse_duration(text)
    message = str(raised.value)
    assert repr(text) in message and "\n" not in message


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (100e6, "100 Mbit/s"),
        (10e9, "10 Gbit/s"),
        (2.5e9, "2.5 Gbit/s"),
        (56e3, "56 kbit/s"),
        (999_999, "1 Mbit/s"),
        (800, "800 bit/s"),
        (0, "0 bit/s"),
        (123_456_789, "123.5 Mbit/s"),
        (4e13, "40000 Gbit/s"),
    ],
)
def test_rates_for_a_reader(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@given(st.floats(1.0, 1e15))
def test_what_is_formatted_parses_to_four_digits(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.3B", 1_300_000_000), ("125 M", 125_000_000), ("865280", 865_280), ("2k", 2000)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "0", "-1M", "1.5", "1.2345k", "nan", "1e999", "3 kB"])
def test_what_is_no_count_is_named_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="865280") as raised:
        parse_count(text)
    assert repr(text) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "share"), [("0.1%", 0.001), ("0.001", 0.001), (" 5 % ", 0.05), ("0", 0), ("100%", 1)]
)
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "1.5", "nan", "0.1 %%", "5ms"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a share: .* or one with % \(0\.1%, 0\.001\)"):
        parse_share(text)
