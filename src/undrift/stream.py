"""Adaptation batch by batch, as images arrive: one answer and one step a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import length_hint
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError
from undrift._types import Keeper, Watching
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.likelihood import as_likelihood, entropy
from undrift.loop.adaptable import perturbed, refuse_off
from undrift.loop.balanced import BalancedGather
from undrift.loop.captured import check_recordable
from undrift.loop.gather import Gather, between_steps, check_gather
from undrift.loop.guard import Guard
from undrift.loop.named_method import given_back, named
from undrift.loop.online import OnlineSteps
from undrift.loop.optimise import make_optimiser, own_parameters
from undrift.loop.streaming import Stream
from undrift.options import Answer, _suggest
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.scheme import perturb_plain
from undrift.system.progress import Bar
from undrift.system.validate import number_from

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def stream(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: Callable[..., Any] | None = None,
    *,
    method: str | None = None,
    answer: Answer | None = None,
    lr: float | None = None,
    episodic: bool | None = None,
    guard: bool = False,
    captured: bool = False,
    gather: int | None = None,
    balanced: bool = False,
    keepers: Sequence[Keeper] = (),
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
    progress: bool = False,
    **settings: Any,
) -> "Stream":
    """Return an iterator that adapts the network batch by batch and yields one `Prediction` a batch.

    Each batch makes one step on paper eq. 3, with the images seen so far as the data size n:

        mean over train_samples draws of likelihood(logits) + kl_weight · KL / n

    Moving norm statistics move once a batch. Images with NaN or infinite values take no part; their answer is uniform
    with label −1. A batch whose loss or gradient is not finite, or without a finite image, makes no step and leaves
    nothing behind. All is counted in `report`. Batch statistics need more than one value a channel: a batch of one
    image in front of a 1×1 map raises; the state is untouched and the stream goes on with the next batch.

    Args:
        model: a perturbed network; with `method`, a plain one. It belongs to the user between batches: flags, noise and
            gradients are as before.
        batches: an iterable of batches (a loader, a camera); labels are not looked at.
        likelihood: what is asked; a callable of logits, or of logits and step. Default: `undrift.entropy`.
        method: a name of `undrift.methods.names("stream")`; perturbs the plain network as that method does and asks
            what it asks. `Stream.remove()` gives the network back, as does the end of the Stream where nobody holds
            its `model`.
        answer: "before", the noisy forward pass that gave the gradient; "after", one after the step; or "samples",
            test_samples draws after the step. Default: the option `answer`.
        lr: learning rate. Default: the option `stream_lr`.
        episodic: start every batch from the state the stream started with, noise included. Default: no, or as the
            method does.
        guard: put the network back to that state when it predicts far fewer classes than the source network does on the
            same images (see `undrift.loop.guard`). Two more forward passes a batch.
        captured: on a GPU, make one CUDA graph of the gradient's computation: three batches of one size run as they
            are, the fourth is recorded, and from then on none of that waits for Python. Answers, noise and statistics
            are what they are without it, up to rounding. Batches of other sizes run as they are, as do all on a CPU. A
            replay calls no hook of yours on the network, and what a module keeps in plain attributes (a counter, an
            eps) is as it was when it was recorded. The likelihood has to say `recordable = True`, as `entropy`
            and `Information` do: it reads no values back, and no shape in it depends on values. A keeper with a
            `penalty` has to say so too.
        gather: make a step only when so many images have come since the last one, on all of them: for images that come
            one by one, which have no batch statistics to speak of. Answers wait for nothing. They are the network's
            after its last step, under the statistics that this step left (before the first one the source's; of a named
            method with `norm_statistics="batch"`, "train" takes its place), and with as many draws as without `gather`;
            a likelihood's own answers (ROID's prior, CoTTA's views) need a batch, and are left out. Images of one size
            make a step together. What is left when the stream ends is not learned.
        balanced: with `gather`, make steps on a memory of so many images that has as many of each class that the
            network predicts, the newest of each: for streams whose classes come in runs (a camera that looks at one
            thing for a while), which ruin what normalises by the batch. Once it is full, a step is made whenever half
            as many images have come as it has room for, but none while one class has more than half of it: until a
            second one comes, the source answers. An image may be learned from in several steps, or in none; what came
            before 16 times as many others is forgotten. A step takes one more pass over its batch.
        keepers: what holds on to the source beside the KL (see `undrift.keep`).
        generator: with `method`, makes the noise reproducible.
        preprocess: with `method`, what happens to an image before the network sees it; `classes`: their names. Both go
            with the model into its file.
        progress: show a progress bar on a terminal.
        **settings: with `method`, options and settings of its likelihood or keepers by name, such as `stream_lr=1e-4`.

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
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"batches is a {type(batches).__name__}; a stream needs an iterable of batches. "
            "Give a loader, a generator, a tensor's parts (images.split(200)), or a domain's "
            "(domain.named_batches(200))."
        )
    given = {"likelihood": likelihood, "keepers": tuple(keepers) or None, "preprocess": preprocess, "classes": classes}
    begun = named("stream", method, settings, given)
    options = perturbed(model).options if begun is None else begun[1].options
    chosen = options.answer if answer is None else answer
    if chosen not in get_args(Answer):
        known = get_args(Answer)
        raise OptionError(
            f"answer={chosen!r} is not one of {', '.join(known)}{_suggest(str(chosen), known)}. Leave it out for the "
            f"options' own, {options.answer}."
        )
    rate: Any = options.stream_lr if lr is None else lr
    number_from(rate, 0, "lr", "The paper's are 7e-5 to 1e-3.")
    # Callers often predict under inference_mode, and what is made there could never be trained.
    with torch.inference_mode(False), ExitStack() as failing, ExitStack() as watched:
        if begun is not None:
            recipe, parts = begun
            chosen_options = parts.options if gather is None else between_steps(parts.options)
            model = perturb_plain(model, chosen_options, generator, preprocess, classes)
            failing.enter_context(given_back(model))
            likelihood, keepers = parts.likelihood, parts.keepers
            episodic = recipe.episodic if episodic is None else episodic
        assert isinstance(model, Perturbed)
        refuse_off(model)
        least = check_gather(gather, balanced, model, bool(episodic))
        gathers = None if least is None else (BalancedGather if balanced else Gather)(least)
        warn_of_preprocess(model, batches)
        asked = as_likelihood(entropy if likelihood is None else likelihood)
        if captured:
            check_recordable(model, asked, keepers)
        if isinstance(asked, Watching):
            # First of all: a likelihood may make parameters of its own once it sees the network.
            watched.enter_context(asked.watch(model))
        optimiser = make_optimiser(model, options.stream_optimiser, rate, own=own_parameters(asked))
        total = length_hint(batches) or None
        online = OnlineSteps(model, asked, optimiser, Guard() if guard else None, keepers, captured)
        bar = Bar("stream", total) if progress else None
        going = Stream(online, iter(batches), chosen, bool(episodic), gathers, bar, watched.pop_all())
        if begun is not None:
            model.give_back()
        return going
