"""Adapt a network to a domain: epochs over unlabelled images."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undrift import methods
from undrift._types import Keeper, Likelihood, Refreshing
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.judge.history import History
from undrift.likelihood import Shot, as_likelihood
from undrift.loop.begin import Keep, adapting, epoch_plan, given_back, perturbed
from undrift.loop.epochs import Run
from undrift.loop.many_processes import refuse_undivided
from undrift.loop.sound_images import SoundImages
from undrift.recipes.named import parts_of
from undrift.recipes.perturb_plain import perturb_plain
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

    A plain network with nothing else chosen takes the recipe `undrift`: norm statistics see the images first, then the
    means of a Gaussian on every weight but the classifier's move until neighbouring images agree (see `Nrc`). Steps see
    each image mirrored or moved a little, where that is found to change no label.

    Each step goes down the objective of paper eq. 3 for one batch, with the number of images as the data size n:

        mean over train_samples draws of likelihood(logits) + kl_weight · KL / n

    Optimiser, learning rates and norm statistics are those of `model.options`; the rates fall as SHOT's do. Modules
    other than norm layers run in eval mode (no dropout). All train/eval flags come back at the end. No label is read.

    Images with NaN or infinity are skipped. A batch of one image is left out where others are larger and norm layers
    look at the batch. A batch of which the likelihood asks nothing makes no step, nor does one whose loss or gradient
    is not finite: that one leaves no trace. The history counts all of these. After an error or Ctrl-C the model stands
    at the last whole step and can be used; with a plain network it is as it was before the call instead.

    Where `torch.distributed` has a process group, its processes adapt one network together: give each the same network,
    options and whole data set. Each takes a part of every batch, and all make the same steps as one process would.

    Args:
        model: a plain network; or one from `undrift.perturb`, to be adapted as its options say. Neither is wrapped in
            DistributedDataParallel.
        unlabelled: a DataLoader, a Dataset, a tensor of images, a domain of `undrift.images`, a list of batches, or
            another iterable that gives batches every time. Of a tuple the first entry is the image, of a dict the one
            called so. A collate_fn keeps the order of its samples; it may leave out those that are None.
        likelihood: what is asked of the images, with a perturbed network. Default: `undrift.Shot()`, the paper's
            offline choice.
        epochs: passes over the images. Default: 15, or as the method has it.
        method: a name of `undrift.methods.names("adapt")`. It perturbs the plain network as that method does, and asks
            what it asks; `history.model` is the network it adapted. Default for a plain network: "undrift".
        batch_size: of batches made here, from a Dataset, a tensor or a domain. Default: 64, or as the method has it.
        clean: the same images at the same places without augmentation, for pseudo-labels and the verdict. With it,
            `undrift` leaves augmentation to the caller.
        keep: "last", or "best": the epoch that the label-free verdict likes best (one more forward pass per epoch).
        checkpoint: a file to write after each epoch, and to go on from if it is there. A run that was killed ends bit
            for bit where it would have ended, if augmentations in this process draw from torch's generators (in
            workers, from any).
        checkpoint_steps: write it every so many steps as well.
        keepers: what holds on to the source besides the KL (see `undrift.keep`).
        generator: gives the order of batches made here; a CPU generator. Default: torch's global one seeds it.
        preprocess: with a plain network, what happens to an image before the network sees it; `classes`: their names.
            Both are saved with the model.
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
    parts = parts_of(recipe, settings, likelihood=likelihood, keepers=keepers, preprocess=preprocess, classes=classes)
    epochs = epochs if epochs is not None else 15 if recipe is None else recipe.epochs
    batch_size = batch_size if batch_size is not None else 64 if recipe is None else recipe.batch_size
    plan = epoch_plan(epochs, batch_size, keep, checkpoint, checkpoint_steps)
    with ExitStack() as stack:
        if parts is None:
            model = perturbed(model, "adapt")
        else:
            model = perturb_plain(model, parts.options, order, preprocess, classes)
            stack.enter_context(given_back(model))
            likelihood, keepers = parts.likelihood, parts.keepers
        warn_of_preprocess(model, unlabelled, clean)
        asked = as_likelihood(Shot() if likelihood is None else likelihood)
        refuse_undivided(model, asked, keepers)
        by_place = isinstance(asked, Refreshing)  # it keeps labels by an image's place
        images = SoundImages(model, unlabelled, clean, plan.batch_size, order, strict=by_place)
        stack.enter_context(adapting(model, asked))
        run = Run(model, images, asked, keepers, plan, lent=parts is not None)
        run.prepare()
        images.warn()
        with Bar("adapt", run.steps, progress, done=run.steps_done) as bar:
            history = run.go(bar)
        images.warn()  # a run that goes on, or has clean images, sees some of them only now
        return history
