"""Set up a loop: check its arguments and its network, set the network's modes, let the likelihood watch it.

Several processes may adapt one network; what they cannot share is refused, and all have to start equal.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift._types import Keeper, Likelihood, Watching
from undrift.loop.balanced import BalancedGather
from undrift.loop.gather import Gather, check_gather
from undrift.options import Answer, _suggest
from undrift.packs.domain_file import DomainFile
from undrift.packs.open_packs import Place, files_for
from undrift.posterior.attached import root_of
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import adapted
from undrift.system import atomic, ranks
from undrift.system.private import BatchNorm
from undrift.system.randomness import Randomness
from undrift.system.validate import a_type, instead_of, not_negative

if TYPE_CHECKING:
    from undrift.packs.collection import Packs

Keep = Literal["last", "best", "safe"]


def require_perturbed(model: nn.Module, verb: str) -> Perturbed:
    """Return the model if it is a perturbed network with its perturbation in place; raise if not."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is {a_type(model)}; undrift.{verb} needs a torch.nn.Module. "
            f"{instead_of(model, 'Give it the network.')}"
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
        keep: the epoch that is kept: "last", "best" by the verdict, or "safe": the last, but the source where the
            verdict says that adaptation hurt.
        checkpoint: the file to write after each epoch, and every `checkpoint_steps` steps.
    """

    epochs: int
    batch_size: int
    keep: Keep
    checkpoint: str | os.PathLike[str] | None
    checkpoint_steps: int | None

    @property
    def keep_best(self) -> bool:
        """Whether the state of the epoch that the verdict likes best is kept."""
        return self.keep == "best"


def epoch_plan(
    epochs: Any,
    batch_size: Any,
    keep: Any,
    checkpoint: str | os.PathLike[str] | None,
    checkpoint_steps: Any,
) -> EpochPlan:
    """Return the plan of a call of `adapt`; raise one error for all wrong arguments."""
    if torch.is_inference_mode_enabled():
        raise UndriftError("adapt was called in inference mode, where nothing has a gradient. Leave inference_mode().")
    steps_wrong = checkpoint_steps is not None and (checkpoint is None or not _is_count(checkpoint_steps))
    problems = [
        f"{name}={value!r} is {needed}"
        for name, value, needed, wrong in (
            ("epochs", epochs, "not a whole number from 1 up", not _is_count(epochs)),
            ("batch_size", batch_size, "not a whole number from 1 up", not _is_count(batch_size)),
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
    return EpochPlan(epochs, batch_size, keep, checkpoint, checkpoint_steps)


@dataclass(frozen=True)
class BatchPlan:
    """How `stream` goes through the batches; made by `batch_plan`.

    Attributes:
        answer: the pass that answers a batch.
        lr: the learning rate.
        episodic: whether every batch starts from the initial state.
        guard: whether a guard compares with the source; None leaves it to the likelihood.
        gather: collects images until they are enough for a step; None where each batch makes its own.
        packs: files of the domains that are known at the start; None in a stream that looks for no domains.
    """

    answer: Answer
    lr: float
    episodic: bool
    guard: bool | None
    gather: Gather | BalancedGather | None
    packs: Sequence[DomainFile] | None


def batch_plan(
    model: Perturbed,
    answer: Answer | None,
    lr: float | None,
    episodic: bool,
    guard: bool | None,
    gather: int | None,
    balanced: bool,
    packs: "Packs | Place | Sequence[Place] | None",
) -> BatchPlan:
    """Return the plan of a call of `stream`: its arguments, checked, or else the options' own."""
    if guard not in (None, True, False):
        raise OptionError(
            f"guard={guard!r} is neither True nor False; needed: one of them, or None for the method's default."
        )
    chosen, known = model.options.answer if answer is None else answer, get_args(Answer)
    if chosen not in known:
        raise OptionError(
            f"answer={chosen!r} is not one of {', '.join(known)}{_suggest(str(chosen), known)}. Leave it out for the "
            f"options' own, {model.options.answer}."
        )
    rate: Any = model.options.stream_lr if lr is None else lr
    not_negative(rate, "lr", "The paper's are 7e-5 to 1e-3.")
    files = None if packs is None else files_for(model, packs, episodic)
    least = check_gather(gather, balanced, model, episodic)
    gathers = None if least is None else BalancedGather(least) if balanced else Gather(least)
    return BatchPlan(chosen, rate, episodic, guard, gathers, files)


def check_batches(batches: object) -> None:
    """Raise where what a stream was given is not an iterable of batches."""
    if isinstance(batches, Tensor | np.ndarray | str | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"batches is {a_type(batches)}; a stream needs an iterable of batches. "
            "Give a loader, a generator, a tensor's parts (images.split(200)), or a domain's "
            "(domain.named_batches(200))."
        )


def watched_by(model: Perturbed, likelihood: Likelihood) -> AbstractContextManager[None]:
    """Let the likelihood watch the network for the length of a `with` block."""
    return likelihood.watch(model) if isinstance(likelihood, Watching) else nullcontext()


@contextmanager
def adapting(model: Perturbed, likelihood: Likelihood) -> Iterator[None]:
    """Give the network in eval mode, its norm statistics free to move, and let the likelihood watch it."""
    with evaluating(model), watched_by(model, likelihood):
        model.key.train()
        try:
            yield
        finally:
            model.key.share = None
            model.settle()  # Ctrl-C inside a norm layer leaves it with the flags of its policy


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def refuse_indivisible(model: Perturbed, likelihood: Likelihood, keepers: Sequence[Keeper]) -> None:
    """Raise if several processes would not compute what one process does."""
    if ranks.world_size() == 1:
        return
    name = getattr(likelihood, "__name__", type(likelihood).__name__)
    unchecked = [type(keeper).__name__ for keeper in keepers if not getattr(keeper, "divisible", False)]
    untracked = [n for n, m in model.net.named_modules() if isinstance(m, BatchNorm) and m.running_mean is None]
    reasons = {
        f"{name} uses more of a step than logits, indices and features": not getattr(likelihood, "divisible", False),
        f"{', '.join(unchecked)} was not checked with several": bool(unchecked),
        'mean_start="gradient" looks at a gradient before it is summed': (
            model.options.mean_start == "gradient" and bool(model.low_rank)
        ),
        "the network is compiled, and messages cannot enter its graph": root_of(model.net) is not model.net,
        "its weights are sharded (FSDP), and priors look at whole ones": any(map(_sharded, model.parameters())),
        f"{', '.join(untracked[:3])} normalises by its own part of a batch at all times": bool(untracked),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise OptionError(
            f"{ranks.world_size()} processes adapt this network together, and {'; '.join(found)}; needed: entropy, "
            "Information, Shot, Nrc, Aad or a loss of the logits alone, on a network as it was written. Take the "
            "method undrift, shot, nrc, aad, tent or vmp, or start one process."
        )


def _sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")


def sync_start(model: Perturbed, randomness: Randomness, identity: dict[str, Any]) -> None:
    """Check that all processes belong to one run, and copy the first one's state and random numbers to all."""
    if ranks.world_size() > 1:
        ranks.require_equal(json.dumps(identity), "options, images or network")
        ranks.broadcast(list(adapted(model).values()))
        sync_randomness(randomness)


def sync_randomness(randomness: Randomness) -> None:
    """Copy the first process's random state to all: augmentations have drawn differently in each."""
    if ranks.world_size() > 1:
        state = randomness.state()
        ranks.broadcast(list(state.values()))
        randomness.put(state)


def check_in_sync(model: nn.Module, when: str) -> None:
    """Raise if the processes' networks have drifted apart, as on unlike machines."""
    if ranks.world_size() > 1 and isinstance(model, Perturbed):
        sums = {name: float(tensor.detach().double().sum()) for name, tensor in adapted(model).items()}
        ranks.require_equal(json.dumps(sums), f"weights {when}")
