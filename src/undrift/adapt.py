"""Adapt a network to a domain: epochs over unlabelled images."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undrift import methods
from undrift._types import Keeper, Likelihood, Refreshing
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.judge.history import History
from undrift.likelihood import Shot, as_likelihood
from undrift.loop.epochs import Run
from undrift.loop.finite_images import FiniteImages
from undrift.loop.setup import Keep, adapting, epoch_plan, refuse_indivisible
from undrift.recipes.named import for_outputs, parts_of, scheme_on
from undrift.system.progress import Bar

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def adapt(
    model: nn.Module,
    unlabelled: Any,
    likelihood: Likelihood | Callable[..., Any] | None = None,
    epochs: int | None = None,
    *,
    method: str | None = None,
    batch_size: int | None = None,
    clean: Any = None,
    keep: Keep | None = None,
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

    A plain network without further arguments uses the method `undrift`. It first collects norm statistics of the
    images, and then trains the means of a Gaussian on every weight but the classifier's until neighbouring images
    agree (see `Nrc`). Steps see each image mirrored or shifted, if a label-free test finds that this changes no label.
    A network with fewer than a million weights whose neighbouring images often have different answers makes no step.
    If the network answers each pixel or label, steps lower the entropy of its answers instead, of all weights.

    Each step minimises the objective of paper eq. 3 on one batch, with the number of images as the data size n:

        mean over train_samples draws of likelihood(logits) + kl_weight · KL / n

    `model.options` sets optimiser, learning rates and norm statistics; the rates follow SHOT's schedule. Modules other
    than norm layers run in eval mode (no dropout). All train/eval flags are restored at the end. No label is read.

    Images with NaN or infinity are skipped. A batch of one image is skipped if others are larger and norm layers use
    the batch. A batch takes no step if the likelihood returns None, or if its loss or gradient is not finite; then
    nothing changes. The history counts all of these. After an error or Ctrl-C the model is usable and in the state of
    the last whole step; a plain network is as it was before the call instead.

    With a process group of `torch.distributed`, its processes adapt one network together: pass each the same network,
    options and whole data set. Each takes a part of every batch, and all take the same steps as one process would.

    Args:
        model: a plain network, or one from `undrift.perturb` with its options; not wrapped in DistributedDataParallel.
        unlabelled: a DataLoader, a Dataset, a tensor of images, a domain of `undrift.images`, a list of batches, or
            another iterable that can be repeated. Images are the first entry of a tuple, or the entry of a dict with a
            name such as "image" or "pixel_values". A collate_fn must keep the order of its samples; it may drop
            those that are None.
        likelihood: the loss, with a perturbed network. Default: `undrift.Shot()`, the paper's offline choice.
        epochs: passes over the images. Default: 15, or the method's.
        method: a name of `undrift.methods.names("adapt")`, for a plain network; `history.model` is the adapted network.
            Default for a plain network: "undrift".
        batch_size: size of batches made from a Dataset, a tensor or a domain. Default: 64, or the method's.
        clean: the same images in the same order without augmentation, for pseudo-labels and the verdict. With it,
            `undrift` leaves augmentation to the caller.
        keep: the epoch to keep. "last"; "best": the one with the best label-free verdict (one more forward pass per
            epoch); "safe": the last, but the source network without noise if the verdict says that adaptation hurt.
            Default: "safe" with the methods `undrift` and `undrift-light`, else "last".
        checkpoint: a file to write after each epoch, and to resume from if it exists. A killed run ends bit for bit
            where it would have ended, if augmentations in this process use torch's generators (in workers, any).
        checkpoint_steps: also write it every so many steps.
        keepers: what keeps the network near the source besides the KL (see `undrift.keep`).
        generator: a CPU generator for the order of batches made here. Default: seeded from torch's global one.
        preprocess: with a plain network, its preprocessing of images; `classes`: the names of its classes. Both are
            saved with the model.
        progress: show a bar. Default: on a terminal only.
        **settings: with a plain network, options and settings of the method's likelihood or keepers by name, such as
            `features="fc1"`.

    Returns:
        The history; `history.verdict` says without labels whether the network collapsed, and whether adaptation helped.

    Examples:
        >>> from undrift import perturb
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(),
        ...                           torch.nn.Linear(8 * 36, 5))
        >>> history = adapt(perturb(net), torch.rand(32, 3, 8, 8), epochs=2)
        >>> [row.epoch for row in history.epochs]
        [1, 2]
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 3))
        >>> history = adapt(net, torch.rand(32, 3, 2, 2), epochs=1)
        >>> history.model.remove() is net
        True
    """
    order = generator or torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    recipe = methods.chosen(method, "adapt", model, likelihood, keepers)
    recipe = recipe and for_outputs(recipe, model, unlabelled, settings)
    parts = parts_of(recipe, "adapt", model, settings, likelihood, keepers, preprocess, classes)
    epochs = epochs if epochs is not None else 15 if recipe is None else recipe.epochs
    batch_size = batch_size if batch_size is not None else 64 if recipe is None else recipe.batch_size
    keep = keep if keep is not None else "last" if recipe is None else recipe.keep
    plan = epoch_plan(epochs, batch_size, keep, checkpoint, checkpoint_steps)
    with scheme_on(model, recipe, parts.options, order, preprocess, classes) as perturbed:
        warn_of_preprocess(perturbed, unlabelled, clean)
        loss = as_likelihood(Shot() if parts.likelihood is None else parts.likelihood)
        refuse_indivisible(perturbed, loss, parts.keepers)
        keeps_labels = isinstance(loss, Refreshing)  # by the image's place in the domain
        images = FiniteImages(perturbed, unlabelled, clean, plan.batch_size, order, same_places=keeps_labels)
        with adapting(perturbed, loss):
            run = Run(perturbed, images, loss, parts.keepers, plan, from_plain=recipe is not None)
            run.prepare()
            images.warn()
            with Bar("adapt", run.steps, progress, done=run.steps_done) as bar:
                history = run.go(bar)
            images.warn()  # a run that goes on, or has clean images, sees some of them only now
            return history if recipe is None or not recipe.note else replace(history, note=recipe.note)
