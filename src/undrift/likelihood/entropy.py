"""Entropy of each prediction, the loss of Tent and of the paper online; and losses per image."""

from torch import Tensor

from undrift._types import Step


def entropy(logits: Tensor, step: Step | None = None) -> Tensor:  # noqa: ARG001
    """Return the mean entropy of the predictions, in nats.

    mean_i H(p_i),   H(p) = −Σ_c p_c log p_c,   p_i = softmax(logits_i)

    Examples:
        >>> import torch
        >>> round(float(entropy(torch.zeros(3, 2))), 4)  # log 2
        0.6931
    """
    return entropies(logits).mean()


entropy.recordable = True  # type: ignore[attr-defined]
entropy.per_position = True  # type: ignore[attr-defined]
entropy.divisible = True  # type: ignore[attr-defined]


def entropies(logits: Tensor) -> Tensor:
    """Return −Σ_c p log p of each image, in nats."""
    log_probs = logits.log_softmax(dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1)


def cross_entropies(targets: Tensor, logits: Tensor) -> Tensor:
    """Return −Σ_c t log p of each image, t and p the softmax of two sets of logits."""
    return -(targets.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)


def symmetric_cross_entropies(one: Tensor, other: Tensor) -> Tensor:
    """Return the mean of both directions of the cross-entropy of each image."""
    return 0.5 * (cross_entropies(one, other) + cross_entropies(other, one))
