"""Adapt batch by batch, as images arrive: one answer and one step per batch."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from operator import length_hint
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undrift import methods
from undrift._types import Keeper
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.likelihood import as_likelihood, entropy
from undrift.loop.captured import check_recordable
from undrift.loop.gather import with_kept_statistics
from undrift.loop.online import OnlineSteps
from undrift.loop.optimise import make_optimiser, own_parameters
from undrift.loop.setup import batch_plan, check_batches, watched_by
from undrift.loop.streaming import Stream
from undrift.options import Answer
from undrift.packs.open_packs import Place
from undrift.recipes.named import parts_of, scheme_on
from undrift.system.progress import Bar

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess
    from undrift.packs.collection import Packs


def stream(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Callable[..., Any] | None = None,
    *,
    method: str | None = None,
    answer: Answer | None = None,
    lr: float | None = None,
    episodic: bool | None = None,
    guard: bool | None = None,
    captured: bool = False,
    gather: int | None = None,
    balanced: bool = False,
    packs: "Packs | Place | Sequence[Place] | None" = None,
    keepers: Sequence[Keeper] = (),
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
    progress: bool = False,
    **settings: Any,
) -> "Stream":
    """Return an iterator that adapts the network batch by batch and yields one `Prediction` per batch.

    A plain network without further arguments uses the method `undrift`: noisy weights learn from an average of the
    network's own past over several views of each image (see `Teacher`).

    Each batch takes one step on paper eq. 3, with the images seen so far as the data size n:

        mean over train_samples draws of likelihood(logits) + kl_weight · KL / n

    Moving norm statistics are updated once per batch. Images with NaN or infinite values are left out; their answer is
    uniform with label −1. A batch without a finite image, loss or gradient takes no step and changes nothing. `report`
    counts all of these. Batch statistics need more than one value per channel: a batch of one image in front of a 1×1
    map raises an error, and the stream can continue with the next batch. Between batches you can use the network: its
    flags, noise and gradients are as before.

    Args:
        model: a plain network, or one from `undrift.perturb` with its options.
        batches: an iterable of batches (a loader, a camera); labels are not read.
        likelihood: the loss, with a perturbed network; a callable of logits, or of logits and step. Default:
            `undrift.entropy`.
        method: a name of `undrift.methods.names("stream")`, for a plain network. `Stream.remove()` restores the
            network; so does deleting the Stream if nothing refers to its `model`. Default for a plain network:
            "undrift".
        answer: "before", the noisy forward pass that gave the gradient; "after", one after the step; or "samples",
            test_samples draws after the step. Default: the option `answer`.
        lr: learning rate. Default: the option `stream_lr`.
        episodic: start every batch from the stream's initial state, noise included. Default: the method's, else False.
        guard: compare one batch in twelve with the source network, without labels; if the network has become worse,
            restore its last sound state, or the source, and record it in `report.events`. Default: True with `undrift`
            and `undrift-light`.
        captured: on a GPU, record the gradient's computation as one CUDA graph, at the fourth batch of one size.
            Answers and steps are the same up to rounding. Likelihood and penalties have to be `recordable`.
        gather: for single images: answer each batch at once, but take a step only on so many images together. The
            network after its last step gives the answers; answers of a likelihood (ROID's prior, CoTTA's views) need a
            batch and are not used. Images that wait when the stream ends are not learned from. `undrift` decides this,
            and `balanced`, itself.
        balanced: with `gather`, take steps on a memory of so many images with equally many of each predicted class,
            for streams whose classes come in runs. One more forward pass per step.
        packs: known domains: packs, a folder of them, or a `Packs`; with `packs=()` the stream remembers the domains
            that it sees. It starts from the pack that fits, and restores what it learned when a known domain returns.
            `Stream.domain` names the domain, `Stream.keep(path)` saves it. One more forward pass per batch.
        keepers: what keeps the network near the source besides the KL (see `undrift.keep`).
        generator: with a plain network, makes the noise reproducible.
        preprocess: with a plain network, its preprocessing of images; `classes`: the names of its classes. Both are
            saved with the model.
        progress: show a progress bar on a terminal.
        **settings: with a plain network, options and settings of the method's likelihood or keepers by name, such as
            `stream_lr=1e-4`.

    Examples:
        >>> import undrift
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
        >>> camera = (torch.rand(4, 3, 2, 2) for _ in range(2))
        >>> model = undrift.perturb(net)
        >>> [p.label.shape[0] for p in stream(model, camera)]
        [4, 4]
        >>> [p.label.shape[0] for p in stream(model.remove(), [torch.rand(4, 3, 2, 2)], method="source")]
        [4]
    """
    check_batches(batches)
    recipe = methods.chosen(method, "stream", model, likelihood, keepers)
    parts = parts_of(recipe, "stream", model, settings, likelihood, keepers, preprocess, classes)
    scheme = parts.options if gather is None else with_kept_statistics(parts.options)
    episodic = bool(recipe and recipe.episodic) if episodic is None else bool(episodic)
    # Callers often predict under inference_mode, and what is made there could never be trained.
    with torch.inference_mode(False), scheme_on(model, recipe, scheme, generator, preprocess, classes) as perturbed:
        plan = batch_plan(perturbed, answer, lr, episodic, guard, gather, balanced, packs)
        warn_of_preprocess(perturbed, batches)
        loss = as_likelihood(entropy if parts.likelihood is None else parts.likelihood)
        if captured:
            check_recordable(perturbed, loss, parts.keepers)
        with ExitStack() as watched:
            # Before the optimiser: a likelihood may make parameters of its own once it sees the network.
            watched.enter_context(watched_by(perturbed, loss))
            optimiser = make_optimiser(perturbed, perturbed.options.stream_optimiser, plan.lr, own=own_parameters(loss))
            steps = OnlineSteps(perturbed, loss, optimiser, parts.keepers, captured)
            bar = Bar("stream", length_hint(batches) or None) if progress else None
            answers = Stream(steps, iter(batches), plan, bar, watched)
        if recipe is not None:
            perturbed.remove_when_unused()
        return answers
