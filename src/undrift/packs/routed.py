"""The prediction of several packs, with the pack that answered each image."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.answer.prediction import Prediction


@dataclass(frozen=True, repr=False)
class Routed(Prediction):
    """A `Prediction` whose rows come from several packs.

    Attributes:
        names: of the packs, "source" first: the columns of `evidence` and `sigmas`.
        choice: number of the pack that answered each image.
        nearest: number of the pack that each image is nearest to; another one than `choice` where that is too far.
        evidence: images × packs, how far an image is from a pack's domain, in the logarithm of a KL; the smaller the
            nearer. NaN for a pack without moments, and without routing (`with packs.using(…)`).
        sigmas: the same in standard deviations over the pack's own images; NaN for the source, which has none.
        known: whether some pack, or the source, knows the image; otherwise the source answered.
    """

    names: tuple[str, ...]
    choice: Tensor
    nearest: Tensor
    evidence: Tensor
    sigmas: Tensor
    known: Tensor

    @property
    def pack(self) -> tuple[str, ...]:
        """The name of the pack that answered each image."""
        return tuple(self.names[number] for number in self.choice.tolist())

    def why(self, image: int) -> str:
        """Return in words why an image got its pack.

        Examples: "night (0.4 σ)", "nothing here fits: nearest night, 3.1 σ away".
        """
        near = int(self.nearest[image])
        away = float(self.sigmas[image, near])
        if not bool(self.known[image]):
            return f"nothing here fits: nearest {self.names[near]}, {away:.1f} σ away"
        name = self.names[int(self.choice[image])]
        return name if away != away else f"{name} ({away:.1f} σ)"

    def cpu(self) -> "Routed":
        """Return the prediction on the CPU."""
        return _with(self, [getattr(self, name).cpu() for name in _TENSORS])


_TENSORS = [f.name for f in fields(Routed) if f.name != "names"]


def concatenated(parts: Sequence[Routed]) -> Routed:
    """Return the answers to several batches as one."""
    if not parts:
        raise DataError("there is no batch to answer; at least one is needed. Check the loader.")
    if len(parts) == 1:
        return parts[0]
    return _with(parts[0], [torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS])


def _with(like: Routed, tensors: Sequence[Tensor]) -> Routed:
    return Routed(**dict(zip(_TENSORS, tensors, strict=True)), names=like.names)
