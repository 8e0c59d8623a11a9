"""Per-image losses, for likelihoods that weight or select images."""

from torch import Tensor


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
