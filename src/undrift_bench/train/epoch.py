"""Train one epoch and measure accuracy; on a GPU the host waits once per epoch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift_bench.train.frames import Frames, Normalise, cut, draw
from undrift_bench.train.options import TrainOptions
from undrift_bench.train.schedule import make_optimiser, set_rate


@runtime_checkable
class AsksMore(Protocol):
    """A network whose training asks more of its images than their labels."""

    def more_loss(self, images: Tensor) -> Tensor:
        """Return what is added to the loss of these images, as the network sees them."""
        ...


@dataclass(frozen=True)
class Epoch:
    """The figures of one epoch.

    Attributes:
        epoch: counted from 1.
        loss: mean over the training steps, label smoothing included.
        train_accuracy: on the augmented batches, while training; a share of 1.
        accuracy: on the validation images; None where it was not measured.
        lr: of the last step.
        seconds: with the validation.
    """

    epoch: int
    loss: float
    train_accuracy: float
    accuracy: float | None
    lr: float
    seconds: float


class Loop:
    """A network, its optimiser, and the two passes over images.

    Args:
        network: on the device already; trained in place.
    """

    def __init__(self, network: nn.Module, train: Frames, validation: Frames | None, options: TrainOptions) -> None:
        self.network, self.options = network, options
        self.device = train.images.device
        on_gpu = self.device.type == "cuda"
        self.optimiser = make_optimiser(network, options, fused=on_gpu)
        self.steps = len(train) // options.batch_size
        self._train, self._validation = train, validation
        self._normalise = Normalise(train.preprocess, self.device)
        self._bfloat16 = options.precision == "bfloat16" or (
            options.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        compiled = options.compiled == "on" or (options.compiled == "auto" and on_gpu)
        # Only the training pass is compiled: a second graph for a few evaluations costs more than it saves.
        self._forward: Callable[[Tensor], Tensor] = torch.compile(network, dynamic=False) if compiled else network

    def run(self, epoch: int, advance: Callable[[], None]) -> Epoch:
        """Train for one epoch (counted from 0) and return its figures.

        All randomness is a function of seed and epoch, so a run that goes on from a checkpoint draws what the
        uninterrupted one drew.

        Args:
            advance: called after every step, for a progress bar; on a GPU the host is ahead of the work.
        """
        start = time.perf_counter()
        options = self.options
        torch.manual_seed(_seed(options.seed, epoch + 1))  # dropout; the caller's own state is restored afterwards
        generator = torch.Generator().manual_seed(_seed(options.seed, epoch + 1))
        self.network.train()
        losses = torch.zeros((), device=self.device)
        right = torch.zeros((), dtype=torch.long, device=self.device)
        rate = 0.0
        views = draw(self._train, options.flip, generator)
        for step, batch in enumerate(views.batches(options.batch_size)):
            rate = set_rate(self.optimiser, options, epoch * self.steps + step, options.epochs * self.steps)
            images, labels = self._normalise(cut(self._train, batch)), self._train.labels[batch.order]
            with self._autocast():
                logits = self._forward(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=options.label_smoothing)
            if isinstance(self.network, AsksMore):
                with self._autocast():
                    loss = loss + self.network.more_loss(images)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self.optimiser.step()
            losses += loss.detach()
            right += (logits.detach().argmax(1) == labels).sum()
            advance()
        mean_loss = losses.item() / self.steps
        if mean_loss != mean_loss or mean_loss == float("inf"):
            raise OptionError(
                f"the loss of epoch {epoch + 1} is {mean_loss} at a learning rate of {rate:g}; needed: a finite one. "
                f"Lower lr (it was {options.lr:g}), and start over with resume=False."
            )
        share = right.item() / (self.steps * options.batch_size)
        due = (epoch + 1) % options.evaluate_every == 0 or epoch + 1 == options.epochs
        accuracy = self.evaluate(self._validation) if due and self._validation is not None else None
        return Epoch(epoch + 1, mean_loss, share, accuracy, rate, time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, source: Frames) -> float:
        """Return the network's accuracy on centre crops, in eval mode."""
        self.network.eval()
        count = len(source)
        size = min(2 * self.options.batch_size, count)  # what trains in this memory evaluates at twice the size
        centre = source.preprocess.without_resize()  # frames are resized already
        right = torch.zeros((), dtype=torch.long, device=self.device)
        for at in range(0, count, size):
            # The last batch is filled up with its last image: cuDNN tunes itself anew for every shape.
            index = torch.arange(at, at + size, device=self.device)
            real = index.clamp(max=count - 1)
            images = centre(source.images[real].permute(0, 3, 1, 2))
            with self._autocast():
                guess = self.network(images).argmax(1)
            right += ((guess == source.labels[real]) & (index < count)).sum()
        return right.item() / count

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the network's state."""
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)


@contextlib.contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch inside the block; the caller's random state and cuDNN setting come back after it."""
    on_gpu, tuned = device.type == "cuda", torch.backends.cudnn.benchmark
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.manual_seed(_seed(seed, 0))
        torch.backends.cudnn.benchmark = on_gpu  # batches have one shape
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = tuned


def _seed(seed: int, stream: int) -> int:
    return (seed * 1_000_003 + stream) % 2**63  # PyTorch takes no larger one
