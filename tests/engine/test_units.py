from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_latency,
    parse_rate,
    parse_share,
    three_digits,
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


@pytest.mark.parametrize("text", ["100", "1e6", "9600 ", "+5", "0", "fast", "5ms"])
def test_the_rate_of_a_command_line_has_a_unit(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"give a positive number with bit, .* \(100mbit"
    ) as raised:
        parse_bandwidth(text)
    assert f"not a rate: {text!r}" in str(raised.value) and "\n" not in str(raised.value)
    assert parse_bandwidth("100mbit") == parse_rate("100 Mbit/s") == 1e8


@pytest.mark.parametrize("text", ["5", "0.02", "-1ms", "soon", "5mbit"])
def test_the_latency_of_a_command_line_has_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match=r"give 0, or a positive number with us, ms, s") as raised:
        parse_latency(text)
    assert f"not a latency: {text!r}" in str(raised.value) and "\n" not in str(raised.value)
    assert parse_latency("20ms") == 0.02 and parse_latency("0") == parse_latency("0ms") == 0


@pytest.mark.parametrize(
    "text",
    ["", "fast", "mbit", "0", "0mbit", "-1mbit", "nan", "inf", "1e999", "5 parsec", "5ms", "١"],
)
def test_what_is_no_rate_is_named_in_one_line(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("text", ["10 mbit/h", "10/s", "1_000", "10 Mbyte", "1 2", "10 mbit 5"])
def test_what_is_almost_a_rate_is_refused_too(text: str) -> None:
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


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_no_rate_is_not_formatted(rate: float) -> None:
    with pytest.raises(ValueError, match="not a rate"):
        format_rate(rate)


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
    ("seconds", "text"),
    [
        (0.0305, "30.5 ms"),
        (1.0, "1 s"),
        (2e-5, "20 us"),
        (1234.0, "1,230 s"),
        (0.9999, "1 s"),
        (0.0, "0 us"),
    ],
)
def test_seconds_for_a_reader(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(3.461e6, "3.46 MB"), (0.0, "0 bytes"), (999_900, "1 MB"), (5.2e9, "5.2 GB")],
)
def test_bytes_for_a_reader(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e-5, "0.00001"),
        (0.0, "0"),
        (0.90123, "0.901"),
        (99.96, "100"),
        (10150.2, "10,200"),
        (3.0, "3"),
        (999.9, "1,000"),
    ],
)
def test_three_digits(number: float, text: str) -> None:
    assert three_digits(number) == text


@pytest.mark.parametrize(
    ("text", "share"), [("0.1%", 0.001), ("0.001", 0.001), (" 5 % ", 0.05), ("0", 0), ("100%", 1)]
)
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "1.5", "nan", "0.1 %%", "5ms"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a share: .* or one with % \(0\.1%, 0\.001\)"):
        parse_share(text)


@pytest.mark.parametrize(
    ("share", "text"), [(0.001, "0.1%"), (0.05, "5%"), (0.12345, "12.3%"), (0, "0%"), (1, "100%")]
)
def test_a_share_is_shown_as_a_percentage(share: float, text: str) -> None:
    assert format_share(share) == text
