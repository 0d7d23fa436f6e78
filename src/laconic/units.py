"""Parse and format rates, durations, shares, counts and sizes.

Rates are bits per second in powers of ten, as network equipment is sold: "100 mbit" is 1e8 bit/s.

Command lines parse rates and durations with `parse_bandwidth` and `parse_time`, which require a
unit: a bare "100" is rarely meant as 100 bit/s, nor a bare "5" as 5 s. `parse_rate` and
`parse_duration` take bare numbers, which programs pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-zµμ/%]*)\s*", re.ASCII)
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATES = _BITS | {f"{unit}/s": scale for unit, scale in _BITS.items()}
_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_COUNT_FORMS = "a positive whole number, or one with K, M, B or T (1.3B, 125M, 865280)"
_RATE_FORMS = "a positive number of bit/s, or one with bit, kbit, mbit or gbit (100mbit, 10 Gbit/s)"
_BANDWIDTH_FORMS = "a positive number with bit, kbit, mbit or gbit (100mbit, 10 Gbit/s)"
_TIME_FORMS = "0, or a positive number with us, ms, s, min, h or d (20ms, 1.5 s)"
_SHARE_FORMS = "a number from 0 to 1, or one with % (0.1%, 0.001)"
_DURATION_FORMS = "a number of seconds from 0 up, or one with us, ms, s, min, h or d (20ms, 1.5 s)"


def parse_rate(text: str) -> float:
    """Return the rate `text` ("100mbit", "10 Gbit/s", "2.5e8") in bit/s. Case does not matter.

    Raises ValueError for an unknown unit and for a value that is not positive and finite.
    """
    return _read(text, "rate", _RATE_FORMS, _RATES, _positive)


def parse_duration(text: str) -> float:
    """Return the duration `text` ("20ms", "100 us", "1.5") in seconds. Case does not matter.

    Zero is a valid duration (no added latency). Raises ValueError for an unknown unit and for a
    value that is negative or not finite.
    """
    return _read(text, "duration", _DURATION_FORMS, _DURATIONS, _not_negative)


def parse_bandwidth(text: str) -> float:
    """Return the rate `text` of a command line ("100mbit", "10 Gbit/s") in bit/s.

    As `parse_rate`, but raises ValueError for a number without a unit, too.
    """
    return _read(text, "rate", _BANDWIDTH_FORMS, _RATES, _positive, bare=False)


def parse_time(text: str) -> float:
    """Return the duration `text` of a command line ("20ms", "100 us", "0") in seconds.

    As `parse_duration`, but raises ValueError for a number without a unit, too, unless it is 0.
    """
    return _read(text, "time", _TIME_FORMS, _DURATIONS, _not_negative, bare=False)


def parse_share(text: str) -> float:
    """Return the share `text` ("0.1%", "0.001") as a number from 0 to 1.

    Raises ValueError for an unknown unit and for a value that is not from 0 to 1.
    """
    return _read(text, "share", _SHARE_FORMS, {"%": 0.01}, lambda share: 0.0 <= share <= 1.0)


def parse_count(text: str) -> int:
    """Return the count `text` ("1.3B", "125 M", "865280") as an integer. Case does not matter.

    Raises ValueError for an unknown unit and for a value that is not a positive integer.
    """
    return round(_read(text, "count", _COUNT_FORMS, _COUNTS, _whole))


def three_digits(number: float) -> str:
    """Format `number` with three significant digits and no exponent: 10150.2 is "10,200"."""
    rounded = float(f"{number:.3g}")
    if abs(rounded) >= 100:
        return f"{rounded:,.0f}"
    places = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    text = f"{rounded:.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_seconds(seconds: float) -> str:
    """Format `seconds` with three significant digits and a unit: 0.0305 is "30.5 ms"."""
    return _with_unit(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def format_share(share: float) -> str:
    """Format `share` as a percentage with three significant digits: 0.001 is "0.1%"."""
    return f"{three_digits(100 * share)}%"


def format_bytes(count: float) -> str:
    """Format `count` bytes with three significant digits and a unit: 3.461e6 is "3.46 MB"."""
    units = ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0)
    return _with_unit(count, units)


def _with_unit(number: float, units: Sequence[tuple[str, float]]) -> str:
    """``number`` in the first of the ``units`` of which it is at least one, else in the last."""
    fits = (each for each in units if float(f"{number / each[1]:.3g}") >= 1)
    unit, scale = next(fits, units[-1])
    return f"{three_digits(number / scale)} {unit}"


def format_rate(rate: float) -> str:
    """Format `rate` (bit/s) with four significant digits and a unit: 1e8 is "100 Mbit/s".

    Raises ValueError for a rate that is negative or not finite.
    """
    if not 0.0 <= rate < math.inf:
        raise ValueError(f"not a rate: {rate!r}; give a number of bit/s from 0 up")
    # Round first, so that 999,999 bit/s becomes 1 Mbit/s and not 1e+03 kbit/s.
    rounded = float(f"{rate:.4g}")
    prefix, scale = "", 1.0
    for name, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if rounded >= size:
            prefix, scale = name, size
    number = rounded / scale
    return f"{number:.0f} {prefix}bit/s" if number >= 1e4 else f"{number:.4g} {prefix}bit/s"


def finite(value: object) -> object:
    """Return `value` with None in place of numbers that are not finite, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def _positive(value: float) -> bool:
    return 0.0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0.0 <= value < math.inf


def _whole(value: float) -> bool:
    return _positive(value) and round(value) == round(value, 3)


def _read(
    text: str,
    noun: str,
    forms: str,
    units: Mapping[str, float],
    valid: Callable[[float], bool],
    bare: bool = True,
) -> float:
    """Return `text` in the base unit. Raises ValueError, which says which ``forms`` a ``noun`` has,
    for text without a number, an unknown unit and a value that is not ``valid``.

    ``bare``: whether a number other than 0 may have no unit.
    """
    if match := _NUMBER.fullmatch(text.lower()):
        number, unit = float(match[1]), match[2].replace("µ", "u").replace("μ", "u")
        free = unit == "" and (bare or number == 0)
        scale = 1.0 if free else units.get(unit)
        if scale is not None and valid(number * scale):
            return number * scale
    raise ValueError(f"not a {noun}: {text!r}; give {forms}")
