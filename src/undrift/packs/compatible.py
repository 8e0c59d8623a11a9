"""Check whether a domain file may join others on one network."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from undrift._errors import OptionError, PerturbationMismatch
from undrift.packs.domain_file import DomainFile

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def check_compatible(
    found: DomainFile,
    name: str,
    names: Collection[str],
    preprocess: "Preprocess | None",
    classes: Sequence[str] | None,
) -> None:
    """Raise unless a file has a name of its own, and the preprocessing and classes of the others.

    Args:
        name: that it is to have.
        names: of the others.
        preprocess: theirs, where it is known; `classes` likewise.
    """
    if name in names:
        raise OptionError(
            f"{found.path.name} is called {name!r}, as is another pack; needed: a name of its own. Give one: "
            f'packs.add(path, name="{name}-2"), or undrift.save(model, path, name="{name}-2").'
        )
    if preprocess is not None and found.preprocess is not None:
        lines = "; ".join(preprocess.differences(found.preprocess))
        if lines:
            raise PerturbationMismatch(
                f"{found.path.name} was learned with other preprocessing ({lines}; this one's second); needed: the "
                "same for all packs, as all see the same images. Adapt again, or use it alone: undrift.load."
            )
    if classes is not None and found.classes not in (None, tuple(classes)):
        raise PerturbationMismatch(
            f"{found.path.name} has other classes ({_few(found.classes)}) than the packs before it "
            f"({_few(classes)}); needed: the same, in the same order. Adapt again, or use it alone: undrift.load."
        )


def _few(names: Sequence[str] | None) -> str:
    return ", ".join((names or ())[:3]) + (", …" if len(names or ()) > 3 else "")
