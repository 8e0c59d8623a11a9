"""What the parts of undrift hand to each other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from undrift.perturb import Perturbed


@dataclass(frozen=True)
class Step:
    """What a likelihood may look at beside the logits of one draw.

    Attributes:
        model: the perturbed network.
        images: the batch, on the network's device.
        forward: maps images to logits under the perturbation as it stands.
        indices: the samples' places in the data set (over epochs), None in a stream.
    """

    model: Perturbed
    images: Tensor
    forward: Callable[[Any], Tensor]
    indices: Tensor | None = None

    def mean_logits(self) -> Tensor:
        """Return the mean network's logits for the batch, with gradients; moving statistics rest."""
        with self.model.mean():
            return self.forward(self.images)


@runtime_checkable
class Likelihood(Protocol):
    """What is asked of the unlabelled data: a loss that stands for −log p, a mean over samples."""

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A likelihood that looks at the whole domain before each epoch (pseudo-labels)."""

    def refresh(self, model: Perturbed, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        """Look at the domain: `batches()` yields indices and images, in any order."""
        ...
