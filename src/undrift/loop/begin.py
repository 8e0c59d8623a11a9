"""Begin an adaptation: check the arguments, set the network's modes, and undo everything if something fails."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift._types import Likelihood, Watching
from undrift.options import Answer, Options, _suggest
from undrift.posterior.attached import root_of
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.system import atomic
from undrift.system.validate import a_type, instead_of, number_from

Keep = Literal["last", "best"]


def perturbed(model: nn.Module, verb: str) -> Perturbed:
    """Return the model, where it is a perturbed network with its perturbation in place."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is {a_type(model)}; undrift.{verb} needs a torch.nn.Module. "
            + instead_of(model, "Give it the network.")
        )
    if not isinstance(model, Perturbed):
        to_do = (
            f'Perturb it first: undrift.{verb}(undrift.perturb(net), …); or name a method, method="tent"; or leave '
            "likelihood and keepers out, for the default one."
        )
        if isinstance(getattr(model, "module", None), Perturbed):
            to_do = "Give it the network inside: model.module."
        elif isinstance(root_of(model), Perturbed):
            to_do = "Give it the network that was compiled: model._orig_mod."
        raise OptionError(f"model is {a_type(model)}; undrift.{verb} needs a perturbed network. {to_do}")
    refuse_off(model, verb)
    return model


def refuse_off(model: Perturbed, verb: str) -> None:
    """Raise where the source's own weights are in the network: a step would train them."""
    needed = f"undrift.{verb} needs it in place"
    if model._removed:
        raise UndriftError(f"the perturbation was removed; {needed}. Perturb the network again.")
    if not model.key.enabled:
        raise UndriftError(f"the perturbation is off; {needed}. Call it, and step a stream, outside of model.off().")


@dataclass(frozen=True)
class EpochPlan:
    """How `adapt` goes through the images; made by `epoch_plan`.

    Attributes:
        keep_best: whether the epoch that the verdict likes best is kept, instead of the last.
        checkpoint: the file to write after each epoch, and every `checkpoint_steps` steps.
    """

    epochs: int
    batch_size: int
    keep_best: bool
    checkpoint: str | os.PathLike[str] | None
    checkpoint_steps: int | None


def epoch_plan(
    epochs: Any,
    batch_size: Any,
    keep: Any,
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_steps: Any,
) -> EpochPlan:
    """Return the arguments of `adapt` that say how it goes through the images; raise one error for all wrong ones."""
    if torch.is_inference_mode_enabled():
        raise UndriftError("adapt was called in inference mode, where nothing has a gradient. Leave inference_mode().")
    steps_wrong = checkpoint_steps is not None and (checkpoint is None or not _count(checkpoint_steps))
    problems = [
        f"{name}={value!r} is {needed}"
        for name, value, needed, wrong in (
            ("epochs", epochs, "not a whole number from 1 up", not _count(epochs)),
            ("batch_size", batch_size, "not a whole number from 1 up", not _count(batch_size)),
            ("keep", keep, f"not one of {', '.join(get_args(Keep))}", keep not in get_args(Keep)),
            (
                "checkpoint_steps",
                checkpoint_steps,
                "not None or a whole number from 1 up, with a checkpoint to write",
                steps_wrong,
            ),
        )
        if wrong
    ]
    if problems:
        raise OptionError("; ".join(problems) + ". `help(undrift.adapt)` says what each is.")
    if checkpoint is not None:
        atomic.check(checkpoint)
    return EpochPlan(epochs, batch_size, keep == "best", checkpoint, checkpoint_steps)


def check_batches(batches: object) -> None:
    """Raise where what a stream was given is not an iterable of batches."""
    if isinstance(batches, Tensor | np.ndarray | str | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"batches is {a_type(batches)}; a stream needs an iterable of batches. "
            "Give a loader, a generator, a tensor's parts (images.split(200)), or a domain's "
            "(domain.named_batches(200))."
        )


def answer_and_rate(answer: Answer | None, lr: float | None, options: Options) -> tuple[Answer, float]:
    """Return how a stream answers and its learning rate: what was given, or else the options' own."""
    chosen, known = options.answer if answer is None else answer, get_args(Answer)
    if chosen not in known:
        raise OptionError(
            f"answer={chosen!r} is not one of {', '.join(known)}{_suggest(str(chosen), known)}. Leave it out for the "
            f"options' own, {options.answer}."
        )
    rate: Any = options.stream_lr if lr is None else lr
    number_from(rate, 0, "lr", "The paper's are 7e-5 to 1e-3.")
    return chosen, rate


@contextmanager
def adapting(model: Perturbed, likelihood: Likelihood) -> Iterator[None]:
    """Give the network in eval mode, its norm statistics free to move, and let the likelihood watch it."""
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if isinstance(likelihood, Watching):
            stack.enter_context(likelihood.watch(model))
        model.key.train()
        try:
            yield
        finally:
            model.key.share = None
            model.settle()  # Ctrl-C inside a norm layer leaves it with the flags of its policy


@contextmanager
def given_back(model: Perturbed) -> Iterator[None]:
    """Remove the perturbation if a `with` block fails: with a named method the user has no model to do so."""
    try:
        yield
    except BaseException:
        model.remove()
        raise


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
