"""The picture of README and the home page: which rows it shows, and that it is the script's."""

from __future__ import annotations

import io

import matplotlib
import pytest
from benchmarks.race import headline, journal
from benchmarks.race.networks import Network
from benchmarks.race.page import networks
from benchmarks.race.rows import NONE

ENTRIES = journal.load(headline.DOCS / "race.jsonl")


@pytest.mark.parametrize("rate", headline.RATES)
def test_ours_is_shown_beside_the_best_of_the_others(rate: float) -> None:
    lines = networks(ENTRIES)[Network(rate)]
    first, *between, last = [one.text for one in headline.shown(lines)]
    assert (first, last) == (NONE, headline.OURS)
    peers = {one.text: one.loss for one in lines if one.peer}
    others = [text for text in between if text != headline.DDP]
    assert len(others) == headline.PEERS
    left_out = peers.keys() - {*between}
    assert max(peers[text] for text in others) <= min((peers[t] for t in left_out), default=9.0)
    assert (headline.DDP in between) == (headline.DDP in peers)
    assert headline.NAMES.keys() >= {first, *between, last}, "a long text leaves no room to draw"


@pytest.mark.parametrize("theme", headline.THEMES)
def test_the_picture_is_the_one_that_the_script_draws(theme: str) -> None:
    drawn = io.BytesIO()
    with matplotlib.rc_context(headline.SETTINGS):
        headline.picture(ENTRIES, theme).savefig(drawn, format="svg", metadata={"Date": None})
    committed = (headline.DOCS / f"headline_{theme}.svg").read_bytes()
    assert drawn.getvalue() == committed, "python -m benchmarks.race.headline"
