"""The protocols between loops, likelihoods and keepers.

A method combines a scheme (what may change: `Options`), a likelihood (the loss) and a loop (when it steps), and may add
keepers (what keeps the network near its source). The loops call the optional methods named here and no others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import extra_pass

if TYPE_CHECKING:
    from undrift.answer.views import ReversibleView

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Step:
    """What a likelihood may use besides the logits of one draw.

    Attributes:
        model: the perturbed network.
        images: the batch, on the network's device; with several processes, this one's part of it.
        forward: maps images to logits under the current perturbation, without updating statistics.
        indices: the images' indices in the data set (over epochs); None in a stream.
        progress: the fraction of all steps that is done (over epochs); 0 in a stream.
        climbed: whether this is the second gradient of a step with the option `climb`.
    """

    model: Perturbed
    images: Tensor
    forward: Callable[[Any], Tensor]
    indices: Tensor | None = None
    progress: float = 0.0
    climbed: bool = False

    def mean_logits(self, images: Tensor | None = None) -> Tensor:
        """Return the mean network's logits for the batch, or other images, with gradients; update no statistics.

        Norm layers work as in a step. With "batch" and "train" they normalise these images by their own statistics.
        With "moving" and "domain" they use the kept ones, which do not fit a mean network if noisy draws moved them.
        """
        with extra_pass(self.model, noisy=False):
            return self.forward(self.images if images is None else images)

    def drawn_logits(self, images: Tensor | None = None) -> Tensor:
        """Return the logits of a fresh draw for the batch, or other images, with gradients; update no statistics."""
        with extra_pass(self.model, noisy=True):
            return self.forward(self.images if images is None else images)


@runtime_checkable
class Likelihood(Protocol):
    """A loss on unlabelled data that takes the place of −log p: a mean over samples.

    An `nn.Module` may be a likelihood; its parameters are then trained too. A likelihood whose own class says
    `recordable = True` may be part of a CUDA graph (`stream(…, captured=True)`): it returns a loss for every batch,
    reads no values back, has no shapes that depend on values, and uses no tensor that is replaced between batches.

    One with `per_position = True` also takes logits with a class per pixel, batch × classes × height × width, or with
    any number of labels per image, batch × 2 × labels: classes are dimension 1, and means are over all the rest.

    One with `divisible = True` may be called by several processes, each of which runs the network on a part of the
    batch. It gets the logits and indices of the whole batch, while `step.images` are that part alone: it must not use
    them, and must gather features with `step.model.key.whole`.
    """

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return the loss of one batch, or None to take no step on this batch."""
        ...


@runtime_checkable
class Refreshing(Protocol):
    """A likelihood that needs a pass over the whole domain before each epoch (pseudo-labels)."""

    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Prepare for an epoch: `batches()` yields indices and images of the domain, in any order."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A likelihood that reads features inside the network, by hooks that stay while the loop runs."""

    def watch(self, model: Perturbed) -> AbstractContextManager[None]:
        """Attach to the network for the length of a `with` block."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A likelihood that gives its own answer to a batch, from before the step (option answer="before")."""

    def answer(self, logits: Tensor) -> Tensor:
        """Return the logits to answer with; called once per draw, after the loss."""
        ...


@runtime_checkable
class Following(Protocol):
    """A likelihood that changes after each step (a teacher that averages)."""

    def follow(self, model: Perturbed) -> None:
        """Update from the network after its step, before any keeper."""
        ...


@runtime_checkable
class Deploying(Protocol):
    """A likelihood that answers with other weights than the model's (a teacher that averages)."""

    def deployed(self, model: Perturbed) -> AbstractContextManager[Perturbed]:
        """Put the weights that answer into the model for the length of a `with` block."""
        ...


class Doubt(NamedTuple):
    """Signs that images belong to few of their domain's classes.

    Attributes:
        views: the share of images whose label differs from that of a view, with the images' own statistics.
        worse: how much less sure their own statistics make the answers, and how much less consistent over a small
            shift, than the last norm layers' kept ones: a difference of mean confidences plus one of shares of images.
        counted: the entropy of their labels with their own statistics; `kept`: with the last norm layers' kept ones.

    If views agree, `worse` is 0 and `kept` equals `counted`: they were not computed. If `kept` is nearly `counted`,
    `worse` is 0 for the same reason.
    """

    views: float
    worse: float
    counted: float
    kept: float


@runtime_checkable
class SelfPaced(Protocol):
    """A likelihood that can answer images without a step, and tells which batches not to learn from.

    With one, a stream decides when to learn from a batch (`Pacing`), and guards itself.

    Attributes:
        unattended: whether a stream should do so.
        new_domain: whether the images of the last step came from another domain than those before.
    """

    unattended: bool
    new_domain: bool

    def supports(self, model: Perturbed) -> bool:
        """Return whether this works with the network."""
        ...

    def answer_alone(self, model: Perturbed, images: Tensor, counted: bool) -> Tensor:
        """Return probabilities for images; `counted` says whether the statistics include them."""
        ...

    def each_alone(
        self, model: Perturbed, images: Tensor, views: "Sequence[ReversibleView]", counted: bool
    ) -> list[Tensor]:
        """Return probabilities for each view of images separately; an answer would be their mean."""
        ...

    def doubt(self, model: Perturbed, images: Tensor, least: float, most: float) -> Doubt:
        """Return the signs that images are not a sample of their domain; arguments as in `Teacher.doubt`."""
        ...


class Keeper:
    """What keeps a network near its source while it adapts; in this base class every method does nothing.

    The order of a step: gradient of likelihood + KL + `penalty`; `gradients`; the optimiser's step; the likelihood's
    `follow`; `after`. Only `penalty` may be part of a CUDA graph; a keeper whose penalty can be sets
    `recordable = True` (see `Likelihood`). One that does the same in each of several processes sets `divisible = True`.
    """

    def start(self, model: Perturbed) -> None:
        """Prepare before the first step, while the network is still the source network; called once."""

    def penalty(self, model: Perturbed) -> Tensor | None:  # noqa: ARG002
        """Return a term to add to the objective, or None."""
        return None

    def gradients(self, model: Perturbed) -> None:
        """Change the gradients before the step."""

    def after(self, model: Perturbed, loss: float) -> str | None:  # noqa: ARG002
        """Change the network after the step; return a reason if it was reset to the source.

        Args:
            loss: the likelihood's value in a stream; NaN over epochs.
        """
        return None

    def reset(self) -> None:
        """Forget everything since the start, because the network was reset."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a stopped run needs to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
