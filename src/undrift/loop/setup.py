"""Check the network of a loop, set its modes, and let the likelihood watch it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from undrift._errors import OptionError, UndriftError
from undrift._types import Likelihood, Watching
from undrift.posterior.attached import root_of
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import a_type


def require_perturbed(model: nn.Module, verb: str) -> Perturbed:
    """Return the model if it is a perturbed network with its perturbation in place; raise if not."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is {a_type(model)}; undrift.{verb} needs a torch.nn.Module. Give it the network.")
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
