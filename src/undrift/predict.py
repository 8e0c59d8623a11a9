"""Draws of the perturbation, averaged into one prediction."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, OutputError, UndriftError
from undrift.answer.draws import draw, limit_of
from undrift.answer.fast_mode import THIRD, Few, answer, evenly, log_probs
from undrift.answer.predict_session import Asking
from undrift.answer.prediction import Prediction, entropy_of
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.answer.unbatched import refuse_unbatched
from undrift.images import FileDomain, TensorDomain
from undrift.posterior.attached import attached_to, root_of
from undrift.posterior.batch import images_of, to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise
from undrift.posterior.statistics import warn_of_mean
from undrift.system.validate import count_or_none, generator_or_seed, number_above

Mode = Literal["full", "fast"]
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# Most rows (images × draws) at which "fast" makes all draws, in one pass. On an H200 a noisy pass of a WRN-28-10 takes
# 7.3 ms for 8 rows, 6.7 for 80 and 8.3 for 200: it waits for launches.
SMALL = 256


@torch.no_grad()
def predict(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    samples: int | None = None,
    *,
    generator: torch.Generator | int | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
    mode: Mode = "full",
    fold_limit: int | None = None,
) -> Prediction:
    """Return what the network says: the mean over draws of its softmax, with entropy and mutual information.

        p = (1/S) Σ_s softmax(logits_s / T),   mutual_info = H(p) − (1/S) Σ_s H(p_s)

    All modules are in eval mode meanwhile, and moving norm statistics rest. Draws share passes: the batch is repeated,
    and each row has noise of its own. Where a draw is one Δw for the batch, or batch norms compute statistics of the
    batch, each draw is a pass. A network that mixes images in another way needs `fold_limit=0`.

    The mode "fast" stands for `samples` draws with two, and a third for 40 % of a batch, all in one pass where draws
    share passes. It answers with their average at the temperature that makes it as unsure, over all images of the call,
    as `samples` draws are (docs/uncertainty.md says how near that comes). A small batch on a GPU, up to 256 images ×
    draws, gets all its draws, as in the mode "full": that is one pass, too, and hardly slower.

    Args:
        model: a perturbed network (one that is compiled or wrapped for several GPUs is asked as it was before), or any
            other, which gives one deterministic answer.
        images: a tensor, an `undrift.images` domain, or an iterable of batches (a loader; labels are not looked at).
        samples: draws to average, or to stand for; 0 is the mean network, which does not fit norm statistics that noisy
            steps moved (a warning says so, once a model). Default: the option `test_samples`.
        generator: a generator or a seed makes the noise reproducible, and leaves the network's own noise where it was.
        temperature: T; see `undrift.temperature`.
        batch_size: how many images of a tensor to look at at once.
        mode: "full", the average of `samples` draws; or "fast", an approximation of it.
        fold_limit: most rows (images × draws) of a pass; 0 makes one pass a draw. Default: 2,048, on a CPU 32, and
            less where memory ends.

    Examples:
        >>> import undrift
        >>> model = undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
        >>> p = predict(model, torch.rand(5, 3, 2, 2), samples=4, generator=0)
        >>> p.probs.shape, bool((p.mutual_info >= 0).all())
        (torch.Size([5, 3]), True)
    """
    model = unwrapped(model)
    warn_of_preprocess(model, images, stacklevel=4)  # behind no_grad
    samples = _checked_samples(model, samples)
    generator = generator_or_seed(generator)
    number_above(temperature, 0, "temperature", "1 leaves the logits as they are.")
    if mode not in get_args(Mode):
        raise OptionError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}. full is the paper's.")
    if samples == 0 and isinstance(model, Perturbed):
        warn_of_mean(model)
    asking = Asking(model, generator, samples)
    whole = isinstance(images, Tensor | Mapping)
    batches = _batches(images, batch_size)
    if mode == "fast" and isinstance(model, Perturbed) and samples > 2:
        fold_limit = limit_of(model, fold_limit)
        if samples > 3 or fold_limit != 0:
            few = partial(_from_few, model, samples=samples, temperature=temperature, fold_limit=fold_limit)
            return answer(list(asking.each(batches, whole, few)), samples)
    full = partial(average, model, samples=samples, temperature=temperature, fold_limit=fold_limit)
    return Prediction.cat(asking.each(batches, whole, full))


@torch.no_grad()
def average(
    model: nn.Module, images: Tensor, samples: int, temperature: float = 1.0, fold_limit: int | None = None
) -> Prediction:
    """Return the prediction for one batch, in the mode the network is in, with the noise it comes to next."""
    images, sound = _sound(model, images)
    if len(images) == 0:
        return _unknown(model, images, sound)
    return average_sound(model, images, sound, samples, temperature, fold_limit)


@torch.no_grad()
def average_sound(
    model: nn.Module,
    images: Tensor,
    sound: Tensor | None,
    samples: int,
    temperature: float = 1.0,
    fold_limit: int | None = None,
) -> Prediction:
    """Return what `average` does, of images that are known to be finite; nothing of the device is waited for.

    Args:
        sound: for each image of the batch, whether it is among these; None where all are.
    """
    draws = max(samples, 1)
    with ExitStack() as stack:
        if isinstance(model, Perturbed):
            stack.enter_context(model.mean() if samples == 0 else model.rest())
        passes = draw(model, [images] * draws, fold_limit, partial(forward, model, given=images))
        softmaxes = (_at(logits, temperature).softmax(dim=1) for logits in passes)
        if draws == 1:
            return Prediction.of(next(softmaxes), None, sound)  # its launches count where a network is small
        sums = [
            [part.unflatten(0, (-1, len(images))).sum(0) for part in (softmax, entropy_of(softmax))]
            for softmax in softmaxes
        ]
    probs, entropy = (sum(parts[1:], parts[0]) / draws for parts in zip(*sums, strict=True))
    return Prediction.of(probs, entropy, sound)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network whose draws a caller asks for: the perturbed one inside a compiled or parallel one.

    Taken for a plain network either would answer with one noisy draw, and the one inside would move its statistics.
    """
    inner = root_of(model)
    while isinstance(inner, _WRAPPERS):
        inner = root_of(inner.module)
    if isinstance(inner, Perturbed):
        return inner
    if isinstance(model, nn.Module) and any(attached.key.enabled for attached in attached_to(model)):
        raise UndriftError(
            f"this {type(model).__name__} holds a perturbed network, or is the one inside; needed: what "
            "undrift.perturb returned. Give that; for the source's own answers: with model.off() as net."
        )
    return model


def _at(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _from_few(
    model: Perturbed, batch: Tensor, samples: int, temperature: float, fold_limit: int | None
) -> Few | Prediction:
    """Return what the mode "fast" finds for one batch; `fold_limit` is 0 where draws cannot share a pass."""
    images, sound = _sound(model, batch)
    if len(images) == 0:
        return _unknown(model, images, sound)
    if _launch_bound(images) and _one_pass(len(images) * samples, fold_limit):
        return average_sound(model, images, sound, samples, temperature, fold_limit)
    return _few(model, images, sound, temperature, fold_limit)


def _few(model: Perturbed, images: Tensor, sound: Tensor | None, temperature: float, fold_limit: int | None) -> Few:
    """Return what two draws of all images and a third of a part of them leave; nothing is waited for."""
    # A network that mixes the images of a pass would see others in a part of them.
    rows = evenly(images, 1.0 if fold_limit == 0 else THIRD)
    with model.rest():
        passes = list(draw(model, [images, images, images[rows]], fold_limit, partial(forward, model, given=images)))
    logits = passes[0] if len(passes) == 1 else torch.cat(passes)
    return Few.of(log_probs(_at(logits, temperature)), rows, sound)


def _launch_bound(images: Tensor) -> bool:
    """Return whether a small pass takes as long as its launches do, however few its rows are."""
    return images.device.type == "cuda"


def _one_pass(rows: int, fold_limit: int | None) -> bool:
    """Return whether all draws are the rows of one pass, which fewer draws would hardly undercut."""
    return rows <= SMALL and (fold_limit is None or rows <= fold_limit)


def forward(model: nn.Module, images: Tensor, given: Tensor | None = None) -> Tensor:
    """Return the network's logits, one row an image.

    Args:
        given: what the caller was given, where several draws of it are the rows of this pass.
    """
    try:
        logits = logits_of(model(images))
    except BaseException as error:
        # An error or Ctrl-C inside a norm layer: its flags are given back now, before eval mode ends.
        for policy in model.norms if isinstance(model, Perturbed) else []:
            policy.settle()
        if isinstance(error, Exception):
            refuse_unbatched(model, images if given is None else given, error)
        raise
    if len(logits) != len(images):
        refuse_unbatched(model, images if given is None else given)
        raise OutputError(
            f"the network returned {len(logits)} rows of logits for {len(images)} images; one row an image is needed. "
            "Wrap the network so that it returns that."
        )
    names = model.classes if isinstance(model, Perturbed) else None
    if names is not None and len(names) != logits.shape[1]:
        raise OutputError(
            f"the model has {len(names)} class names, its network {logits.shape[1]} outputs; each output needs one. "
            "Give perturb(classes=…) the names in the order of the outputs."
        )
    return logits


def finite_rows(images: Tensor) -> Tensor:
    """Return for each image whether all its values are finite."""
    # The largest of NaN and anything is NaN, which is below nothing: half the launches of isfinite, and no copy to
    # flatten images that lie channels-last.
    return images.detach().abs().amax(dim=tuple(range(1, images.ndim))) < torch.inf


@torch.no_grad()
def some_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits of blank images: they tell the number of classes when no image can be looked at."""
    blank = images.new_zeros(2, *images.shape[1:])
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if isinstance(model, Perturbed):
            stack.enter_context(keeping_noise(model.key))
            stack.enter_context(model.mean())
        return forward(model, blank)


def _sound(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the finite images, on the network's device, and for each image whether it is one; None where all are."""
    images = to_device(images, model)
    if len(images) == 0 or float(images.abs().amax()) < float("inf"):
        return images, None
    sound = finite_rows(images)
    return images[sound], sound


def sound_batches(model: nn.Module, images: Tensor | Iterable[Any], batch_size: int | None = None) -> Iterator[Tensor]:
    """Yield the finite images of each batch, on the network's device; a batch without any is left out."""
    for batch in _batches(images, batch_size):
        sound, _ = _sound(model, batch)
        if len(sound):
            yield sound


def _unknown(model: nn.Module, images: Tensor, sound: Tensor | None) -> Prediction:
    """Return the answer to a batch of which no image is finite, or that has none."""
    return Prediction.unknown(0 if sound is None else len(sound), some_logits(model, images))


def _checked_samples(model: nn.Module, samples: int | None) -> int:
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
        raise OptionError(
            f"samples={samples!r} is not a whole number from 0 up. 0 is the mean network, 10 the paper's."
        )
    if not isinstance(model, Perturbed):
        return 0
    return model.options.test_samples if samples is None else samples


def _batches(images: Tensor | Iterable[Any], batch_size: int | None) -> Iterator[Tensor]:
    """Yield the batches behind what a caller means by images."""
    batch_size = count_or_none(batch_size, "batch_size", "Leave it out to look at all images at once.")
    if isinstance(images, FileDomain | TensorDomain):
        images, batch_size = images.named_batches(batch_size or 100), None
    if isinstance(images, Tensor | Mapping):
        whole = images_of(images)
        if batch_size is None or batch_size >= len(whole):
            yield whole
        else:
            yield from whole.split(batch_size)
        return
    if batch_size is not None:
        raise OptionError("batch_size is for a tensor of images; a loader has its own. Leave it out.")
    if isinstance(images, str) or not isinstance(images, Iterable):
        raise DataError(
            f"images is a {type(images).__name__}; a tensor or an iterable of batches is needed. "
            "For a folder use undrift.images.domain."
        )
    for item in images:
        yield images_of(item)
