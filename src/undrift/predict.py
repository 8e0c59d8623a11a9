"""Predict: average draws of the perturbation into one answer, with its uncertainty."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from undrift._errors import OptionError
from undrift.answer.average import average
from undrift.answer.draws import limit_of
from undrift.answer.fast_mode import calibrated, fast_answer
from undrift.answer.forward import batches_of, unwrapped
from undrift.answer.predict_session import PredictSession, checked_samples, views_asked
from undrift.answer.prediction import Prediction
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.answer.tiles import check_tile, over_tiles
from undrift.posterior.kept_statistics import warn_of_mean
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import generator_or_seed, positive

Mode = Literal["full", "fast"]


@torch.no_grad()
def predict(
    model: nn.Module,
    images: Tensor | Dataset[Any] | Iterable[Any],
    samples: int | None = None,
    *,
    generator: torch.Generator | int | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
    mode: Mode = "full",
    fold_limit: int | None = None,
    views: str | Sequence[str] | None = None,
    tile: int | None = None,
) -> Prediction:
    """Return the mean softmax over draws of the perturbation, with its entropy and mutual information.

        p = (1/S) Σ_s softmax(logits_s / T),   mutual_info = H(p) − (1/S) Σ_s H(p_s)

    All modules run in eval mode, and moving norm statistics are not updated. Draws share forward passes: the batch is
    repeated, and each row has its own noise. If one Δw serves a whole batch, or batch norms use batch statistics, each
    draw is a separate pass. A network that mixes images in another way needs `fold_limit=0`.

    The mode "fast" approximates `samples` draws with two, and a third for 40 % of a batch. It averages them at the
    temperature that makes the answers as uncertain as those of `samples` draws. A small batch on a GPU gets all draws,
    because they fit one pass and are hardly slower.

    Args:
        model: a perturbed network (compiled and wrapped ones are unwrapped), or any other network, which gives one
            deterministic answer.
        images: a tensor, a Dataset, a domain of `undrift.images`, or an iterable of batches (a loader; labels are not
            read).
        samples: draws to average; 0 is the mean network, which does not fit norm statistics from noisy steps (a warning
            says so once per model). Default: the option `test_samples`.
        generator: a generator or a seed makes the noise reproducible, without changing the network's own noise.
        temperature: T; see `undrift.temperature`.
        batch_size: how many images of a tensor to process at once.
        mode: "full", the average of `samples` draws; or "fast", an approximation of it.
        fold_limit: most rows (images × draws) of a pass; 0 makes one pass per draw. Default: 2,048, on a CPU 32, and
            less if memory runs out; with `tile`, 0.
        views: views of an image that change no label, to average over as well: "mirror", "shift". Draws take the views
            in turn, so with as many draws as views they cost nothing. Default: the option `answer_views`, without
            "auto".
        tile: for segmentation, predict tiles of this side, and average where they overlap.

    Examples:
        >>> import undrift
        >>> model = undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
        >>> p = predict(model, torch.rand(5, 3, 2, 2), samples=4, generator=0)
        >>> p.probs.shape, bool((p.mutual_info >= 0).all())
        (torch.Size([5, 3]), True)
    """
    model = unwrapped(model)
    warn_of_preprocess(model, images)
    samples = checked_samples(model, samples)
    positive(temperature, "temperature", "1 leaves the logits as they are.")
    if mode not in get_args(Mode):
        raise OptionError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}. full is the paper's.")
    if samples == 0 and isinstance(model, Perturbed):
        warn_of_mean(model)
    check_tile(tile)
    seen = views_asked(model, views, own=mode == "full")
    if seen and mode == "fast":
        raise OptionError(f'views={views!r} with mode="fast": draws of one image are what it calibrates. Take one.')
    session = PredictSession(model, generator_or_seed(generator), samples)
    if mode == "fast" and isinstance(model, Perturbed) and samples > 2 and tile is None:
        fold_limit = limit_of(model, fold_limit)
        if samples > 3 or fold_limit != 0:
            fast = partial(fast_answer, model, samples=samples, temperature=temperature, fold_limit=fold_limit)
            return calibrated(list(session.each(batches_of(images, batch_size), images, fast)), samples)
    full = partial(average, model, samples=samples, temperature=temperature, fold_limit=fold_limit, views=seen)
    if tile is not None:
        # One draw at a time: folded, ten draws of a tile would take the memory of ten tiles.
        full = partial(over_tiles, partial(full, fold_limit=fold_limit or 0), tile)
    return Prediction.cat(session.each(batches_of(images, batch_size), images, full))
