"""A network and images to adapt it to, opened and tried on each other; perturbed freshly, or from a domain file."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import OptionError
from undrift.cli.model_arguments import Opened, open_adapted, open_source, try_out
from undrift.cli.output_paths import claim
from undrift.cli.session import Session
from undrift.options import Options, resolve

if TYPE_CHECKING:
    from undrift.images import Domain
    from undrift.posterior.perturbed import Perturbed

OF_A_STREAM = ("stream_lr", "answer")
"""Options that a stream may choose anew where the others come from a domain file."""


def open_both(
    session: Session,
    model: dict[str, Any],
    images: str,
    root: Path,
    outputs: Iterable[Path | None],
    force: bool,
    inputs: Iterable[Path] = (),
    domain: Path | None = None,
    going_on: Iterable[Path | None] = (),
) -> "tuple[Opened, Domain]":
    """Return the source network and the images, which it has seen to fit; what is to be written can be written.

    Args:
        outputs: files to be written; none may replace the network, the images or another input.
        inputs: what else is read.
        domain: the domain file to start from, if there is one.
        going_on: files to be written that may be there already: a run goes on with them.
    """
    weights = model.get("weights")
    claim(outputs, force, (domain, None if weights is None else Path(weights), Path(images), *inputs), going_on)
    opened = open_source(session, model, root, domain)
    pictures = opened.reader.images(images)
    try_out(opened, pictures)
    return opened, pictures


def open_perturbed(opened: Opened, domain: Path | None, preset: str, options: dict[str, Any], seed: int) -> "Perturbed":
    """Return the network to adapt: from a domain file with its options, or freshly perturbed."""
    chosen = resolve(preset, options)  # wrong values show, whatever is done with them
    if domain is None:
        return perturbed_afresh(opened, chosen, seed)
    foreign = [f"--{name.replace('_', '-')}" for name in options if name not in OF_A_STREAM]
    if foreign or preset != "paper":
        raise OptionError(
            f"{', '.join(foreign) or '--preset'} was given beside --domain, whose file has its own options; needed: "
            "one or the other. Leave it out, or start from the source network."
        )
    return open_adapted(opened, domain, seed)


def perturbed_afresh(opened: Opened, options: Options, seed: int) -> "Perturbed":
    """Return the source network under these options, with its preprocessing and class names."""
    import torch

    from undrift.recipes.perturb_plain import perturb_plain

    torch.manual_seed(seed)
    model = perturb_plain(opened.source.network, options, torch.Generator().manual_seed(seed))
    model.preprocess, model.classes = opened.preprocess, opened.classes
    return model
