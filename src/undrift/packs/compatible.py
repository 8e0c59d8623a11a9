"""Check that a domain file fits a network, and the other packs on it."""

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from undrift._errors import OptionError, PerturbationMismatch
from undrift.packs.domain_file import DomainFile, short
from undrift.packs.fingerprint import HALF, fingerprint, precision_of, source_tensors
from undrift.system.validate import a_type

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def check_path(path: object) -> None:
    """Raise where a path is no text."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"the path of the domain file is {path!r}, {a_type(path)}; needed: text, or a pathlib.Path. Give "
            "its name, such as 'clinic-b.safetensors'."
        )


def check_source(net: nn.Module, file: DomainFile, own: str | None = None) -> None:
    """Raise where a domain file was learned on another network.

    Args:
        own: the network's fingerprint, where it is known: it takes a look at every weight.
    """
    own = own or fingerprint(net)
    if own == file.fingerprint:
        return
    named = f'the checkpoint named in its metadata ("{file.source}")' if file.source else "the one it belongs to"
    remedy = f"Load {named}, or run `undrift adapt` again."
    if (cast := precision_of(net, file.fingerprint)) is not None:
        remedy = f"It fits this network in {cast}: cast first, net.to({cast}), and load after."
    elif half := next((t.dtype for t in source_tensors(net).values() if t.dtype in HALF), None):
        # It may be the right network, but the weights before rounding are unknown.
        remedy += f" These weights are in {half}; if they were cast to it, which rounds them: load first, cast after."
    raise PerturbationMismatch(
        f"{file.path.name} was learned on a different source model (fingerprint {short(file.fingerprint)}, this "
        f"model is {short(own)}). {remedy}"
    )


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
