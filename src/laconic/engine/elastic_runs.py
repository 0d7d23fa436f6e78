"""What `laconic.attach` does for a run whose workers come and go."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.auto import Auto
from laconic.algorithms.round import Recipe, describe, recipe_text
from laconic.elastic import COORDINATOR_VARIABLE, Elastic
from laconic.engine.donor import Donor, plain_copy
from laconic.engine.driver import Driver
from laconic.engine.newcomers import Newcomer
from laconic.engine.reports import Reports
from laconic.engine.saved_state import Stateful
from laconic.links import Link
from laconic.links.elastic.faults import Recording, Trace
from laconic.links.elastic.leases import Need
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.simulated import SimulatedElasticLink, current_part
from laconic.links.elastic.start import start
from laconic.links.simulated import current_link
from laconic.sampler import ElasticSampler
from laconic.tensors import is_sharded
from laconic.version import __version__


@dataclass(frozen=True)
class Joined:
    """A worker that has found the others. ``others``: the user's objects that a newcomer needs the
    state of, by name."""

    link: ElasticLink
    reports: Reports
    others: Mapping[str, Stateful]

    @property
    def number(self) -> int | None:
        """Of a newcomer's metrics file; None: the rank."""
        return self.link.members.number - 1 if self.link.replaying else None

    def take_part(self, driver: Driver) -> None:
        """Take part in the rounds of ``driver``: at once, or as a newcomer from its first step on.
        A newcomer has loaded another worker's state when this returns."""
        try:
            donor = Donor(driver, self.link, self.reports, self.others)
            if self.link.replaying:
                Newcomer(driver, self.link, self.others, donor.open).begin()
            else:
                donor.open()
        except BaseException:
            driver.detach()
            raise


def asked_for(
    elastic: Elastic | None, link: Link | str | None, nprocs: object, group: object, mesh: object
) -> Elastic | None:
    """The argument ``elastic`` of `laconic.attach`, or what the environment asks for. Raises
    ``ValueError`` for other arguments that exclude it."""
    own = link is not None and not isinstance(link, str)
    if current_part.get() is not None and not own:
        elastic = elastic or Elastic()  # a simulated run with faults
    if elastic is None:
        if own or current_link.get() is not None or not os.environ.get(COORDINATOR_VARIABLE):
            return None
        elastic = Elastic()
    if not isinstance(elastic, Elastic):
        raise ValueError(f"elastic must be a laconic.Elastic, not {elastic!r}")
    given = {"link": link, "group_size": group, "mesh": mesh}
    named = [name for name, value in given.items() if value is not None]
    if nprocs not in (1, "env"):
        named.append("nprocs_per_node")
    if named:
        raise ValueError(
            f"{' and '.join(named)} cannot be used with elastic= or {COORDINATOR_VARIABLE}: there "
            "each process is a worker that comes and goes on its own, and connects to all others"
        )
    return elastic


def check(elastic: Elastic, recipe: Recipe | Auto, params: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` for a recipe that a trace cannot repeat, parameters that an elastic run
    cannot average, and objects that have no state to send."""
    part = current_part.get()
    if isinstance(recipe, Auto) and part is not None and isinstance(part[0].plan, Trace):
        raise ValueError(
            "a trace cannot repeat auto(), which chooses by the time that steps take: attach one "
            "of its choices, which sync.choices lists"
        )
    if any(is_sharded(p) for p in params):
        raise ValueError(
            "the parameters are sharded (FSDP), and elastic= is for workers of one rank: if a "
            "worker loses a rank, all of it is lost"
        )
    for name, value in (elastic.others or {}).items():
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise ValueError(
                f"others: {name!r} must have state_dict() and load_state_dict(), as a scheduler "
                f"has, not be {value!r}"
            )
        _check_state(name, value.state_dict())


def _check_state(name: str, state: Any) -> None:
    """Raise ``ValueError`` for a ``state`` that cannot be sent to another worker."""
    try:
        data = io.BytesIO()
        torch.save(plain_copy(state), data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except (AttributeError, RuntimeError, TypeError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"others[{name!r}].state_dict() has something that cannot be sent to another worker: "
            f"it may have numbers, strings, tensors, and lists and dicts of these ({reason})"
        ) from None


def join(
    elastic: Elastic,
    recipe: Recipe | Auto,
    rounds: Recipe,
    params: Sequence[Tensor],
    buffers: str,
    seed: int,
    timeout: float,
) -> Joined:
    """Find the other workers, which must run the same ``recipe``, of these ``rounds``, on the same
    parameters."""
    others = dict(elastic.others or {})
    samplers = {k: s for k, s in others.items() if isinstance(s, ElasticSampler)}
    reports = Reports(samplers)
    rest = {k: each for k, each in others.items() if k not in samplers}
    part = current_part.get()
    if part is not None:
        return Joined(SimulatedElasticLink(*part, reports), reports, rest)
    text, definition = recipe_text(rounds), describe(rounds)
    if isinstance(recipe, Auto):
        text = definition = recipe.text
    shapes = repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params])
    about = {
        "version of laconic": __version__,
        "recipe": text,
        "settings": f"buffers={buffers!r}, seed={seed}",
        "definition of the recipe": hashlib.sha256(definition.encode()).hexdigest()[:16],
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "list of others": ", ".join(sorted(others)) or "none",
        **{f"sampler ({name})": sampler.about() for name, sampler in sorted(samplers.items())},
    }
    need = Need(elastic.workers or elastic.min_workers or 2, elastic.workers, elastic.min_workers)
    within = elastic.wait, timeout
    trace = elastic.trace_directory()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)

    def record(id: str) -> Callable[[dict[str, Any]], None]:
        return (lambda event: None) if trace is None else Recording(trace / f"{id}.jsonl").add

    return Joined(
        start(elastic.address(), elastic.job, about, need, *within, reports, record), reports, rest
    )
