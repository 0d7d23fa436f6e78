"""Draw the picture of README and the docs' home page from the race's journal.

    python -m benchmarks.race.headline

On 100 and 10 Mbit/s it shows ``auto()`` beside the two best rows of other libraries, torch's
DistributedDataParallel where it has run, and training without communication. It writes one picture
for light pages and one for dark ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

from benchmarks.race.networks import Network
from benchmarks.race.page import Line, networks
from benchmarks.race.rows import NONE
from benchmarks.race.runs import Entry, journal
from benchmarks.study import DOCS
from laconic.lab.emulation.seeds import groups
from laconic.lab.race.result import SECONDS, Result, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, DDP = "auto()", "torch-ddp"
PEERS = 2
"""How many rows of other libraries are shown beside DDP."""
WIDTH = 2.2
RATES = 1e8, 1e7
NAMES = {
    OURS: "laconic auto()",
    DDP: "torch DDP",
    NONE: "no communication",
    "torch-ddp('fp16')": "torch DDP, fp16",
    "torch-postlocal(period=24)": "torch post-local SGD",
    "accelerate(24)": "Accelerate local SGD",
    "fairscale(24, 0.2)": "fairscale SlowMo",
    "torchft(24, outer=True, momentum=0.5)": "torchft DiLoCo",
    "torchft(24, outer=True, momentum=0.5, bucketed=True, fragments=2, delay=4, alpha=0.5)": (
        "torchft streaming DiLoCo, period 24"
    ),
    "torchft(48, outer=True, momentum=0.5, bucketed=True, fragments=2, delay=18, alpha=0.5)": (
        "torchft streaming DiLoCo, period 48"
    ),
}
"""What the picture calls a row."""
THEMES = {
    "light": {
        "ours": "#00796b",
        "peers": ("#d55e00", "#0072b2"),
        DDP: "#a3478a",
        "text": "#33373d",
    },
    "dark": {"ours": "#4db6ac", "peers": ("#ff9d5c", "#6cb8ee"), DDP: "#e29ccb", "text": "#d5d8de"},
}
GRAY = "#8a9099"
SETTINGS = {"svg.hashsalt": "laconic", "font.size": 11}
"""Of matplotlib; the salt makes equal pictures equal files."""


def shown(lines: Sequence[Line]) -> list[Line]:
    """Return the rows to draw: without communication, other libraries from the best on, ours."""
    by_text = {one.text: one for one in lines}
    peers = sorted((one for one in lines if one.peer and one.text != DDP), key=lambda one: one.loss)
    last = [by_text[text] for text in (DDP, OURS) if text in by_text]
    return [*(one for one in lines if one.text == NONE), *peers[:PEERS], *last]


def picture(entries: Sequence[Entry], theme: str) -> Figure:
    """Plot the mean loss over the seeds against seconds of training, with a panel per network."""
    from matplotlib.figure import Figure

    found = networks(entries)
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, len(RATES), sharey=True)
    for axes, rate in zip(panels, RATES, strict=True):
        _panel(axes, shown(found[Network(rate)]), theme)
        title = f"{rate / 1e6:g} Mbit/s per host"
        axes.set_title(title, loc="left", fontweight="bold", color=THEMES[theme]["text"])
    panels[0].set_ylabel("validation loss (nats)")
    panels[0].set_ylim(1.4, 3.0)
    return figure


def _panel(axes: Axes, lines: Sequence[Line], theme: str) -> None:
    colors = THEMES[theme]
    peers = iter(colors["peers"])
    fixed = {OURS: colors["ours"], DDP: colors[DDP], NONE: GRAY}
    seconds = lines[0].entries[0].result.settings["seconds"]
    for one in lines:
        color = fixed[one.text] if one.text in fixed else next(peers)
        runs = tuple(entry.run for entry in one.entries)
        (group,) = groups(Result(runs, {"seconds": seconds}, {}, {}, ""))
        pairs = line(group.mean, SECONDS)
        seeds = len(one.seeds)
        name = f"{NAMES.get(one.text, one.text)}: {one.loss:.2f}, {seeds} seed{'s' * (seeds > 1)}"
        axes.plot(
            [at for at, _ in pairs],
            [loss for _, loss in pairs],
            color=color,
            linestyle=":" if one.text == NONE else "-" if one.text == OURS else "--",
            linewidth=1.5 * WIDTH if one.text == OURS else 0.8 * WIDTH,
            label=name,
        )
    axes.legend(frameon=False, labelcolor="linecolor", fontsize=10.5, reverse=True)
    axes.set_xlim(0, float(str(seconds)))
    axes.set_xlabel("seconds of training")
    axes.grid(color=GRAY, alpha=0.25, linewidth=0.7)
    axes.patch.set_alpha(0)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=colors["text"], length=0)
    for text in (axes.xaxis.label, axes.yaxis.label):
        text.set_color(colors["text"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.race.headline", description=__doc__)
    parser.add_argument("--journal", type=Path, default=DOCS / "race.jsonl")
    entries = journal(parser.parse_args().journal).load()
    for theme in THEMES:
        path = DOCS / f"headline_{theme}.svg"
        with matplotlib.rc_context(SETTINGS):
            picture(entries, theme).savefig(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
