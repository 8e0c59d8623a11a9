"""Crop images that lie on the device as uint8: random windows in training, the centre otherwise.

`undrift.adapt` calls the preprocessing of a `TensorDomain` on every batch, so a preprocessing that draws a window keeps
a whole epoch on the device, without decoding, copying or waiting.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from undrift.images import Preprocess
from undrift_bench.bench.harness.measure import TIMED, WARM_UP, wait
from undrift_bench.bench.harness.quickly import trial


@dataclass(frozen=True)
class CentreView(Preprocess):
    """The centre of each frame.

    Attributes:
        fast: whether batches are laid out channels-last.
        usual: the batch size that convolutions choose their algorithms for by trial, where `fast`.
    """

    fast: bool = False
    usual: int | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """Return the batch as the network wants it."""
        trial(self.fast, len(images), self.usual)
        return _laid_out(super().__call__(images), self.fast)

    @classmethod
    def of(cls, preprocess: Preprocess, fast: bool) -> "CentreView":
        """Return the view of frames that have their size already."""
        return cls(preprocess.mean, preprocess.std, None, preprocess.crop, preprocess.interpolation, fast)


@dataclass(frozen=True)
class RandomView(CentreView):
    """A random window of each frame, mirrored half of the time; drawn on the images' device from torch's generator.

    Attributes:
        each: called before every batch; for a stop-watch.
    """

    each: Callable[[], None] | None = field(default=None, compare=False)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the batch as the network wants it."""
        if self.each is not None:
            self.each()
        trial(self.fast, len(images), self.usual)
        return _laid_out(self.normalise(random_windows(images, self.crop or images.shape[-1])), self.fast)


def random_windows(images: Tensor, side: int) -> Tensor:
    """Return a random window of each image N×C×H×W, mirrored half of the time: one gather for all of it."""
    count, height, width = len(images), *images.shape[-2:]
    device = images.device
    steps = torch.arange(side, device=device)
    top = torch.randint(height - side + 1, (count, 1), device=device)
    left = torch.randint(width - side + 1, (count, 1), device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    rows = top + steps
    columns = left + torch.where(mirrored, steps.flip(0), steps)
    image = torch.arange(count, device=device)
    return images[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class StopWatch:
    """The median time of a step, taken between the moments at which batches are asked for.

    The device is waited for at a few batches only, after a warm-up. Between two epochs pseudo-labels are made; the
    median does not see that.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device = device
        first = min(WARM_UP, steps // 3)
        self._sample = range(first, first + TIMED + 1)
        self._calls, self._moments = 0, list[float]()

    def __call__(self) -> None:
        """Say that a batch is asked for."""
        if self._calls in self._sample:
            wait(self.device)
            self._moments.append(time.perf_counter())
        self._calls += 1

    @property
    def milliseconds(self) -> float | None:
        """The median, or None where there were fewer than two batches."""
        pairs = zip(self._moments, self._moments[1:], strict=False)
        times = [later - earlier for earlier, later in pairs]
        return 1e3 * statistics.median(times) if times else None

    @property
    def count(self) -> int:
        """How many steps it is the median of."""
        return max(0, len(self._moments) - 1)


def _laid_out(images: Tensor, fast: bool) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last if fast else torch.contiguous_format)
