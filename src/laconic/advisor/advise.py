"""`laconic.advise`: measure and predict on the user's own machines, with the user's own step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.advisor.advice import advice_on
from laconic.advisor.bench import Bench
from laconic.advisor.choices import PLAIN, rehearsed
from laconic.advisor.measure import measure, trained
from laconic.advisor.show import Advice
from laconic.algorithms.round import Recipe, describe
from laconic.engine.attached import check_free
from laconic.engine.model_checks import check_unwrapped
from laconic.errors import TIMEOUT, check_int
from laconic.links.agreement import on_all_ranks
from laconic.links.link import Link
from laconic.links.rank_sets import agreed_link, layout_of, refused_by_all, sets_of
from laconic.tensors import is_sharded


def advise(
    model: nn.Module,
    step_fn: Callable[[], object],
    *,
    optimizer: Optimizer | None = None,
    recipes: Sequence[str] = (),
    nprocs_per_node: int | Literal["env"] = 1,
    steps: int = 20,
    link: Link | None = None,
    timeout: float = TIMEOUT,
) -> Advice:
    """Measure ``step_fn`` and the network, and recommend a recipe.

    Call it on every rank, under torchrun, after `laconic.init` and before `laconic.attach`. It
    trains the model of each rank separately.

    Args:
        model: the module that ``step_fn`` trains.
        step_fn: runs one local step (forward, backward, optimizer). It is called about three times
            ``steps`` times, at least 27.
        optimizer: supplies the parameters and state that count. None: all trainable parameters.
        recipes: further recipes to predict, as text.
        nprocs_per_node: how many ranks are one worker; ``"env"``: torchrun's LOCAL_WORLD_SIZE.
        steps: steps of each measurement, at least 2.
        link: a `Link` to use in place of torch's process group. None: that group.
        timeout: seconds after which a rank that does not answer is an error on all others.

    Seconds and bytes in the result are per step. All ranks get the same result.

    Raises ``ValueError`` on every rank if there is only one worker, if an argument is wrong, or if
    ``step_fn`` or a timed round raised on one of them (out of memory, for example). Raises
    `laconic.LinkError` if a rank is lost. The process groups that it creates are closed at the end.

    Examples:
        >>> def worker(rank):  # the program of each rank under torchrun; here simulated
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def step():
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         optimizer.step()
        ...     return laconic.advise(model, step, optimizer=optimizer, steps=4)
        >>> advice, _ = laconic.simulate(worker, workers=2)
        >>> advice.code.startswith("sync = laconic.attach(model, optimizer, laconic.")
        True
    """
    with refused_by_all(link, timeout):
        check_int("steps", steps, 2)
        check_unwrapped(model)
        params = trained(model, optimizer)
        _check(step_fn, params, optimizer)
        rehearsed(PLAIN.workers, recipes)  # raises for text that is not a recipe
    device = params[0].device
    with ExitStack() as stack:
        world = agreed_link(link, device, timeout)
        if link is None:
            stack.callback(world.close)
        layout = layout_of(world, nprocs_per_node, None, [])
        at = world, layout, None, False, device
        sets = sets_of(*at, timeout if link is None else None)
        for other in (sets["workers"], sets["replica"]):
            if other is not world:
                stack.callback(other.close)
        if sets["workers"].size < 2:
            raise ValueError(
                f"there is only one worker, of {world.size} rank(s): start more (torchrun), or use "
                "laconic advise with numbers"
            )
        bench = Bench(world, sets["workers"], sets["replica"], device)
        with on_all_ranks(world.gather):
            compared = rehearsed(sets["workers"].size, recipes)
        _check_same(bench, params, compared, steps)
        with bench.shared_errors():
            facts, computes = measure(bench, model, step_fn, compared, steps, optimizer)
    return advice_on(facts, recipes, computes=computes)


def _check(
    step_fn: Callable[[], object], params: Sequence[Tensor], optimizer: Optimizer | None
) -> None:
    if not callable(step_fn):
        raise ValueError(f"step_fn must be a function that runs one local step, not {step_fn!r}")
    if optimizer is not None:
        check_free(optimizer)
    if any(is_sharded(p) for p in params):
        raise ValueError(
            "the parameters are sharded (FSDP), which uses the network itself: measure a whole "
            "model, or use laconic advise with numbers"
        )


def _check_same(
    bench: Bench, params: Sequence[Tensor], recipes: Sequence[Recipe], steps: int
) -> None:
    """Check that all ranks measure the same things. Otherwise they would block each other."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in params]
    text = f"{steps} {shapes} {[describe(recipe) for recipe in recipes]}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    digests = bench.gather(float(digest))
    if bool((digests != digests[0]).any()):
        raise ValueError(
            "the ranks' arguments differ: model, optimizer, steps and recipes must be equal"
        )
