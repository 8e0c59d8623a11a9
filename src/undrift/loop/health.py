"""Keep a bounded sample of a stream's images with their answers, to estimate whether adaptation helps."""

import torch
from torch import Tensor

from undrift.judge.accuracy import Helping
from undrift.loop.helped import compare
from undrift.loop.indexed_loader import avoid_last_single
from undrift.posterior.outputs import by_position, some_positions
from undrift.posterior.perturbed import Perturbed

MOST = 256
"""Images kept: once there are so many, those of about the latest thousand."""

VALUES = 2**25
"""Values kept at most: 128 MB of float32, 222 images of 224 × 224."""

TOGETHER = 16
"""Images to predict together at least, as norm layers may use the batch; in segmentation one image is enough."""

EVERY = 4
"""One image in so many takes the place of the oldest, so that a run of one class does not fill the sample soon."""


class Health:
    """A running sample of a stream.

    The estimate is made when it is asked for: a batch of a stream costs a copy of the sampled images, no forward pass
    and no wait for the device. It is no part of a stream's state: a stream that resumes collects anew.
    """

    def __init__(self) -> None:
        self._images: Tensor | None = None
        self._probs: Tensor | None = None
        self._oldest = self._passed = 0  # the next place to be overwritten; images since the sample is full
        self._together = 1  # as many as the stream's largest batch has: its memory is known to hold them

    def add(self, images: Tensor, probs: Tensor) -> None:
        """Take in a batch of finite images and the probabilities they were answered with."""
        self._together = max(self._together, len(images), TOGETHER if probs.ndim == 2 else 1)
        images, probs = images.detach(), some_positions(probs.detach())
        if self._images is None or self._probs is None or self._images.shape[1:] != images.shape[1:]:
            self._images, self._probs = images[:0].clone(), probs[:0].clone()  # a camera may change its size
            self._oldest = self._passed = 0
        most = max(1, min(MOST, VALUES // max(1, images[0].numel())))
        free = most - len(self._images)
        if free > 0:
            self._images = torch.cat([self._images, images[:free]])
            self._probs = torch.cat([self._probs, probs[:free]])
            images, probs = images[free:], probs[free:]
        # By slices: an index that is a tensor would make Python wait for a GPU.
        begin, self._passed = -self._passed % EVERY, self._passed + len(images)
        images, probs = images[begin::EVERY][-most:], probs[begin::EVERY][-most:]
        while len(images):
            part = slice(self._oldest, self._oldest + len(images))
            fits = len(self._images[part])
            self._images[part], self._probs[part] = images[:fits], probs[:fits]
            self._oldest = (self._oldest + fits) % most
            images, probs = images[fits:], probs[fits:]

    def of(self, model: Perturbed, views: tuple[str, ...] | None) -> Helping | None:
        """Return whether the answers that were given are right more often than the source network's; None without any.

        Args:
            model: the network with the weights that answer now; its noise and statistics stay.
            views: those that answers are averaged over; None tests which are safe.
        """
        if self._images is None or self._probs is None:
            return None
        # Mixed, as those of one class often come together.
        order = torch.randperm(len(self._images), generator=torch.Generator().manual_seed(0))
        parts = order.to(self._images.device).split(avoid_last_single(self._together, len(order)))
        given = by_position(self._probs.float().cpu()[order]).clamp_min(1e-12).log()
        return compare(model, [self._images[part] for part in parts], views, given)
