"""A prediction from two or three draws an image, as unsure as the average of many draws is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from undrift.prediction import Prediction, entropy_of

# The part of a batch that gets a third draw. 2.7 draws an image at 1.08 noise-free passes each (ten draws folded,
# WRN-28-10, batch 200, one H200) are 2.9 passes, where 3 is the bar; draws for more images bring little.
THIRD = 0.7
# The part of the draws' mean logits in the answer; the rest is the logarithm of their mean probability. A half and all
# of it differ little, none is worse (benchmarks/predict_choice.py).
LOGITS_PART = 0.5
HOTTEST = 16.0
_GRID = 17


@dataclass(frozen=True)
class Few:
    """What a batch leaves behind for `answer`.

    Attributes:
        logits: the draws' average of each image (see `averaged`).
        mean_entropy: mean over an image's draws of the softmax's entropy.
        agreement: Σ p₁ p₂ of the first two draws, summed over images, and the number of images.
        sound: for each image of the batch, whether it has a row here.
    """

    logits: Tensor
    mean_entropy: Tensor
    agreement: Tensor
    sound: Tensor

    @staticmethod
    def of(two: Sequence[Tensor], third: Tensor, rows: Tensor | None, sound: Tensor) -> "Few":
        """Return what the log-probabilities of two draws leave, with a third of these rows, None of all."""
        if rows is None:
            logits, inner = averaged([*two, third])
        else:
            logits, inner = averaged(two)
            more, inner_of_more = averaged([*(logs[rows] for logs in two), third])
            logits, inner = logits.index_copy(0, rows, more), inner.index_copy(0, rows, inner_of_more)
        across = (two[0] + two[1]).exp().sum(1)
        known = across + inner < torch.inf  # not a number is below nothing: one bad row spoils nothing
        return Few(logits, inner, torch.stack([across.where(known, 0).sum(), known.sum()]), sound)


def log_probs(logits: Tensor) -> Tensor:
    """Return log softmax; half precision would round the small differences between draws away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)


def disputed(two: Sequence[Tensor], part: float = THIRD) -> Tensor:
    """Return the rows, that part of them, on which two draws disagree most: largest mutual information."""
    probs = torch.stack(list(two), dim=2).exp()
    mutual = entropy_of(probs.mean(2)) - entropy_of(probs).mean(1)
    return mutual.nan_to_num(0).topk(round(part * len(mutual)), sorted=False).indices


def averaged(draws: Sequence[Tensor], part: float = LOGITS_PART) -> tuple[Tensor, Tensor]:
    """Return each image's average of log-probabilities, and the mean entropy of its draws.

    The average is `part` of the mean log-probabilities and the rest of the logarithm of the mean probability, up to a
    number that all classes share.
    """
    logs = torch.stack(list(draws), dim=2)
    return part * logs.mean(2) + (1 - part) * logs.logsumexp(2), entropy_of(logs.exp()).mean(1)


def answer(parts: Sequence[Few | Prediction]) -> Prediction:
    """Return the predictions of all batches: softmax(logits / T), with one T for all their images.

    T gives the answers the sharpness, the mean over images of Σ p², that the average of infinitely many draws has:
    E Σ p₁ p₂ over two independent draws, which an image's first two tell without bias. Batches that have their answer
    already keep it.
    """
    few = [part for part in parts if isinstance(part, Few)]
    if few:
        total, count = sum((part.agreement for part in few[1:]), few[0].agreement)
        heat = temperature_of([part.logits for part in few], total / count.clamp_min(1))
    return Prediction.cat(
        part
        if isinstance(part, Prediction)
        else Prediction.of((part.logits / heat).softmax(dim=1), part.mean_entropy, part.sound)
        for part in parts
    )


def temperature_of(logits: Sequence[Tensor], sharpness: Tensor) -> Tensor:
    """Return the T from 1 up at which the mean over images of Σ softmax(logits / T)² is `sharpness`.

    Two grids, one inside the other, and a straight line: no loop that has to ask the device how far it is, and no
    number that is sent to it, which would wait for it as well.
    """
    grid = partial(torch.linspace, dtype=sharpness.dtype, device=sharpness.device)
    ends, steps = grid(0, math.log(HOTTEST), 2), grid(0, 1, _GRID)
    for _ in range(2):
        heats = torch.lerp(ends[0], ends[1], steps)
        values = _sharpness(logits, heats.exp())
        upper = (values > sharpness).sum().clamp(1, _GRID - 1)  # sharpness falls with T
        around = torch.stack([upper - 1, upper])
        ends, (left, right) = heats[around], values[around]
    place = torch.where(left > right, (left - sharpness) / (left - right), 0.0).clamp(0, 1)
    return torch.lerp(ends[0], ends[1], place).exp()


def _sharpness(logits: Sequence[Tensor], heats: Tensor) -> Tensor:
    """Return the mean over finite rows of Σ p² at each temperature."""
    parts = (part for whole in logits for part in whole.split(4096))
    squares = [(rows / heats[:, None, None]).softmax(dim=-1).square().sum(-1) for rows in parts]
    return torch.cat(squares, dim=1).nanmean(1)
