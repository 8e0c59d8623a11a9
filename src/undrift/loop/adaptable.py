"""Whether a stream may adapt what it was given: a perturbed network, itself, with its perturbation in place."""

from torch import nn

from undrift._errors import OptionError, UndriftError
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed


def perturbed(model: nn.Module) -> Perturbed:
    """Return the model, a perturbed network."""
    if isinstance(model, Perturbed):
        return model
    to_do = 'Perturb it first: undrift.stream(undrift.perturb(net), …); or name a method: method="tent".'
    if isinstance(getattr(model, "module", None), Perturbed):
        to_do = "Give it the network inside: model.module."
    elif isinstance(root_of(model), Perturbed):
        to_do = "Give it the network that was compiled: model._orig_mod."
    raise OptionError(f"model is a {type(model).__name__}; a stream adapts a perturbed network. {to_do}")


def refuse_off(model: Perturbed) -> None:
    """Raise where the source's own weights are in the network: a step would train them."""
    if model._removed:
        raise UndriftError("the perturbation was removed; undrift.stream needs it in place. Perturb the network again.")
    if not model.key.enabled:
        raise UndriftError(
            "the perturbation is off; undrift.stream needs it in place. Make and step a stream outside of model.off()."
        )
