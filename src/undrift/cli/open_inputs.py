"""Open the network and the images of a command, check that they fit, and perturb the network."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import OptionError
from undrift.cli.model_arguments import Opened, open_adapted, open_source, try_out, weights_of
from undrift.cli.output_paths import claim
from undrift.cli.session import Session
from undrift.options import Options, resolve

if TYPE_CHECKING:
    from undrift.images import Domain
    from undrift.posterior.perturbed import Perturbed

OF_A_STREAM = ("stream_lr", "answer")
"""Options that a stream may change even if the others come from a domain file."""


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
    """Return the source network and the images, once the outputs can be written and the network takes the images.

    Args:
        outputs: files to write; none may replace an input.
        inputs: files that are read beside the network and the images.
        domain: the domain file to start from, if any.
        going_on: files to write that may exist, because a run resumes from them.
    """
    claim(outputs, force, (domain, weights_of(model), Path(images), *inputs), going_on)
    opened = open_source(session, model, root, domain)
    pictures = opened.reader.images(images)
    try_out(opened, pictures)
    return opened, pictures


def open_perturbed(
    opened: Opened, domain: Path | None, preset: str | None, options: dict[str, Any], seed: int
) -> "Perturbed":
    """Return the network to adapt: as a domain file has it, or perturbed with these options."""
    chosen = resolve(preset or "paper", options)  # raises on wrong values, also beside --domain
    if domain is None:
        return perturbed_afresh(opened, chosen, seed)
    foreign = [f"--{name.replace('_', '-')}" for name in options if name not in OF_A_STREAM]
    if foreign or preset is not None:
        raise OptionError(
            f"{', '.join(foreign) or '--preset'} was given beside --domain, whose file has options of its own; "
            "needed: one of the two. Leave it out, or start from the source network."
        )
    return open_adapted(opened, domain, seed)


def perturbed_afresh(opened: Opened, options: Options, seed: int) -> "Perturbed":
    """Return the source network under these options, with its preprocessing and class names."""
    import torch

    from undrift.recipes.named import perturb_plain

    torch.manual_seed(seed)
    model = perturb_plain(opened.source.network, options, torch.Generator().manual_seed(seed))
    model.preprocess, model.classes = opened.preprocess, opened.classes
    return model
