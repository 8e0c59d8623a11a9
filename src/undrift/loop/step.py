"""Take one step on the objective (paper eq. 3), wholly or not at all: the engine of both loops."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from undrift._types import Following, Keeper, Likelihood
from undrift.answer.views import ViewsInUse
from undrift.loop.captured import CapturedGradient
from undrift.loop.gradient import Gradient, GradientResult, More
from undrift.loop.optimise import climbed, learnables, pull, slowed, turn_to_gradient
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import forget_noise_seen, weights_moved
from undrift.system.interrupts import uninterrupted

NOTHING_ASKED = "nothing asked of it"


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
        answer: in a stream, mean softmax over the draws and the mean of its entropy, from before the step.
        numbers: likelihood, KL, the gradient's norm, and what else the loop reads; None where nothing was asked.
        why_not: why the step was not made; None where it was.
        resets: why keepers put the network back to its source, where they did.
    """

    answer: tuple[Tensor, Tensor] | None
    numbers: tuple[float, ...] | None
    why_not: str | None
    resets: tuple[str, ...] = ()


class Stepper:
    """Makes the steps of one adaptation, over epochs or in a stream.

    Args:
        keepers: they are started here.
        online: whether this is a stream. There the passes of a step are answers, the option `climb` counts, keepers
            follow the loss, and the noise of a step that was not made does not come again.
        captured: record the gradient as a CUDA graph.
        more: returns more numbers to read back, from the logits of the last draw.
        views: of the images that answers are averaged over.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Likelihood,
        optimiser: torch.optim.Optimizer,
        keepers: Sequence[Keeper] = (),
        *,
        online: bool,
        captured: bool = False,
        more: More | None = None,
        views: ViewsInUse | None = None,
    ) -> None:
        self.model, self.likelihood, self.optimiser = model, likelihood, optimiser
        self.keepers, self.online = tuple(keepers), online
        for keeper in self.keepers:
            keeper.start(model)
        # A keeper may take parts of the network out of what is trained.
        self.learnables = [p for p in learnables(optimiser) if p.requires_grad]
        plain = Gradient(model, likelihood, self.learnables, self.keepers, online, more, views)
        self.gradient = CapturedGradient(plain) if captured else plain
        self._unturned = model.options.mean_start == "gradient" and bool(model.low_rank)

    def mark(self) -> "StepMark":
        """Return where the model stands, for `step`."""
        return StepMark(self.model, noise=not self.online)

    def step(
        self,
        images: Tensor,
        size: int,
        mark: "StepMark",
        count: Callable[[StepResult], None],
        *,
        places: Tensor | None = None,
        progress: float = 0.0,
    ) -> StepResult:
        """Make one step on a batch of finite images, or none where its loss or gradient is not finite.

            gradient of likelihood + KL + penalties  (with `climb`, once more from a place uphill)
            keepers' `gradients`, the optimiser's step, the likelihood's `follow`, keepers' `after`

        A step that is not made, or that an error or Ctrl-C stops, leaves nothing behind. Where the likelihood asks
        nothing of the batch, norm statistics keep what they saw of it.

        Args:
            size: the data size of the bound.
            mark: where the model stood before.
            count: called with the result as a part of the step, which Ctrl-C cannot come between.
            places: of the images in their data set.
            progress: the part of all steps that is done.
        """
        counted = False
        self.gradient.keep()
        try:
            result = self._compute_gradient(images, size, places, progress)
            if result.why_not not in (None, NOTHING_ASKED):
                self._undo(mark)
            with uninterrupted():
                if result.why_not is None and result.numbers is not None:
                    result = replace(result, resets=self._apply_gradient(result.numbers[0], len(images), size))
                count(result)
                counted = True
        finally:
            self.optimiser.zero_grad()
            if not counted:
                self._undo(mark)
        return result

    def _compute_gradient(self, images: Tensor, size: int, places: Tensor | None, progress: float) -> StepResult:
        """Leave the step's gradient on the learnables; return its answer, its numbers, and whether to make it."""
        if self._unturned:
            self._unturned = False
            turn_to_gradient(self.model, self.likelihood, partial(self.gradient, images, size, places, progress))
        first = last = self.gradient(images, size, places, progress)
        radius = self.model.options.climb if self.online else 0.0
        if radius and first.numbers is not None and self.learnables:
            with climbed(self.learnables, radius):
                last = self.gradient(images, size, places, progress, climbed=True)
        numbers = _read(first if last.numbers is None else last)
        return StepResult(first.answer, numbers, NOTHING_ASKED if last.numbers is None else _why_not(numbers))

    def _apply_gradient(self, likelihood: float, images: int, size: int) -> tuple[str, ...]:
        """Make the step that the gradients ask for; return why keepers put the network back, where they did."""
        for keeper in self.keepers:
            keeper.gradients(self.model)
        usual = self.model.options.stream_lr_images if self.online else None
        with nullcontext() if usual is None else slowed(self.optimiser, min(1.0, images / usual)):
            self.optimiser.step()
            pull(self.model, self.optimiser, size)
        if isinstance(self.likelihood, Following):
            self.likelihood.follow(self.model)
        told = likelihood if self.online else math.nan
        reasons = [keeper.after(self.model, told) for keeper in self.keepers]
        weights_moved()
        return tuple(why for why in reasons if why is not None)

    def _undo(self, mark: "StepMark") -> None:
        mark.undo()
        self.gradient.put_back()


class StepMark:
    """Where a model stood before a step: norm statistics, and the noise. Gradients alone change no learnable.

    Args:
        noise: whether `undo` puts the noise back too, for the same batch to get the same.
    """

    def __init__(self, model: Perturbed, noise: bool) -> None:
        self.model = model
        # References are enough: a moving average is a new tensor each time it moves.
        layers = [policy.layer for policy in model.norms if policy.statistics in MOVING]
        self._statistics = [(layer, dict(layer._buffers)) for layer in layers]
        self._step = model.key.step.clone() if noise else None

    def undo(self) -> None:
        """Go back to the mark."""
        for layer, buffers in self._statistics:
            layer._buffers.update(buffers)
        forget_noise_seen(self.model)
        if self._step is not None:
            self.model.key.step.copy_(self._step)


def _read(found: GradientResult) -> tuple[float, ...] | None:
    """Return the numbers: one transfer a step, as each is a wait for a GPU."""
    return None if found.numbers is None else tuple(found.numbers.tolist())


def _why_not(numbers: Sequence[float] | None) -> str | None:
    """Return what speaks against a step with these numbers."""
    assert numbers is not None, "a likelihood that asked something left numbers"
    likelihood, kl, *others = numbers
    if not math.isfinite(likelihood + kl):
        return "loss not finite"
    return None if all(map(math.isfinite, others)) else "gradient not finite"
