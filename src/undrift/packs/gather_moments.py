"""Gather the moments of a domain's images, by which a router knows its pack."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from undrift.packs.evidence import FACT, DomainMoments, Gathering
from undrift.packs.moments import watching
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed

KEPT_STATISTICS = "kept_statistics"
"""The fact that a pack with batch statistics holds those of its whole domain, too."""


def set_facts(model: Perturbed, **facts: object) -> None:
    """Replace the facts of a model's pack by these; keep those about moments and statistics."""
    kept = {name: model.facts[name] for name in (FACT, KEPT_STATISTICS) if name in model.facts}
    model.facts = {**facts, **kept}


def has_moments(model: Perturbed) -> bool:
    """Return whether the model's pack will hold moments of its domain."""
    return FACT in model.facts


@contextmanager
def gathering_moments(model: Perturbed, eager: bool = False) -> Iterator[Callable[[], None]]:
    """Gather moments during passes of the source network; call the yielded function after each pass.

    Args:
        eager: whether the passes are of the network itself where it is compiled, whose graph hears of no new hooks.
    """
    gathering = Gathering()
    model.facts.pop(FACT, None)
    if root_of(model.net) is not model.net and not eager:
        yield lambda: None
        return
    with watching(root_of(model.net)) as watch:

        def add() -> None:
            seen = watch.moments()
            if seen is not None:
                seen = replace(seen, mean=model.key.whole(seen.mean), var=model.key.whole(seen.var))
            gathering.add(seen)

        yield add
    source = DomainMoments.of_source(root_of(model.net))
    if (moments := gathering.moments(whole=True, source=source)) is not None:
        moments.put(model)
