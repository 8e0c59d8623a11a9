"""What the parts of undrift hand to each other.

Every method is a scheme (what may change: `Options`) × a likelihood (what is asked) × a loop (when), and at most a few
keepers (what holds on to the source). The loops look for the optional methods named here and call no others.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import beside_a_step

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Step:
    """What a likelihood may look at beside the logits of one draw.

    Attributes:
        model: the perturbed network.
        images: the batch, on the network's device.
        forward: maps images to logits under the perturbation as it stands.
        indices: the samples' places in the data set (over epochs), None in a stream.
        progress: the part of all steps that is done (over epochs), 0 in a stream, which has no end.
        climbed: whether this is the second pass of a step with the option `climb`.
    """

    model: Perturbed
    images: Tensor
    forward: Callable[[Any], Tensor]
    indices: Tensor | None = None
    progress: float = 0.0
    climbed: bool = False

    def mean_logits(self, images: Tensor | None = None) -> Tensor:
        """Return the mean network's logits for the batch, or other images, with gradients; no statistics move.

        Norm layers do as in a step: with "batch" and "train" these images are normalised by their own statistics. With
        "moving" and "domain" they are by the kept ones; a mean network does not fit those of noisy draws.
        """
        with beside_a_step(self.model, noisy=False):
            return self.forward(self.images if images is None else images)

    def drawn_logits(self, images: Tensor | None = None) -> Tensor:
        """Return the logits of a fresh draw for the batch, or other images, with gradients; no statistics move."""
        with beside_a_step(self.model, noisy=True):
            return self.forward(self.images if images is None else images)


@runtime_checkable
class Likelihood(Protocol):
    """What is asked of the unlabelled data: a loss that stands for −log p, a mean over samples.

    An `nn.Module` may be one; its own parameters are then trained along. One whose own class says `recordable = True`
    may be part of a CUDA graph (`stream(…, captured=True)`): it asks something of every batch, reads no values back,
    has no shapes that depend on values, and none of the tensors that it looks at is replaced between batches.
    """

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return the loss of one batch; None where it asks nothing of this batch, which then makes no step."""
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A likelihood that looks at the whole domain before each epoch (pseudo-labels)."""

    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Look at the domain: `batches()` yields indices and images, in any order."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A likelihood that looks inside the network (features), by hooks that stay as long as the loop runs."""

    def watch(self, model: Perturbed) -> AbstractContextManager[None]:
        """Attach to the network; leaving the context detaches."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A likelihood that has its own answer to a batch, from before the step (option answer="before")."""

    def answer(self, logits: Tensor) -> Tensor:
        """Return the logits to answer with; called once a batch, after the loss."""
        ...


@runtime_checkable
class Following(Protocol):
    """A likelihood that moves after each step (a teacher that averages)."""

    def follow(self, model: Perturbed) -> None:
        """Look at the network after its step, before any keeper does."""
        ...


@runtime_checkable
class Deploying(Protocol):
    """A likelihood whose answers are of other weights than the model's (a teacher that averages)."""

    def deployed(self, model: Perturbed) -> AbstractContextManager[Perturbed]:
        """Put the weights that answer into the model; leaving the context puts its own back."""
        ...


class Keeper:
    """What holds a network to its source while it adapts; each method does nothing unless a keeper says otherwise.

    The order of a step: gradient of likelihood + KL + `penalty`; `gradients`; the optimiser's step; the likelihood's
    `follow`; `after`. Only `penalty` would be part of a CUDA graph; a keeper that has one says `recordable = True`
    where it can be (see `Likelihood`).
    """

    def start(self, model: Perturbed) -> None:
        """Look at the network before the first step (it is the source network still); called once."""

    def penalty(self, model: Perturbed) -> Tensor | None:  # noqa: ARG002
        """Return what is added to the objective."""
        return None

    def gradients(self, model: Perturbed) -> None:
        """Change the gradients before the step."""

    def after(self, model: Perturbed, loss: float) -> str | None:  # noqa: ARG002
        """Change the network after the step; return a reason where it was put back to the source."""
        return None

    def reset(self) -> None:
        """Forget what was seen since the start, as the network was put back there."""

    def state_dict(self) -> dict[str, Any]:
        """Return what an interrupted run needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""


def named_learnables(model: Perturbed) -> dict[str, torch.nn.Parameter]:
    """Return what is trained of the network itself (norm affine, weights), without log-variances, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("noise.")}


def named_sources(model: Perturbed) -> dict[str, Tensor]:
    """Return the source's values of `named_learnables`, by the same names; the tensors themselves, not copies."""
    waiting = {
        id(held.layer._parameters[name]): tensor
        for held in (*model.norms, *model.trained)
        for name, tensor in held.away.items()
        if tensor is not None and held.layer._parameters.get(name) is not None
    }
    return {n: waiting[id(p)] for n, p in named_learnables(model).items()}
