"""The recipes in which a center or a leader attracts workers; see laconic.algorithms.recipes."""

from __future__ import annotations

from laconic.algorithms.exchanges import Leader
from laconic.algorithms.named import named
from laconic.algorithms.recipe_parts import CodecOption, check_effect, mean_over_workers
from laconic.algorithms.round import Recipe, Round
from laconic.algorithms.schedules import every
from laconic.algorithms.updates import Elastic, LeaderPull
from laconic.errors import check_float, check_int


@named
def easgd(
    period: int, beta: float = 0.9, *, pull: float = 0.0, codec: CodecOption = None
) -> Recipe:
    """Elastic averaging: every ``period`` steps, workers and a center attract each other.

    Zhang et al., NeurIPS 2015, arXiv 1412.6651 (period 1 to 64); see `Elastic`. With Nesterov
    momentum in the local optimizer this is EAMSGD, section 2.3 of the paper.

    Args:
        period: steps between two rounds, at least 1.
        beta: the fraction of the distance to the workers' mean that the center moves in a round, in
            (0, 1]. Each worker moves beta/n of its distance to the center.
        pull: the fraction of the distance to the center that x moves over one period, in equal
            parts at every step, in [0, 1).
        codec: how the changes in x since the last round are coded: a name such as ``"int8"`` or
            ``"int4"``, or a codec of `laconic.codecs`. None: not coded.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.easgd(16))
    """
    when = every(period)
    check_float("beta", beta, 0.0, strict=True, most=1.0)
    check_float("pull", pull, 0.0, 1.0)
    return (Round(when, Elastic(beta, pull / period), mean_over_workers(codec)),)


@named
def lsgd(
    period: int,
    *,
    local_period: int | None = None,
    pull: float = 0.1,
    local_pull: float = 0.1,
    drift: float = 0.1,
    local_drift: float = 0.1,
    window: int = 10,
) -> Recipe:
    """Leader SGD: every ``period`` steps, move toward the best of all workers.

    Teng et al., NeurIPS 2019, arXiv 1905.10395 (period 4 to 64); see `LeaderPull`. The best worker
    has the lowest mean over its last ``window`` losses passed to `Synchronizer.report_loss`.

    Args:
        period: steps between two rounds, at least 1.
        local_period: steps between two moves toward the best worker of the own group (the paper's
            local leaders), at least 1. ``attach(..., group_size=)`` sets the size of a group. None
            or 0: there are no groups.
        pull: the fraction of the distance to the best of all workers that x moves in a round, in
            [0, 1): the paper's c2.
        local_pull: the same in a round inside a group: c1.
        drift: the fraction of the distance to the last known best of all that x moves over one
            period, in equal parts at every step, in [0, 1): p2.
        local_drift: the same inside a group: p1.
        window: how many losses count, at least 1.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.lsgd(16))
        >>> sync.report_loss(0.5)  # this step's training loss, in every step
    """
    over_all = every(period)
    pulls = {"pull": pull, "local_pull": local_pull, "drift": drift, "local_drift": local_drift}
    for name, value in pulls.items():
        check_float(name, value, 0.0, 1.0)
    exchange = Leader(check_int("window", window, 1))
    everyone = Round(over_all, LeaderPull(pull, drift / period), exchange)
    inner = 0 if local_period is None else check_int("local_period", local_period, 0)
    if not inner:
        names = "local_pull", "local_drift"
        check_effect("without local_period=", **{name: pulls[name] != 0.1 for name in names})
        return (everyone,)
    local = LeaderPull(local_pull, local_drift / inner)
    return (Round(every(inner), local, exchange, over="group"), everyone)
