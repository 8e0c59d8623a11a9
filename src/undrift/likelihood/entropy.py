"""Entropy of each prediction: the loss of Tent, and of the paper online."""

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
    log_probs = logits.log_softmax(dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1).mean()


entropy.recordable = True  # type: ignore[attr-defined]
entropy.per_position = True  # type: ignore[attr-defined]
entropy.divisible = True  # type: ignore[attr-defined]
