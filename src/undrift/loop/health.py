"""Keep a bounded sample of a stream's images with the answers they got, to say whether adaptation helps."""

import torch
from torch import Tensor

from undrift.judge.accuracy import Helping
from undrift.loop.helped import compare
from undrift.posterior.perturbed import Perturbed

MOST = 256
"""Images kept; an image stays for about 4 × 256 later ones."""

VALUES = 2**25
"""Values kept at most: 128 MB of float32, 222 images of 224 × 224."""

SHARE = 0.25


class Health:
    """A running sample of a stream.

    Until it is full every image is kept; then one in four takes the place of a random one. The estimate is made when it
    is asked for: a stream costs a copy of the sampled images, and no forward pass. It is no part of a stream's state: a
    stream that goes on collects anew.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._images: Tensor | None = None
        self._probs: Tensor | None = None

    def add(self, images: Tensor, probs: Tensor) -> None:
        """Take in a batch of finite images and the probabilities they were answered with."""
        images, probs = images.detach(), probs.detach()
        if self._images is None or self._probs is None or self._images.shape[1:] != images.shape[1:]:
            self._images, self._probs = images[:0].clone(), probs[:0].clone()  # a camera may change its size
        most = max(1, min(MOST, VALUES // max(1, images[0].numel())))
        free = most - len(self._images)
        if free > 0:
            self._images = torch.cat([self._images, images[:free]])
            self._probs = torch.cat([self._probs, probs[:free]])
            images, probs = images[free:], probs[free:]
        rows = (torch.rand(len(images), generator=self._generator) < SHARE).nonzero()[:, 0]
        if len(rows):
            places = torch.randperm(most, generator=self._generator)[: len(rows)]
            rows = rows[: len(places)]
            self._images[places.to(images.device)] = images[rows.to(images.device)]
            self._probs[places.to(probs.device)] = probs[rows.to(probs.device)]

    def of(self, model: Perturbed, views: tuple[str, ...] | None) -> Helping | None:
        """Return whether the answers that were given are right more often than the source network's; None without any.

        Args:
            model: the network with the weights that answer now; its noise and statistics stay.
            views: those that answers are averaged over; None tests which are safe.
        """
        if self._images is None or self._probs is None:
            return None
        return compare(model, [self._images], views, self._probs.float().cpu().clamp_min(1e-12).log())
