"""Draw the curves of a race as static SVG.

Lines are labeled at their ends. Colors are CSS variables (`STYLE`), so one picture serves a light
and a dark page. A length is in pixels of a picture `WIDTH` wide, which a page may scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from textwrap import wrap

from laconic.lab.race.comparison import Group, common, finished, groups, loss_at
from laconic.lab.race.result import (
    MEGABYTES,
    SECONDS,
    STEPS,
    Axis,
    Point,
    Result,
    line,
)

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The color-blind safe palette of Okabe and Ito. Dashes distinguish further rows."""
GRAY = "#767676"
STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d9dee4; --bad: #b3261e;
  --c0: #0072b2; --c1: #d55e00; --c2: #00815c; --c3: #b8508f; --c4: #a96f00; --c5: #2b88bd;
  --c6: #333; --gray: #767676; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #101418; --ink: #e6eaee; --soft: #9aa5b0; --line: #313a43; --bad: #ff8a80;
    --c0: #5aaee6; --c1: #ff8a3d; --c2: #3ccf9b; --c3: #e796c5; --c4: #f0b93a; --c5: #8fd3f7;
    --c6: #ddd; --gray: #9a9a9a; } }
svg { background: var(--paper); font: 13px system-ui, "Liberation Sans", sans-serif; }
svg text { fill: var(--soft); }
svg .title { fill: var(--ink); font-weight: 600; }
"""

WIDTH, HEIGHT = 480, 320
_LEFT, _TOP, _BOTTOM = 44, 34, 42
_NAMES, _NAME_LETTERS = 176, 21
_TEXT = 16  # of a line of text


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round values between ``low`` and ``high``."""
        if self.log and self.high > 5 * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [value for value in found if self.low <= value <= self.high]
        power = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= (self.high - self.low) / 5)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def pictures(result: Result) -> list[str]:
    """Return the loss by time, by traffic and by steps, and the distance between the workers by
    steps, as far as they are known."""
    limits = loss_limits(result)
    if limits is None:
        return []
    charts = [
        _chart(result, f"Validation loss by {name}", axis, label, attrgetter("loss"), limits)
        for name, axis, label in (
            ("time", SECONDS, "seconds of training"),
            ("traffic", MEGABYTES, "MB sent per host"),
            ("steps", STEPS, "steps"),
        )
    ]
    known = [p.distance for row in finished(result) for p in row.curve if p.distance is not None]
    if any(known):
        title, zoom = "Distance between the workers", (0.0, 1.06 * max(known), False)
        charts.append(_chart(result, title, STEPS, "steps", attrgetter("distance"), zoom))
    return charts


def picture(result: Result) -> str:
    """Return the loss by time, by traffic and by steps in one SVG file."""
    charts = pictures(result)[:3]
    placed = [chart.replace("<svg", f'<svg x="{k * WIDTH}"', 1) for k, chart in enumerate(charts)]
    style = f"<style>{STYLE}</style>"
    return _svg(len(charts) * WIDTH, _height(groups(result)), "", [style, *placed])


def label(group: Group) -> str:
    """Return the recipe's label in pictures."""
    return group.name if group.status == "ok" else f"{group.name}: {group.status}"


def numbered(result: Result) -> list[tuple[Group, int]]:
    """Return each recipe with the number of its color and dashes: -1 without communication, -2 on a
    free network."""
    count = itertools.count()
    return [
        (group, -1 - group.first.free if group.first.reference else next(count))
        for group in groups(result)
    ]


def _chart(
    result: Result,
    title: str,
    axis: Axis,
    x_label: str,
    value: Callable[[Point], float | None],
    limits: tuple[float, float, bool],
) -> str:
    """Draw a line per recipe, which ends in a dot, or in a ring if it diverged or failed.

    A band shows the range of the losses over several seeds.
    """
    shown = [(g, number) for g, number in numbered(result) if number >= 0 or axis is not MEGABYTES]
    height, right = _height(groups(result)), WIDTH - _NAMES
    bottom = height - _BOTTOM
    farthest = max((axis(point) for group, _ in shown for point in group.curve), default=0)
    x = Scale(0, farthest or 1, 0, right - _LEFT)
    y = Scale(limits[0], limits[1], bottom - _TOP, 0, limits[2])
    lines, ends = list[str](), list[str]()
    names: list[tuple[float, float, str, str]] = []
    for group, number in shown:
        points = [(x(axis(p)), y(v)) for p in group.curve if (v := value(p)) is not None]
        if not points:
            continue
        ok = group.status == "ok"
        color = "var(--gray)" if number < 0 else f"var(--c{number % len(COLORS)})"
        dashes = {-1: "2 4", -2: "7 4"}.get(number) or ("", "7 4", "9 3 2 3")[number // 7 % 3]
        if len(group.runs) > 1 and title.startswith("Validation"):
            lines.append(_band(group, axis, x, y, color))
        lines.append(
            f'<path d="{_path(points)}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-dasharray="{dashes if ok else "2 4"}"/>'
        )
        at, level = points[-1][0] + _LEFT, min(max(points[-1][1], 0), bottom - _TOP) + _TOP
        ends.append(
            f'<circle cx="{at:.1f}" cy="{level:.1f}" r="4" stroke="{color}" stroke-width="2" '
            f'fill="{color if ok else "none"}"/>'
        )
        names.append((level, at, color, label(group)))
    marked = common(result, axis)
    if axis is not MEGABYTES and marked and marked < 0.95 * x.high:
        where = x(marked)
        lines.append(_rule((where, 0), (where, bottom - _TOP), "1 3"))
    plot = f'<svg x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}">'
    axes = [
        *_x_axis(Scale(x.low, x.high, _LEFT, right), bottom, x_label),
        *_y_axis(Scale(y.low, y.high, bottom, _TOP, y.log), right),
    ]
    body = [*axes, plot, *lines, "</svg>", *ends, *_labels(names, right, bottom)]
    return _svg(WIDTH, height, title, body)


def _height(shown: Sequence[Group]) -> int:
    """Return a height with room for all labels."""
    names = sum(len(_lines(label(group))) * _TEXT + 4 for group in shown)
    return max(HEIGHT, names + _TOP + _BOTTOM)


def _lines(name: str) -> list[str]:
    return wrap(name, _NAME_LETTERS)


def _labels(names: Sequence[tuple[float, float, str, str]], right: int, bottom: int) -> list[str]:
    """Write each name in its color beside the end of its line, moved where names would overlap."""
    blocks = [(level, at, color, _lines(name)) for level, at, color, name in sorted(names)]
    tops, free = [], float(_TOP)
    for level, _, _, words in blocks:
        size = len(words) * _TEXT + 4
        tops.append(max(free, level - size / 2))
        free = tops[-1] + size
    limit = float(bottom)
    for k in reversed(range(len(blocks))):
        tops[k] = min(tops[k], limit - len(blocks[k][3]) * _TEXT - 4)
        limit = tops[k]
    drawn = []
    for top, (level, at, color, words) in zip(tops, blocks, strict=True):
        middle = top + len(words) * _TEXT / 2 + 2
        drawn.append(_rule((at + 5, level), (right + 12, middle), "1 2", color))
        drawn += [
            f'<text x="{right + 16}" y="{top + _TEXT * (k + 0.8):.1f}" style="fill: {color}">'
            f"{escape(text)}</text>"
            for k, text in enumerate(words)
        ]
    return drawn


def _band(group: Group, axis: Axis, x: Scale, y: Scale, color: str) -> str:
    bounds = [
        [(x(axis(p)), y(v)) for p, v in zip(group.curve, side, strict=True) if v is not None]
        for side in (group.low, group.high)
    ]
    outline = _path([*bounds[0], *reversed(bounds[1])])
    return f'<path d="{outline}Z" fill="{color}" opacity="0.15"/>' if bounds[0] else ""


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _rule(
    start: tuple[float, float], end: tuple[float, float], dashes: str, color: str = "var(--soft)"
) -> str:
    return f'<path d="{_path([start, end])}" stroke="{color}" stroke-dasharray="{dashes}"/>'


def _x_axis(x: Scale, y: float, text: str) -> list[str]:
    ticks = [
        f'<text x="{x(tick):.1f}" y="{y + 16:.1f}" text-anchor="middle">{tick:g}</text>'
        for tick in x.ticks()
    ]
    middle = (x.start + x.end) / 2
    name = f'<text x="{middle:.1f}" y="{y + 34:.1f}" text-anchor="middle">{text}</text>'
    return [_rule((x.start, y), (x.end, y), "none", "var(--line)"), *ticks, name]


def _y_axis(y: Scale, right: float) -> list[str]:
    drawn = []
    for tick in y.ticks():
        at = y(tick)
        drawn.append(_rule((_LEFT, at), (right, at), "none", "var(--line)"))
        drawn.append(f'<text x="{_LEFT - 6}" y="{at + 5:.1f}" text-anchor="end">{tick:g}</text>')
    return drawn


def _svg(width: float, height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">'
        f'<text class="title" x="0" y="16">{escape(title)}</text>' + "".join(body) + "</svg>"
    )


def loss_limits(result: Result) -> tuple[float, float, bool] | None:
    """Return the minimum and maximum loss to show, and whether on a logarithmic axis.

    The limits show where the recipes differ, so a huge initial loss may be outside. None if there
    is nothing to show.
    """
    rows = finished(result)
    losses = [loss for row in rows for _, loss in line(row, STEPS)]
    if not losses:
        return None
    # After a quarter of the time the initial fall is over. Every row's final loss is visible.
    quarter = (common(result, SECONDS) or 0) / 4
    visible = [loss_at(row, SECONDS, quarter) for row in rows]
    visible += [line(row, SECONDS)[-1][1] for row in rows]
    low, high = min(losses), max(loss for loss in visible if loss is not None)
    if low > 0 and high / low > 8:
        return low / 1.2, high * 1.2, True
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin, False
