"""Draws the timelines of docs/algorithms, an SVG beside each page: ``python docs/pictures.py``.

Rows are workers, time goes to the right. The upper half of a row computes, the lower half sends.
Nothing is to scale. Colours of text follow the page's, light or dark; a picture has no background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent / "algorithms"
WIDTH, LEFT, ROW = 520, 76, 45  # narrow, so that text can be read on a phone
COMPUTES, SENDS, TALL = 4, 24, 18  # of a row: where its halves begin, and how tall they are
CHARACTER = 8.2  # about as wide as one of 16 px

STYLE = """
text{font:16px Helvetica,Arial,sans-serif;fill:#33373d}
text.mid,text.in{text-anchor:middle}text.in{font-size:13px}text.in:not(.kept){fill:#fff}
rect.step{fill:#1b998b}rect.back{fill:#12756a}rect.gradients{fill:#c76a08}
rect.parameters{fill:#3f78d8}rect.fragments{fill:#8f63cf}rect.messages{fill:#7a828c}
rect.wait{fill:none;stroke:#8a9099;stroke-dasharray:2 3}rect.kept{fill:#8a9099;opacity:.3}
.fold{stroke:#8a9099;stroke-width:1.5;stroke-dasharray:5 3}
.track{stroke:#c2417e;stroke-width:3}.knob{fill:#c2417e}
.arrow{stroke:#3f78d8;stroke-width:2;marker-end:url(#tip)}.tip{fill:#3f78d8}
@media(prefers-color-scheme:dark){text{fill:#d5d8de}}
""".replace("\n", "")
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
    'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
)
LEGEND = {
    "step": "steps",
    "gradients": "gradients travel",
    "parameters": "parameters travel",
    "fragments": "a fragment travels",
    "messages": "measurements travel",
    "wait": "waiting",
    "kept": "kept for later",
}


class Timeline:
    """Rows by name, and what is drawn on them; times are pixels from the left edge of the rows."""

    def __init__(self, *rows: str, top: int = 1) -> None:
        """``top``: lines of text above the rows."""
        self.rows = rows
        self.top = 22 * top + 5
        self.bottom = self.top + ROW * len(rows)
        self.marks: list[str] = []
        self.kinds: dict[str, str] = {}
        for row, name in enumerate(rows):
            self.marks.append(f'<text x="0" y="{self._y(row) + 19}">{escape(name)}</text>')

    @property
    def workers(self) -> range:
        return range(sum(name.startswith("worker") for name in self.rows))

    def _y(self, row: int) -> int:
        return self.top + ROW * row

    def _box(self, kind: str, row: int, at: float, length: float, lane: int, text: str) -> None:
        x, y = LEFT + at, self._y(row) + lane
        self.kinds.setdefault(kind, LEGEND.get(kind, ""))
        width = f'width="{length - 1:g}" height="{TALL}" rx="2"'
        self.marks.append(f'<rect class="{kind}" x="{x:g}" y="{y}" {width}/>')
        if text:
            middle = f'x="{x + length / 2:g}" y="{y + 13.5:g}"'
            self.marks.append(f'<text class="in {kind}" {middle}>{escape(text)}</text>')

    def computes(
        self, at: float, length: float, kind: str = "step", text: str = "", rows: Iterable[int] = ()
    ) -> None:
        """A block on all workers' rows, or on these."""
        for row in rows or self.workers:
            self._box(kind, row, at, length, COMPUTES, text)

    def steps(self, at: float, count: int, each: float) -> float:
        """So many steps on all workers; returns when they end."""
        for k in range(count):
            self.computes(at + k * each, each)
        return at + count * each

    def sends(
        self, at: float, length: float, kind: str, text: str = "", rows: Iterable[int] = ()
    ) -> None:
        for row in rows or self.workers:
            self._box(kind, row, at, length, SENDS, text)

    def waits(self, at: float, length: float, kind: str) -> float:
        """All workers wait for a message; returns when it has arrived."""
        self.computes(at, length, "wait")
        self.sends(at, length, kind)
        return at + length

    def fold(self, at: float, text: str = "", line: int = 1) -> None:
        """When what arrived becomes part of the model: a line through all rows, and what is done,
        on this line of text above them."""
        x, y, end = LEFT + at, self.top - 4, self._y(len(self.workers)) + 6
        self.marks.append(f'<line class="fold" x1="{x:g}" y1="{y - 2}" x2="{x:g}" y2="{end}"/>')
        half = CHARACTER * len(text) / 2
        x = min(max(x, half), WIDTH - half)
        label = f'<text class="mid" x="{x:g}" y="{y - 22 * (line - 1) - 5}">{escape(text)}</text>'
        self.marks.append(label if text else "")

    def says(self, at: float, text: str) -> None:
        """Text above the rows, in the middle of which is ``at``."""
        x, y = LEFT + at, self.top - 9
        self.marks.append(f'<text class="mid" x="{x:g}" y="{y}">{escape(text)}</text>')

    def track(self, row: int, times: Iterable[float], text: str = "") -> None:
        """State that lives from one round to the next, and changes at these times."""
        y = self._y(row) + 12
        self.marks.append(f'<line class="track" x1="{LEFT}" y1="{y}" x2="{WIDTH - 8}" y2="{y}"/>')
        for at in times:
            self.marks.append(f'<circle class="knob" cx="{LEFT + at:g}" cy="{y}" r="6"/>')
        self.marks.append(f'<text x="{LEFT}" y="{y + 25}">{escape(text)}</text>')

    def arrow(self, source: int, target: int, at: float, length: float = 0) -> None:
        """A message from one worker to another."""
        down = 1 if target > source else -1
        y1, y2 = (self._y(row) + COMPUTES + 9 for row in (source, target))
        x = f'x1="{LEFT + at:g}" x2="{LEFT + at + length:g}"'
        self.marks.append(f'<line class="arrow" {x} y1="{y1 + 5 * down}" y2="{y2 - 5 * down}"/>')
        self.kinds.setdefault("arrow", "")

    def drawn(self, **legend: str) -> str:
        """The SVG; ``legend`` says what a kind of block means here, where it is special."""
        entries = {**self.kinds, **legend}
        x, y, found = 0.0, self.bottom + 24, []
        for kind, text in entries.items():
            width = 22 + CHARACTER * len(text) + 14
            if not text:
                continue
            if x + width - 14 > WIDTH:
                x, y = 0.0, y + 24
            if kind == "arrow":
                found.append(
                    f'<line class="arrow" x1="{x:g}" x2="{x + 15:g}" y1="{y - 6}" y2="{y - 6}"/>'
                )
            else:
                size = 'width="15" height="13" rx="2"'
                found.append(f'<rect class="{kind}" x="{x:g}" y="{y - 12}" {size}/>')
            found.append(f'<text x="{x + 22:g}" y="{y}">{escape(text)}</text>')
            x += width
        tip = TIP if "arrow" in entries else ""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" '
            f'width="{WIDTH}" height="{y + 8}">',
            f"<style>{STYLE}</style>{tip}",
            *filter(None, self.marks),
            *found,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def workers(n: int = 3) -> list[str]:
    return [f"worker {k}" for k in range(1, n + 1)]


def ddp() -> str:
    t = Timeline(*workers())
    for at in (0, 224):
        t.computes(at, 76, text="forward")
        t.computes(at + 76, 112, "back", "backward")
        t.computes(at + 188, 24, "wait")
        for bucket in range(3):
            t.sends(at + 110 + 34 * bucket, 34, "gradients")
        t.fold(at + 212, "" if at else "g ← mean(g)")
    return t.drawn(step="forward", back="backward", gradients="gradients travel, bucket by bucket")


def local_sgd() -> str:
    t = Timeline(*workers())
    at = 0.0
    for k in range(3):
        at = t.waits(t.steps(at, 4, 23), 52, "parameters")
        t.fold(at, "" if k else "x ← mean(x)")
    return t.drawn()


def local_sgd_delay() -> str:
    t = Timeline(*workers())
    t.steps(0, 19, 23)
    for k in range(1, 5):
        at = 23 * 4 * k
        t.sends(at, 46, "parameters")
        t.fold(at + 46, "x ← mean(y) + (x − y)" if k == 2 else "")
    return t.drawn(parameters="y travels: x as it was when it was sent")


def hierarchical() -> str:
    t = Timeline(*workers(4))
    at = 0.0
    for k in range(1, 7):
        at = t.steps(at, 2, 23)
        length = 10 if k % 3 else 62
        t.computes(at, length, "wait")
        kind = "fragments" if k % 3 else "parameters"
        t.sends(at, length, kind)
        at += length
        if k % 3 == 0:
            t.fold(at, "mean over all" if k == 3 else "")
    return t.drawn(
        fragments="parameters inside a group (1, 2 and 3, 4)", parameters="the same over all"
    )


def slowmo() -> str:
    t = Timeline(*workers(), "outer", top=2)
    at, slow = 0.0, []
    for k in range(1, 7):
        at = t.waits(t.steps(at, 3, 14), 30, "parameters")
        t.fold(at, {1: "x ← mean(x)", 2: "slow step: u, a; x ← a"}.get(k, ""), k)
        slow += [] if k % 2 else [at]
    t.track(3, slow, "u, a")
    return t.drawn()


def gossip() -> str:
    t = Timeline(*workers(4))
    at = 0.0
    for k in range(6):
        t.computes(at, 36)
        hop = 2 ** (k % 2)
        for row in range(4):
            t.arrow(row, (row + hop) % 4, at + 38, 32)
        t.says(at + 54, f"i to i+{hop}" if k < 2 else "")
        at += 74
    return t.drawn(arrow="lo·x and lo·w, folded on arrival: z ← x/w")


def easgd() -> str:
    t = Timeline(*workers(), "center")
    at, pulls = 0.0, []
    for k in range(3):
        at = t.waits(t.steps(at, 4, 23), 52, "parameters")
        t.fold(at, "" if k != 1 else "x a little toward a, a toward mean(x)")
        pulls.append(at)
    t.track(3, pulls, "a, on every worker")
    return t.drawn()


def lsgd() -> str:
    t = Timeline(*workers(4))
    at = 0.0
    for k in range(1, 7):
        at = t.steps(at, 2, 20)
        first, second = (0, 3) if k in (1, 4) else (1, 2)
        t.arrow(first, 1 - first, at + 12)
        t.arrow(second, 5 - second, at + 12)
        t.says(at + 12, "in groups" if k == 1 else "")
        if k == 3:
            for row, x in ((0, 36), (1, 26), (3, 26)):
                t.arrow(2, row, at + x)
            t.says(at + 26, "and over all")
        at += 48 if k == 3 else 30
    return t.drawn(arrow="the leader's x; the others go a little toward it")


def outer_rounds(state: str) -> Timeline:
    """Steps, rounds that all wait for, and outer state, which changes in them."""
    t = Timeline(*workers(), "outer")
    at, outer = 0.0, []
    for k in range(3):
        at = t.waits(t.steps(at, 8, 12), 50, "parameters")
        t.fold(at, "" if k else "outer step; x ← a")
        outer.append(at)
    t.track(3, outer, state)
    return t


def diloco() -> str:
    t = outer_rounds("a, m: one part on each worker")
    return t.drawn(parameters="the change since the last round, a − x, travels")


def streaming_diloco() -> str:
    each, period, count = 20, 8, 22
    t = Timeline(*workers())
    t.steps(0, count, each)
    for step in range(2, count, 2):
        k = (step // 2 - 1) % 4
        t.sends(step * each, each, "fragments", str(k + 1))
        t.fold((step + 1) * each, "x₁ ← half x₁, half a₁" if step == 2 + period else "")
    return t.drawn(fragments="a fragment of a − x travels, in codes of 4 bits")


def power_sgd() -> str:
    t = Timeline(*workers())
    for k in range(2):
        at = 226 * k
        t.computes(at, 70, text="forward")
        t.computes(at + 70, 110, "back", "backward")
        t.computes(at + 180, 36, "wait")
        t.sends(at - 10 * bool(k), 112 + 10 * bool(k), "kept", "e")
        for bucket in range(2):
            for half, name in enumerate("PQ"):
                t.sends(at + 112 + 52 * bucket + 26 * half, 26, "gradients", name)
        t.fold(at + 216, "g ← mean(P) mean(Q)ᵀ" if not k else "")
    return t.drawn(
        step="forward",
        back="backward",
        gradients="factors of rank r travel",
        kept="e: what they leave out, kept",
    )


def auto() -> str:
    t = Timeline(*workers(), top=2)
    at = t.steps(0, 4, 10)
    for k in range(4):
        t.sends(10 * k + 4, 7, "gradients")
    for line, review in ((1, False), (2, True)):
        t.computes(at, 30, "wait")
        t.sends(at, 30, "messages")
        at += 30
        t.fold(at, "measure again, choose" if review else "measure, choose", line)
        if review:
            break
        t.steps(at, 18, 10)
        for k in range(1, 18, 2):
            if k != 9:
                t.sends(at + 10 * k, 10, "fragments")
        t.sends(at + 90, 10, "messages")
        at += 180
    t.steps(at, 9, 10)
    for k in range(9):
        t.sends(at + 10 * k + 4, 7, "gradients")
    return t.drawn(
        gradients="gradients", fragments="fragments", messages="measurements, comparisons"
    )


PICTURES: tuple[Callable[[], str], ...] = (
    ddp,
    local_sgd,
    local_sgd_delay,
    hierarchical,
    slowmo,
    gossip,
    easgd,
    lsgd,
    diloco,
    streaming_diloco,
    power_sgd,
    auto,
)


def main() -> None:
    for picture in PICTURES:
        path = HERE / f"{picture.__name__}.svg"
        path.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
