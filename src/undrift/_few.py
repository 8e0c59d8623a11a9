"""A prediction from two draws, as unsure as the average of many draws is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.prediction import Prediction, entropy_of

# The part of the draws' mean logits in the answer; the rest is the logarithm of their mean probability. From a half to
# all of it there is no difference beyond chance, less is worse (benchmarks/predict_choice.py).
LOGITS_PART = 0.5
HOTTEST = 16.0
_GRID = 17


@dataclass(frozen=True)
class Few:
    """What a batch leaves behind for `answer`.

    Attributes:
        logits: half the mean of an image's log-probabilities, half the logarithm of its mean probability.
        mean_entropy: mean over both draws of the softmax's entropy.
        both: Σ p₁ p₂ and ½ Σ (p₁² + p₂²), summed over images, and their number.
        sound: for each image of the batch, whether it has a row here.
    """

    logits: Tensor
    mean_entropy: Tensor
    both: Tensor
    sound: Tensor

    @staticmethod
    def of(first: Tensor, second: Tensor, sound: Tensor, part: float = LOGITS_PART) -> "Few":
        """Return what the logits of two draws leave."""
        # Half precision would round the small differences between draws away.
        wide = torch.promote_types(first.dtype, torch.float32)
        logs = [draw.to(wide).log_softmax(dim=1) for draw in (first, second)]
        p, q = (log.exp() for log in logs)
        logits = part * (logs[0] + logs[1]) / 2 + (1 - part) * torch.logaddexp(*logs)
        halves = (p.square().sum(1) + q.square().sum(1)) / 2
        return Few(logits, (entropy_of(p) + entropy_of(q)) / 2, _totals((p * q).sum(1), halves), sound)


def answer(parts: Sequence[Few], samples: int) -> Prediction:
    """Return the predictions of all batches: softmax(logits / T), with one T for all their images.

    T gives the answers the sharpness, the mean over images of Σ p², that the average of S draws has. Two independent
    draws tell it without bias: E Σ p₁ p₂ is the sharpness of the average of infinitely many, and

        Σ p̄² = (1 − 1/S) Σ p₁ p₂ + (1/S) ½ Σ (p₁² + p₂²).
    """
    across, halves, count = sum((part.both for part in parts[1:]), parts[0].both)
    target = ((1 - 1 / samples) * across + halves / samples) / count.clamp_min(1)
    heat = temperature_of([part.logits for part in parts], target)
    return Prediction.cat(
        Prediction.of((part.logits / heat).softmax(dim=1), part.mean_entropy, part.sound) for part in parts
    )


def _totals(*values: Tensor) -> Tensor:
    """Return the sum of each over the rows where all are finite, and how many these are: one bad row spoils nothing."""
    finite = torch.isfinite(sum(values[1:], values[0]))
    return torch.stack([torch.where(finite, v, 0).sum() for v in values] + [finite.sum().to(values[0].dtype)])


def temperature_of(logits: Sequence[Tensor], sharpness: Tensor) -> Tensor:
    """Return the T from 1 up at which the mean over images of Σ softmax(logits / T)² is `sharpness`.

    Two grids, one inside the other, and a straight line: no loop that has to ask the device how far it is.
    """
    low, high = sharpness.new_zeros(()), sharpness.new_tensor(math.log(HOTTEST))
    steps = torch.linspace(0, 1, _GRID, dtype=low.dtype, device=low.device)
    for _ in range(2):
        heats = low + (high - low) * steps
        values = _sharpness(logits, heats.exp())
        upper = (values > sharpness).sum().clamp(1, _GRID - 1)  # sharpness falls with T
        low, high = heats.index_select(0, upper[None] - 1)[0], heats.index_select(0, upper[None])[0]
        left, right = values.index_select(0, upper[None] - 1)[0], values.index_select(0, upper[None])[0]
    place = torch.where(left > right, (left - sharpness) / (left - right), 0.0).clamp(0, 1)
    return torch.lerp(low, high, place).exp()


def _sharpness(logits: Sequence[Tensor], heats: Tensor) -> Tensor:
    """Return the mean over finite rows of Σ p² at each temperature."""
    total, count = torch.zeros_like(heats), heats.new_zeros(())
    for rows in (part for whole in logits for part in whole.split(4096)):
        square = (rows / heats[:, None, None]).softmax(dim=-1).square().sum(-1)
        finite = torch.isfinite(square)
        total = total + torch.where(finite, square, 0).sum(1)
        count = count + finite[0].sum()
    return total / count.clamp_min(1)
