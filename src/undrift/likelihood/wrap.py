"""Turn a callable of the logits, or of logits and step, into a likelihood."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import OptionError, OutputError
from undrift._types import Likelihood, Step
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.roles import find_classifier
from undrift.posterior.select import plain_name
from undrift.system.validate import a_type
from undrift.system.warning import warn

MANY = 16
"""Images that have to answer from 0 to 1 before that looks like a sigmoid's: a few logits may do so by chance."""


class OfLogits:
    """A loss of the logits alone."""

    per_position = True  # with a class per pixel, the callable gets batch × classes × height × width
    divisible = True

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.loss = loss

    def __call__(self, logits: Tensor, step: Step) -> Tensor:  # noqa: ARG002
        """Return the loss of one batch."""
        return self.loss(logits)

    def __repr__(self) -> str:
        return f"as_likelihood({self.loss!r})"


def as_likelihood(loss: Callable[..., Any]) -> Likelihood:
    """Return a likelihood from a callable of `logits`, or of `logits` and `step`; likelihoods come back unchanged.

    The second argument is passed if it is required or called `step`; other arguments keep their defaults.

    Examples:
        >>> import torch
        >>> confident = as_likelihood(lambda logits: -logits.softmax(1).amax(1).mean())
        >>> float(confident(torch.zeros(3, 2), None))
        -0.5
    """
    if not callable(loss):
        raise OptionError(
            f"likelihood={loss!r} is {a_type(loss)}; a likelihood is called with logits and returns a loss. "
            "Use undrift.entropy, undrift.Information(), undrift.Shot(), or a function of your own."
        )
    if isinstance(loss, type):
        raise OptionError(
            f"likelihood={loss.__name__} is a class; a likelihood is an object. Make one: {loss.__name__}()."
        )
    required, names = _arguments(loss)
    if required > 2:
        raise OptionError(
            f"likelihood={loss!r} needs {required} arguments; it is called with logits, or with logits and step. "
            "Fix the others first, with functools.partial."
        )
    return loss if required == 2 or "step" in names else OfLogits(loss)


def check_positions(likelihood: object, logits: Tensor) -> None:
    """Raise if a likelihood of whole images meets a class per pixel, or any number of labels."""
    if logits.ndim == 2 or getattr(likelihood, "per_position", False):
        return
    what = "any number of labels per image" if logits.ndim == 3 else "a class per pixel"
    name = "a likelihood that looks at features" if likelihood is None else getattr(likelihood, "__name__", likelihood)
    raise OptionError(
        f"the network gives {what} (logits of shape {tuple(logits.shape)}), and {name} asks for one class per image. "
        "Take entropy, Information, Consistency or Teacher (the methods undrift, tent and vmp), or say "
        "`per_position = True` of a likelihood of your own that can."
    )


def warn_of_outputs(model: Perturbed, logits: Tensor) -> None:
    """Warn if a network seems to return something else than its logits: probabilities, or features."""
    found = logits.detach()
    said = _probabilities(found) if len(found) else None
    if said is None and found.ndim == 2:
        said = _not_its_classifiers(model.net, found.shape[1])
    if said is not None:
        warn(said)


def _probabilities(found: Tensor) -> str | None:
    """Return a warning if a network ends in a softmax or a sigmoid: taken for logits, its answers all look unsure."""
    if bool((found >= 0).all() & ((found.sum(1) - 1).abs() < 5e-3).all()):
        return (
            "the network returns rows that are not negative and sum to 1, as probabilities do; needed: logits, the "
            "scores before the softmax, else every answer looks unsure and steps are tiny. Leave the last softmax out, "
            "or return log_softmax."
        )
    one = found.ndim == 2 and found.shape[1] == 2 and len(found) >= MANY
    if one and bool((found[:, 0] == 0).all() & (found[:, 1] >= 0).all() & (found[:, 1] <= 1).all()):
        return (
            "the network returns one number from 0 to 1 per image, as a sigmoid does; needed: logits, the scores "
            "before the sigmoid, else every image is of the second class. Leave the last sigmoid out, or apply "
            "torch.logit to it."
        )
    return None


def _not_its_classifiers(net: nn.Module, width: int) -> str | None:
    """Return a warning if a network returns other outputs than its classifier's, such as features before logits."""
    name, sure = find_classifier(net, convolutions=False)
    layer = next((module for path, module in net.named_modules() if sure and plain_name(path) == name), None)
    if not isinstance(layer, nn.Linear) or width == max(2, layer.out_features):  # one logit is made two
        return None
    return (
        f"the network returns {width} numbers per image, and its layer {name!r} gives {layer.out_features}; needed: "
        "the classifier's logits, which are the first tensor of a tuple or list. Return the logits first; or, if "
        f"{name!r} is not the classifier, call the layer that is 'classifier'."
    )


def one_number(loss: object, logits: Tensor | None = None) -> Tensor:
    """Return a likelihood's loss; raise if it is not one number, or has no gradient.

    Args:
        logits: what it was computed from, where that is known.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{a_type(loss)}"
        raise OptionError(
            f"the likelihood returned {found}; a loss is a tensor with one number. Take the mean over the batch."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        if logits is not None and not logits.requires_grad:
            raise OutputError(
                "the network's output has no gradient; adaptation follows it. Take no_grad() and detach() out of the "
                'network\'s forward, or choose a method that learns nothing: method="norm-stats".'
            )
        raise OptionError(
            "the likelihood's loss has no gradient; adaptation follows it. Compute the loss from the logits that it is "
            "given, without detach() or no_grad()."
        )
    return loss.reshape(())


def _arguments(loss: Callable[..., Any]) -> tuple[int, list[str]]:
    """Return how many positional arguments a callable requires, and the names of all it takes."""
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 1, []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional), [p.name for p in positional]
