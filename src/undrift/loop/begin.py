"""Put a network into the modes in which it adapts, and give it back where that fails."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from undrift._types import Likelihood, Watching
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed


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
            for policy in model.norms:
                policy.settle()  # Ctrl-C inside a norm layer leaves it with the flags of its policy


@contextmanager
def given_back(model: Perturbed) -> Iterator[None]:
    """Take the perturbation off where a `with` block fails: nobody else has the model of a named method then."""
    try:
        yield
    except BaseException:
        model.remove()
        raise
