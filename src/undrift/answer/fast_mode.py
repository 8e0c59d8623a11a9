"""The mode "fast" of `predict`: two or three draws per image, calibrated to the confidence of more draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from undrift.answer.average import average_finite, no_answer
from undrift.answer.draws import draw
from undrift.answer.forward import finite_images, forward
from undrift.answer.prediction import Prediction, entropy_of
from undrift.posterior.outputs import per_image
from undrift.posterior.perturbed import Perturbed

# The share of a batch that gets a third draw. The bar is the time of 3 noise-free passes: 2.4 draws per image take 2.4
# (WRN-28-10, batch 200, H200), what follows them 0.4. Third draws are spread evenly and share the pass: a second pass
# for images on which two draws disagree helps little, and costs all launches again.
THIRD = 0.4
# Up to so many rows (images × draws) all draws are made, in one pass. It waits for launches anyway: on an H200 a noisy
# pass of a WRN-28-10 takes 7.3 ms for 8 rows, 6.7 for 80 and 8.3 for 200.
SMALL = 256
HOTTEST = 16.0
_GRID = 17


@dataclass(frozen=True)
class FewDraws:
    """A few draws of one batch, as `calibrated` needs them.

    Attributes:
        logits: the draws' mean log-probabilities of each image.
        mean_entropy: mean over an image's draws of the softmax's entropy.
        overlap: of the first two draws, summed over images: Σ p₁ p₂, the mean of Σ p₁² and Σ p₂², and 1.
        sound: for each image of the batch, whether it has a row here; None if all have.
    """

    logits: Tensor
    mean_entropy: Tensor
    overlap: Tensor
    sound: Tensor | None

    @staticmethod
    def of(draws: Tensor, rows: Tensor, sound: Tensor | None = None) -> "FewDraws":
        """Summarise log-probabilities: two draws of all images, then a third draw of these rows."""
        both = len(draws) - len(rows)
        two = draws[:both].unflatten(0, (2, -1))
        logits, inner = averaged(two.unbind())
        more, inner_of_more = averaged([*two[:, rows].unbind(), draws[both:]])
        logits, inner = logits.index_copy(0, rows, more), inner.index_copy(0, rows, inner_of_more)
        across = (two[0] + two[1]).exp().sum(1)
        own = (2 * two).exp().sum(2).mean(0)
        known = across + own + inner < torch.inf  # NaN is not below anything, so a bad row adds nothing
        overlap = torch.stack([across, own, torch.ones_like(own)]).where(known, 0).sum(1)
        return FewDraws(logits, inner, overlap, sound)


def fast_answer(
    model: Perturbed, images: Tensor, samples: int, temperature: float, fold_limit: int | None
) -> FewDraws | Prediction:
    """Return a few draws of a batch for `calibrated`; or its answer, if all draws fit one short pass."""
    images, finite = finite_images(model, images)
    if len(images) == 0:
        return no_answer(model, images, finite)
    if one_pass_is_enough(images, samples, fold_limit):
        return average_finite(model, images, finite, samples, temperature, fold_limit)
    return few_draws(model, images, finite, temperature, fold_limit)


def few_draws(
    model: Perturbed, images: Tensor, finite: Tensor | None, temperature: float, fold_limit: int | None
) -> FewDraws:
    """Make two draws of all images and a third draw of some, without waiting for the device.

    Args:
        finite: for each image of the batch, whether it is among `images`; None if all are.
        fold_limit: 0 if draws cannot share a pass.
    """
    # A network that mixes the images of a pass must always see all of them.
    rows = evenly(images, 1.0 if fold_limit == 0 else THIRD)
    with model.rest():
        passes = list(draw(model, [images, images, images[rows]], fold_limit, partial(forward, model, given=images)))
    logits = per_image(passes[0] if len(passes) == 1 else torch.cat(passes), 'mode="fast"')
    return FewDraws.of(log_probs(logits if temperature == 1 else logits / temperature), rows, finite)


def one_pass_is_enough(images: Tensor, samples: int, fold_limit: int | None) -> bool:
    """Return whether all draws fit into one pass that takes no longer than its kernel launches."""
    rows = len(images) * samples
    return launch_bound(images) and rows <= SMALL and (fold_limit is None or rows <= fold_limit)


def launch_bound(images: Tensor) -> bool:
    """Return whether a small pass takes as long as its kernel launches."""
    return images.device.type == "cuda"


def evenly(images: Tensor, part: float = THIRD) -> Tensor:
    """Return the indices of a share of the images, spread evenly."""
    count = max(1, round(part * len(images)))
    return torch.arange(0, count * len(images), len(images), device=images.device) // count


def log_probs(logits: Tensor) -> Tensor:
    """Return log softmax; half precision would round the small differences between draws away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)


def averaged(draws: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return each image's mean log-probabilities over its draws, and the mean entropy of these.

    On the development corruptions this is closer to many draws than the logarithm of the mean probability
    (benchmarks/predict_choice.py).
    """
    logs = torch.stack(list(draws), dim=2)
    return logs.mean(2), entropy_of(logs.exp()).mean(1)


def calibrated(parts: Sequence[FewDraws | Prediction], samples: int) -> Prediction:
    """Return the predictions of all batches: softmax(logits / T), with one T for all their images.

    T gives the answers the sharpness (mean over images of Σ p²) of the average of `samples` draws, estimated without
    bias from two draws: (1 − 1/samples) E Σ p₁ p₂ + 1/samples E Σ p₁². Batches that are answered already stay.
    """
    few = [part for part in parts if isinstance(part, FewDraws)]
    if few:
        across, own, count = sum((part.overlap for part in few[1:]), few[0].overlap)
        sharpness = torch.lerp(across, own, 1 / samples) / count.clamp_min(1)
        heat = temperature_of([part.logits for part in few], sharpness)
    return Prediction.cat(
        part
        if isinstance(part, Prediction)
        else Prediction.of((part.logits / heat).softmax(dim=1), part.mean_entropy, part.sound)
        for part in parts
    )


def temperature_of(logits: Sequence[Tensor], sharpness: Tensor) -> Tensor:
    """Return the T from 1 up at which the mean over images of Σ softmax(logits / T)² is `sharpness`.

    Two nested grids and a linear interpolation: nothing is read back from the device or sent to it, so nothing waits.
    """
    grid = partial(torch.linspace, dtype=sharpness.dtype, device=sharpness.device)
    ends, steps = grid(0, math.log(HOTTEST), 2), grid(0, 1, _GRID)
    below = torch.arange(-1, 1, device=sharpness.device)
    for _ in range(2):
        low, high = ends
        heats = torch.lerp(low, high, steps)
        values = _sharpness(logits, heats.exp())
        upper = (values > sharpness).sum().clamp(1, _GRID - 1)  # sharpness falls with T
        around = upper + below
        ends, (left, right) = heats[around], values[around]
    place = torch.where(left > right, (left - sharpness) / (left - right), 0.0).clamp(0, 1)
    low, high = ends
    return torch.lerp(low, high, place).exp()


def _sharpness(logits: Sequence[Tensor], heats: Tensor) -> Tensor:
    """Return the mean over finite rows of Σ p² at each temperature."""
    parts = (part for whole in logits for part in (whole.split(4096) if len(whole) > 4096 else (whole,)))
    squares = [(rows / heats.view(-1, 1, 1)).softmax(dim=-1).square().sum(-1) for rows in parts]
    return (squares[0] if len(squares) == 1 else torch.cat(squares, dim=1)).nanmean(1)
