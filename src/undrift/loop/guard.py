"""Notice a stream that collapses onto few classes, without labels."""

from typing import Any

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.answer.prediction import entropy_of, histogram
from undrift.answer.temperature import logits_once
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed

WINDOW = 10  # images per class that the histograms remember
LEAST_RATIO = 0.5


class Guard:
    """Compares the classes that the adapted network predicts with those that the source network predicts.

    Each network has a histogram of its predicted classes over the last images, about ten per class. The adapted network
    has collapsed when the entropy of its histogram is less than half of the source's:

        H(adapted) < ½ H(source)

    Both see the same images, so a stretch of one class lowers both entropies and is no collapse. The guard judges once
    the window is half full. It costs two more forward passes per batch.
    """

    def __init__(self) -> None:
        self.adapted: Tensor | None = None
        self.source: Tensor | None = None

    @torch.no_grad()
    def collapsed(self, model: Perturbed, images: Tensor) -> Tensor:
        """Return whether the adapted network has collapsed, after one more batch; the network is in eval mode."""
        # off() restores the flags from before `perturb`: with dropout, if the network was in train mode.
        with model.off() as net, evaluating(net):
            source = forward(model, images)
        window = WINDOW * source.shape[1]
        # A batch larger than the window counts whole; older images fade with their distance.
        kept = max(0.0, 1 - len(images) / window)
        self.source = _added(self.source, source, kept)
        self.adapted = _added(self.adapted, logits_once(model, images), kept)
        seen = self.source.sum()
        ratio = _entropy(self.adapted) / _entropy(self.source)  # 0/0 if both predict one class: no collapse
        return (seen >= window / 2) & (ratio < LEAST_RATIO)

    def forget(self) -> None:
        """Start anew, after a reset."""
        self.adapted = self.source = None

    def state_dict(self) -> dict[str, Any]:
        """Return both histograms."""
        return {"adapted": self.adapted, "source": self.source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from both histograms."""
        self.adapted, self.source = state["adapted"], state["source"]


def _added(before: Tensor | None, logits: Tensor, kept: float) -> Tensor:
    counts = histogram(logits.argmax(1), logits.shape[1])
    return counts if before is None else kept * before.to(counts.device) + counts


def _entropy(counts: Tensor) -> Tensor:
    return entropy_of((counts / counts.sum())[None])[0]
