"""A network that adapts as it goes, from fresh options or from a domain file; for `stream` and `evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import OptionError
from undrift.cli._model import Opened, open_adapted
from undrift.options import resolve

if TYPE_CHECKING:
    from undrift.perturb import Perturbed

OF_A_STREAM = ("stream_lr", "answer")
"""Options that a stream may choose anew where the others come from a domain file."""


def open_perturbed(opened: Opened, domain: Path | None, preset: str, options: dict[str, Any], seed: int) -> "Perturbed":
    """Return the network to adapt: from a domain file with its options, or freshly perturbed."""
    import torch

    from undrift.perturb import perturb

    chosen = resolve(preset, options)  # wrong values show, whatever is done with them
    if domain is None:
        torch.manual_seed(seed)
        return perturb(
            opened.source.network,
            chosen,
            generator=torch.Generator().manual_seed(seed),
            preprocess=opened.preprocess,
            classes=opened.classes,
        )
    foreign = [f"--{name.replace('_', '-')}" for name in options if name not in OF_A_STREAM]
    if foreign or preset != "paper":
        raise OptionError(
            f"{', '.join(foreign) or '--preset'} was given beside --domain, whose file has its own options; needed: "
            "one or the other. Leave it out, or start from the source network."
        )
    return open_adapted(opened, domain, seed)
