"""An error on one rank is an error on all ranks, in the same words.

A rank that raises alone leaves the others waiting for it. So before ranks go on together, each says
whether it has a problem; if any has, all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.errors import error_text
from laconic.links.texts import Gather, clean, exchange_texts

MOST_CHARACTERS = 4000
"""Of a problem's text, as other ranks show it."""


def agree(gather: Gather, problem: str | None, flags: Tensor | None = None) -> None:
    """Raise ``ValueError`` on every rank if any rank has a ``problem``. All ranks must call it.

    A rank with a problem of its own raises that text; the others raise the texts of all ranks that
    have one, as "rank 2: ...". ``gather``: a link's. ``flags``: by rank, whether it has a problem,
    where the ranks have gathered this along with something else; None: one small gather. The texts
    are exchanged only where there is a problem.
    """
    if flags is None:
        flags = gather(torch.tensor([float(problem is not None)]))
    flagged = [bool(flag) for flag in flags.flatten().tolist()]
    if not any(flagged):
        return
    texts = [""] * len(flagged)
    if not all(flagged):  # else no rank needs another one's text
        own = clean(problem or "")[:MOST_CHARACTERS]
        texts = [clean(text)[:MOST_CHARACTERS] for text in exchange_texts(gather, own)]
    others = {rank: text for rank, text in enumerate(texts) if flagged[rank]}
    raise ValueError(problem if problem is not None else in_words(others))


@contextmanager
def on_all_ranks(gather: Gather) -> Iterator[None]:
    """A context for what may fail on one rank. What is raised inside, all ranks raise as a
    ``ValueError``."""
    try:
        yield
    except Exception as error:  # the other ranks would wait for this one
        agree(gather, error_text(error))
        raise
    agree(gather, None)


def in_words(problems: Mapping[int, str]) -> str:
    """The ``problems``, by rank, each once, with the ranks that have it; as many as fit."""
    ranks: dict[str, list[int]] = {}
    for rank, text in problems.items():
        ranks.setdefault(text, []).append(rank)
    parts = [f"{rank_list(who)}: {text}" for text, who in ranks.items()]
    return "; ".join(parts)[: 2 * MOST_CHARACTERS]


def rank_list(ranks: Sequence[int]) -> str:
    """``ranks`` as text, such as ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
