"""Draw the picture of docs/nanogpt.md from its table: ``python -m benchmarks.nanogpt_picture``."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from benchmarks.study import DOCS

PAGE, PICTURE = DOCS / "nanogpt.md", DOCS / "nanogpt.svg"
LOSS, SENT = "loss", "kB per iteration"
SECONDS = 20, 40_000
"""The range of all networks, so that they can be compared."""
COLORS = {
    "none": "#8a9099",
    "slow momentum": "#5e35b1",
    "Nesterov": "#c76a08",
    "Muon": "#00796b",
    "Muon, own": "#1e88e5",
}
"""Of the outer steps."""
MARKERS = {
    "ddp()": "o",
    "ddp(codec='int4')": "s",
    "local_sgd": "^",
    "streaming_diloco": "D",
    "": "x",
}
NAMES = {"ddp()": "ddp", "ddp(codec='int4')": "ddp, int4", "": "other libraries"}
SETTINGS = {"svg.hashsalt": "laconic", "svg.fonttype": "none", "font.size": 10}
"""Of matplotlib; the salt makes equal pictures equal files."""


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of the first table of a page, by the heads of its columns."""
    lines = [line for line in text.split("\n\n|")[1].split("\n\n")[0].splitlines() if line]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def picture(rows: Sequence[dict[str, str]]) -> Figure:
    """Plot the loss of each row against its bytes, and against its seconds on each network."""
    rates = [head for head in rows[0] if head.startswith("s at")]
    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    sharing = figure.subplots(1, 1 + len(rates), sharey=True)
    for axes, head in zip(sharing, (SENT, *rates), strict=True):
        for row in rows:
            base = next(name for name in MARKERS if name in row["recipe"])
            axes.plot(
                float(row[head].replace(",", "")),
                float(row[LOSS]),
                MARKERS[base],
                color=COLORS[row["outer step"]],
                label=f"{NAMES.get(base, base)}, {row['outer step']}",
            )
        axes.set_xscale("log", subs=[])
        if head in rates:
            axes.set_xlim(SECONDS)
        axes.set_title(head, loc="left", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.7)
        axes.spines[:].set_visible(False)
    sharing[0].set_ylabel("validation loss (nats)")
    handles, names = sharing[0].get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    with matplotlib.rc_context(SETTINGS):
        found = picture(rows_of(PAGE.read_text(encoding="utf-8")))
        found.savefig(PICTURE, metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
