"""Draw the course's diagrams, as SVG beside its pages: python -m tutorial.pictures

Colors and sizes are those of docs/pictures.py: text follows the page's theme, a diagram has no
background, and 520 pixels of width stay readable on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from docs.pictures import STYLE, TIP, WIDTH, Timeline

PAGES = Path(__file__).parents[1] / "docs" / "tutorial"
OWN = (
    "text.small,text.in{font-size:15px}rect.frame{fill:none;stroke:#8a9099;stroke-width:1.5}"
    ".path{fill:none;stroke-width:2.5}.dashed{stroke:#8a9099;stroke-width:1.5;stroke-dasharray:4 4}"
    ".dot{fill:#c2417e}"
)
WORKERS = ("#1b998b", "#c76a08", "#8f63cf")


class Drawing:
    """Shapes by their position in pixels, from the top left corner."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.marks: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "mid") -> None:
        """Centered at ``x``, or beginning there if ``kind`` is not "mid"; ``y``: its baseline."""
        self.marks.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def box(self, kind: str, x: float, y: float, w: float, h: float, *lines: str) -> None:
        """A filled rectangle with lines of text in its middle."""
        size = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"'
        self.marks.append(f'<rect class="{kind}" {size}/>')
        first = y + h / 2 + 5.5 - 8.5 * (len(lines) - 1)
        for row, line in enumerate(lines):
            self.text(x + w / 2, first + 17 * row, line, f"in {kind}")

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6"'
        self.marks.append(f'<rect class="frame" {size}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kind: str = "arrow") -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.marks.append(f'<line class="{kind}" {ends}/>')

    def drawn(self) -> str:
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}">',
            f"<style>{STYLE}{OWN}</style>{TIP}",
            *self.marks,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def step() -> str:
    """Chapter 1: batch, forward pass, backward pass, optimizer."""
    d = Drawing(190)
    d.box("parameters", 0, 34, 100, 46, "batch:", "8 samples")
    d.box("step", 190, 34, 130, 46, "network:", "parameters x")
    d.box("messages", 430, 34, 90, 46, "loss")
    d.box("gradients", 184, 130, 142, 46, "gradients g", "one per parameter")
    d.arrow(104, 57, 186, 57)
    d.arrow(324, 57, 426, 57)
    d.text(375, 46, "forward", "mid small")
    d.arrow(475, 84, 330, 150)
    d.text(456, 140, "backward", "mid small")
    d.arrow(255, 126, 255, 84)
    d.text(150, 109, "optimizer: x ← x − lr·g", "mid small")
    return d.drawn()


def split() -> str:
    """Chapter 2: the batch is split, or the network is."""
    d = Drawing(250)
    for left, name in ((0, "data parallelism"), (280, "model parallelism")):
        d.text(left + 120, 18, name)
        for k in range(2):
            d.frame(left + 130 * k + 1, 72, 108, 142)
            d.text(left + 130 * k + 55, 236, f"processor {k + 1}", "mid small")
    for k in range(2):
        d.box("parameters", 130 * k + 1, 32, 108, 24, f"half {k + 1} of batch")
        d.arrow(130 * k + 55, 58, 130 * k + 55, 82)
        for layer in range(4):
            d.box("step", 130 * k + 10, 86 + 30 * layer, 90, 24, f"layer {layer + 1}")
    d.arrow(104, 146, 134, 146)
    d.arrow(136, 158, 106, 158)
    d.text(120, 138, "g", "mid small")
    d.box("parameters", 281, 32, 108, 24, "whole batch")
    d.arrow(335, 58, 335, 82)
    for layer in range(4):
        x, y = 290 + 130 * (layer // 2), 86 + 60 * (layer % 2)
        d.box("step", x, y, 90, 54, f"layer {layer + 1}")
    d.arrow(382, 168, 417, 112)
    return d.drawn()


def data_parallel() -> str:
    """Chapter 3: copies of one network, and one all-reduce."""
    d = Drawing(318)
    for k in range(3):
        x = 176 * k
        d.text(x + 83, 16, f"rank {k}")
        d.box("parameters", x + 1, 26, 164, 28, f"share {k + 1} of the batch")
        d.arrow(x + 83, 56, x + 83, 74)
        d.box("step", x + 1, 78, 164, 42, "the same network", "forward and backward")
        d.arrow(x + 83, 122, x + 83, 140)
        d.box("gradients", x + 1, 144, 164, 28, f"its own gradient g{'₁₂₃'[k]}")
        d.arrow(x + 83, 174, x + 83, 198)
        d.arrow(x + 83, 236, x + 83, 260)
        d.box("step", x + 1, 264, 164, 42, "the same step", "x ← x − lr·g")
    d.box("messages", 1, 202, 516, 32, "all-reduce: every rank gets the mean g of all gradients")
    return d.drawn()


def all_reduce() -> str:
    """Chapter 4: four ranks, four chunks each; reduce-scatter, then all-gather."""
    d = Drawing(214)
    side, n = 32, 4
    for number, title in enumerate(("before", "reduce-scatter", "all-gather")):
        left = 24 + 172 * number
        d.text(left + 2 * side, 18, title)
        for rank in range(n):
            y = 30 + (side + 6) * rank
            if number == 0:
                d.text(0, y + 21, str(rank), "small")
            for chunk in range(n):
                # After reduce-scatter, rank i has the sum of chunk i + 1, as in a ring.
                done = number == 2 or (number == 1 and chunk == (rank + 1) % n)
                kind, label = ("gradients", "Σ") if done else ("kept", "")
                label += "abcd"[chunk] + ("" if done else str(rank))
                d.box(kind, left + side * chunk, y, side - 3, side - 3, label)
        if number:
            d.arrow(left - 38, 106, left - 8, 106)
    d.text(0, 204, "Rows are ranks, letters are chunks. Σa = a0 + a1 + a2 + a3.", "small")
    return d.drawn()


def buckets() -> str:
    """Chapter 4: tensors in the order in which gradients become complete, cut into buckets."""
    d = Drawing(186)
    each = 64
    for k in range(8):
        d.box("step", k * each + 5, 30, each - 8, 30, f"layer {k + 1}")
    d.text(0, 16, "forward pass →", "small")
    d.text(396, 16, "← backward pass", "small")
    for number, (first, count) in enumerate(((5, 3), (2, 3), (0, 2))):
        x, w = first * each + 5, count * each - 8
        d.frame(x - 3, 26, w + 6, 38)
        d.arrow(x + w / 2, 68, x + w / 2, 92)
        d.box("gradients", x, 96, w, 34, f"bucket {number + 1}")
    d.text(0, 156, "The last layers' gradients are complete first, so their bucket leaves", "small")
    d.text(0, 175, "first. The bucket of layers 1 and 2 leaves when backward is over.", "small")
    return d.drawn()


def overlap() -> str:
    """Chapter 4: the same backward pass, and four ways to send what it computes."""
    t = Timeline("one each", "flat", "buckets", "overlap")
    t.says(76, "backward pass")
    for row in range(4):
        t.computes(0, 150, "back", rows=[row])
    at = 150
    for _ in range(8):  # a latency for each tensor
        t.sends(at, 24, "gradients", rows=[0])
        at += 36
    t.sends(150, 170, "gradients", rows=[1])
    for k in range(3):
        t.sends(150 + 66 * k, 60, "gradients", str(k + 1), rows=[2])
        t.sends((54, 114, 174)[k], 60, "gradients", str(k + 1), rows=[3])
    for row, end in enumerate((at - 12, 320, 342, 234)):
        t.computes(150, end - 150, "wait", rows=[row])
    return t.drawn(back="backward", gradients="gradients travel", wait="waiting")


def ranks() -> str:
    """Chapter 5: two machines, two processes each."""
    d = Drawing(196)
    for node in range(2):
        x = 268 * node
        d.frame(x + 2, 24, 248, 118)
        d.text(x + 126, 16, f"node {node}")
        for local in range(2):
            lines = f"rank {2 * node + local}", f"local rank {local}", f"GPU {local}"
            d.box("step", x + 16 + 114 * local, 38, 106, 66, *lines)
        d.text(x + 126, 130, "a launcher starts both", "mid small")
    d.box("messages", 20, 158, 480, 30, "all meet at MASTER_ADDR:MASTER_PORT, where rank 0 listens")
    for x in (126, 394):
        d.arrow(x, 144, x, 155)
    return d.drawn()


def averaging() -> str:
    """Chapter 6: workers part from one point, and their mean is the next one."""
    d = Drawing(216)
    rounds: Sequence[Sequence[Sequence[int]]] = (
        ((-26, -38, -66), (6, -4, 10), (28, 40, 56)),
        ((-20, -42, -54), (-6, 8, 2), (24, 48, 52)),
    )
    x, y, each = 12.0, 104.0, 56
    for ways in rounds:
        for color, way in zip(WORKERS, ways, strict=True):
            points = [(x, y), *((x + each * k, y + up) for k, up in enumerate(way, 1))]
            line = " ".join(f"{px:g},{py:g}" for px, py in points)
            d.marks.append(f'<polyline class="path" stroke="{color}" points="{line}"/>')
            d.marks += [
                f'<circle cx="{px:g}" cy="{py:g}" r="4" fill="{color}"/>' for px, py in points
            ]
        end = x + 4 * each, y + sum(way[-1] for way in ways) / len(ways)
        for way in ways:
            d.arrow(x + 3 * each, y + way[-1], *end, kind="dashed")
        d.marks.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="7"/>')
        x, y = end
    d.marks.append(f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="7"/>')
    d.text(0, 16, "One parameter of three workers, step by step →", "small")
    d.text(0, 188, "Each worker takes three steps on its own samples. At a large dot all", "small")
    d.text(0, 207, "workers send their parameters, and go on from the mean.", "small")
    return d.drawn()


PICTURES: tuple[Callable[[], str], ...] = (
    step,
    split,
    data_parallel,
    all_reduce,
    buckets,
    overlap,
    ranks,
    averaging,
)


def main() -> None:
    for picture in PICTURES:
        path = PAGES / f"{picture.__name__}.svg"
        path.write_text(picture(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
