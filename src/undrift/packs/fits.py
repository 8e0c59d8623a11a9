"""Check whether a domain file may join the packs of a network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from undrift._errors import OptionError, PerturbationMismatch
from undrift.packs.domain_file import DomainFile
from undrift.packs.file import check_source

if TYPE_CHECKING:
    from undrift.packs.collection import Packs


def check_fits(found: DomainFile, name: str, packs: "Packs") -> None:
    """Raise unless the file is of the packs' network, preprocessing and classes, and has a name of its own."""
    check_source(packs.net, found, packs.fingerprint)
    if name in packs.names:
        raise OptionError(
            f"{found.path.name} is called {name!r}, as is another pack; needed: a name of its own. Give one: "
            f'packs.add(path, name="{name}-2").'
        )
    if packs.preprocess is not None and found.preprocess is not None:
        lines = "; ".join(packs.preprocess.differences(found.preprocess))
        if lines:
            raise PerturbationMismatch(
                f"{found.path.name} was learned with other preprocessing ({lines}; this one's second); needed: the "
                "same for all packs, as all see the same images. Adapt again, or use it alone: undrift.load."
            )
    if packs.classes is not None and found.classes not in (None, packs.classes):
        raise PerturbationMismatch(
            f"{found.path.name} has other classes ({_few(found.classes)}) than the packs before it "
            f"({_few(packs.classes)}); needed: the same, in the same order. Adapt again, or use it alone: undrift.load."
        )


def _few(names: Sequence[str] | None) -> str:
    return ", ".join((names or ())[:3]) + (", …" if len(names or ()) > 3 else "")
