"""Adapt a perturbed network to a domain: epochs over unlabelled images."""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from undrift._errors import DataError, OptionError, UndriftError, UndriftWarning
from undrift._types import Keeper, Likelihood, Refreshing, Watching
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.judge.history import History
from undrift.likelihood import Shot, as_likelihood
from undrift.loop.epochs import Run
from undrift.loop.named_method import given_back, named
from undrift.loop.resume import mark_of
from undrift.loop.unlabelled import Unlabelled, unlabelled_of
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.recipes.perturb_plain import perturb_plain
from undrift.system import atomic
from undrift.system.progress import Bar

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

Keep = Literal["last", "best"]


def adapt(
    model: nn.Module,
    unlabelled: Any,
    likelihood: Likelihood | Callable[..., Any] | None = None,
    epochs: int | None = None,
    *,
    method: str | None = None,
    batch_size: int | None = None,
    clean: Any = None,
    keep: Keep = "last",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_steps: int | None = None,
    keepers: Sequence[Keeper] = (),
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> History:
    """Adapt the model in place to a domain, and return what happened.

    Each step goes down likelihood + KL (paper eq. 3) for one batch and `train_samples` draws; optimiser, learning rates
    and norm statistics are those of `model.options` (docs/options.md), the rates fall as SHOT's do. Modules other than
    norm layers run in eval mode (no dropout); all train/eval flags come back at the end. No label is ever read.

    A batch of one image is left out where others are larger and norm layers look at the batch: one image is no sample
    of a domain (SHOT drops such a batch too). Images with NaN or infinity are skipped; a step whose loss or gradient is
    not finite is not made, and leaves no trace. All are counted in the history.

    A batch of which the likelihood asks nothing makes no step. After an error or Ctrl-C the model is usable: it stands
    at the last whole step. With `method` nobody else has that model: the network is as it was before the call, and a
    checkpoint holds the state.

    Args:
        model: from `undrift.perturb`; not wrapped in DistributedDataParallel. With `method`, the plain network.
        unlabelled: a DataLoader, a Dataset, a tensor of images, a domain of `undrift.images`, a list of batches, or
            another iterable that gives batches every time. Of a tuple the first entry is the image, of a dict the one
            called so. A collate_fn keeps the order of its samples; it may leave out those that are None.
        likelihood: what is asked of the images; None is `undrift.Shot()`, the paper's offline choice.
        epochs: passes over the images; 15, or as the method has it.
        method: a name of `undrift.methods.names("adapt")`; perturbs the plain network as that method does and asks what
            it asks. `history.model` is the network it adapted.
        batch_size: where the batches are made here, from a Dataset, a tensor or a domain; 64, or as the method has it.
        clean: the same images at the same places without augmentation, for pseudo-labels and the verdict; None takes
            `unlabelled` for both.
        keep: "last", or "best": the epoch that the label-free verdict likes best (costs a forward pass an epoch).
        checkpoint: a file to write after each epoch, and to go on from if it is there: a run that was killed ends bit
            for bit where it would have ended (augmentations in this process have to draw from torch's generators for
            that; in workers they may draw from any).
        checkpoint_steps: write it every so many steps as well.
        keepers: what holds on to the source beside the KL (see `undrift.keep`).
        generator: gives the order of batches made here; a CPU generator. Without it torch's global one seeds it.
        preprocess: with `method`, what happens to an image before the network sees it; `classes`: their names. Both go
            with the model into its file.
        progress: show a bar; None shows it on a terminal only.
        **settings: with `method`, options and settings of its likelihood or keepers by name, such as `features="fc1"`.

    Returns:
        The history; `history.verdict` says whether the network collapsed.

    Examples:
        >>> from undrift import perturb
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
        ...                           torch.nn.Linear(8 * 36, 5))
        >>> history = adapt(perturb(net), torch.rand(32, 3, 8, 8), epochs=2)
        >>> [row.epoch for row in history.epochs]
        [1, 2]
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 3))
        >>> history = adapt(net, torch.rand(32, 3, 2, 2), method="shot", epochs=1)
        >>> history.model.remove() is net
        True
    """
    order = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    given = {"likelihood": likelihood, "keepers": tuple(keepers) or None, "preprocess": preprocess, "classes": classes}
    begun = named("adapt", method, settings, given)
    usual = (15, 64) if begun is None else (begun[0].epochs, begun[0].batch_size)
    epochs, batch_size = usual[0] if epochs is None else epochs, usual[1] if batch_size is None else batch_size
    if begun is None:
        _check_model(model)
    if torch.is_inference_mode_enabled():
        raise UndriftError("adapt was called in inference mode, where nothing has a gradient. Leave inference_mode().")
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
        atomic.check(checkpoint)
    with ExitStack() as stack:
        if begun is not None:
            model = perturb_plain(model, begun[1].options, order, preprocess, classes)
            stack.enter_context(given_back(model))
            likelihood, keepers = begun[1].likelihood, begun[1].keepers
        assert isinstance(model, Perturbed)
        warn_of_preprocess(model, unlabelled, clean)
        asked = as_likelihood(Shot() if likelihood is None else likelihood)
        strict = isinstance(asked, Refreshing)  # keeps labels by an image's place
        data = unlabelled_of(unlabelled, batch_size, order, strict)
        looked_at = data if clean is None else unlabelled_of(clean, batch_size, order, strict)
        _check_sizes(data, looked_at)
        stack.enter_context(evaluating(model))
        if isinstance(asked, Watching):
            stack.enter_context(asked.watch(model))
        model.key.train()  # moving statistics move; everything else stays in eval mode
        try:
            mark = None if checkpoint is None else mark_of(unlabelled)
            best = keep == "best"
            run = Run(model, data, looked_at, asked, epochs, best, checkpoint, checkpoint_steps, mark, keepers)
            run.lent = begun is not None
            run.prepare()
            _warn(data, looked_at)
            with Bar("adapt", epochs * data.steps, progress, done=run.steps_done) as bar:
                history = run.go(bar)
            _warn(data, looked_at)  # a run that goes on, or has clean images, sees some of them only now
            return history
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


def _check_sizes(data: Unlabelled, looked_at: Unlabelled) -> None:
    if looked_at.size != data.size:
        raise DataError(
            f"clean has {looked_at.size} images, unlabelled {data.size}; they are the same images at the same places. "
            "Make both from the same data set, with and without augmentation."
        )


def _warn(*looked_at: Unlabelled) -> None:
    """Say what the images' passes so far gave reason to, once."""
    for data in looked_at:
        while data.doubts:
            warnings.warn(data.doubts.pop(), UndriftWarning, stacklevel=3)
