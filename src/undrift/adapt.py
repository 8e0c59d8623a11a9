"""Adapt a perturbed network to a domain: epochs over unlabelled images."""

import os
from collections.abc import Callable
from typing import Any, Literal

import torch

from undrift import _atomic
from undrift._errors import DataError, OptionError, UndriftError
from undrift._progress import Bar
from undrift._resume import mark_of
from undrift._run import Run
from undrift._types import Likelihood, Refreshing
from undrift._unlabelled import Unlabelled, unlabelled_of
from undrift.history import History
from undrift.layers import evaluating
from undrift.likelihood import Shot, as_likelihood
from undrift.perturb import Perturbed

Keep = Literal["last", "best"]


def adapt(
    model: Perturbed,
    unlabelled: Any,
    likelihood: Likelihood | Callable[..., Any] | None = None,
    epochs: int = 15,
    *,
    batch_size: int = 64,
    clean: Any = None,
    keep: Keep = "last",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_steps: int | None = None,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> History:
    """Adapt the model in place to a domain, and return what happened.

    Each step goes down likelihood + KL (paper eq. 3) for one batch and `train_samples` draws; optimiser, learning rates
    and norm statistics are those of `model.options` (docs/options.md), the rates fall as SHOT's do. Modules other than
    norm layers run in eval mode (no dropout); all train/eval flags come back at the end. No label is ever read.

    A batch of one image is left out where others are larger and norm layers look at the batch: one image is no sample
    of a domain (SHOT drops such a batch too). Images with NaN or infinity are skipped; a step whose loss or gradient is
    not finite is not made, and leaves no trace. All are counted in the history.

    After an error or Ctrl-C the model is usable: it stands at the last whole step.

    Args:
        model: from `undrift.perturb`; not wrapped in DistributedDataParallel.
        unlabelled: a DataLoader, a Dataset, a tensor of images, a domain of `undrift.data`, a list of batches, or
            another iterable that gives batches every time. Of a tuple the first entry is the image, of a dict the one
            called so.
        likelihood: what is asked of the images; None is `undrift.Shot()`, the paper's offline choice.
        epochs: passes over the images.
        batch_size: where the batches are made here, from a Dataset, a tensor or a domain.
        clean: the same images at the same places without augmentation, for pseudo-labels and the verdict; None takes
            `unlabelled` for both.
        keep: "last", or "best": the epoch that the label-free verdict likes best (costs a forward pass an epoch).
        checkpoint: a file to write after each epoch, and to go on from if it is there: a run that was killed ends bit
            for bit where it would have ended (augmentations in this process have to draw from torch's generators for
            that; in workers they may draw from any).
        checkpoint_steps: write it every so many steps as well.
        generator: gives the order of batches made here; a CPU generator. Without it torch's global one seeds it.
        progress: show a bar; None shows it on a terminal only.

    Returns:
        The history; `history.verdict` says whether the network collapsed.

    Examples:
        >>> from undrift import perturb
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
        ...                           torch.nn.Linear(8 * 36, 5))
        >>> history = adapt(perturb(net), torch.rand(32, 3, 8, 8), epochs=2)
        >>> [row.epoch for row in history.epochs]
        [1, 2]
    """
    _check_model(model)
    problems = [
        f"{name}={value!r} is {needed}"
        for name, value, needed, wrong in (
            ("epochs", epochs, "not a whole number from 1 up", not _whole(epochs)),
            ("batch_size", batch_size, "not a whole number from 1 up", not _whole(batch_size)),
            ("keep", keep, "not one of last, best", keep not in ("last", "best")),
            (
                "checkpoint_steps",
                checkpoint_steps,
                "not None or a whole number from 1 up, with a checkpoint to write",
                checkpoint_steps is not None and (checkpoint is None or not _whole(checkpoint_steps)),
            ),
        )
        if wrong
    ]
    if problems:
        raise OptionError("; ".join(problems) + ". `help(undrift.adapt)` says what each is.")
    if checkpoint is not None:
        _atomic.check(checkpoint)
    asked = as_likelihood(Shot() if likelihood is None else likelihood)
    order = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    data = unlabelled_of(unlabelled, batch_size, order)
    looked_at = data if clean is None else unlabelled_of(clean, batch_size, order)
    _check_places(asked, data, looked_at)
    with evaluating(model):
        model.key.train()  # moving statistics move; everything else stays in eval mode
        try:
            mark = None if checkpoint is None else mark_of(unlabelled)
            run = Run(model, data, looked_at, asked, epochs, keep == "best", checkpoint, checkpoint_steps, mark)
            run.prepare()
            with Bar("adapt", epochs * data.steps, progress, done=run.steps_done) as bar:
                return run.go(bar)
        finally:
            for policy in model.norms:
                policy.settle()  # Ctrl-C inside a norm layer leaves it with the flags of its policy


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_model(model: object) -> None:
    if not isinstance(model, Perturbed):
        inner = getattr(model, "module", None)
        do = "Give it the network inside: model.module." if isinstance(inner, Perturbed) else ""
        raise UndriftError(
            f"got a {type(model).__name__}; undrift.adapt needs a perturbed network. "
            + (do or "Make one: undrift.perturb(net).")
        )
    if model._removed or not model.key.enabled:
        raise UndriftError(
            f"the perturbation {'was removed' if model._removed else 'is off'}; undrift.adapt needs it in place. "
            + ("Perturb the network again." if model._removed else "Call adapt outside of model.off().")
        )
    if torch.is_inference_mode_enabled():
        raise UndriftError("adapt was called in inference mode, where nothing has a gradient. Leave inference_mode().")


def _check_places(likelihood: Likelihood, data: Unlabelled, looked_at: Unlabelled) -> None:
    """Raise before any training where pseudo-labels could not be matched to their images."""
    if looked_at.size != data.size:
        raise DataError(
            f"clean has {looked_at.size} images, unlabelled {data.size}; they are the same images at the same places. "
            "Make both from the same data set, with and without augmentation."
        )
    if isinstance(likelihood, Refreshing) and not (data.aligned and looked_at.aligned):
        raise DataError(
            "two passes over unlabelled gave different images at the same position, and this likelihood keeps a label "
            "for each image. Give a DataLoader over a data set with a length (it may shuffle and augment), a tensor, "
            "or a list of batches."
        )
