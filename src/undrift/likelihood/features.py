"""Find a network's features: the output of a named submodule, or the input of the last linear layer.

Of a network of convolutions alone, they are the input of its last one, averaged over positions.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError
from undrift._types import Batches
from undrift.likelihood.wrap import check_positions
from undrift.options import _suggest
from undrift.posterior.batch import to_device
from undrift.posterior.kept_statistics import fitting_mean
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import one_of, plain_name
from undrift.system.private import ConvNd


@dataclass(eq=False, kw_only=True)
class SeesFeatures:
    """A likelihood that sees the features of each forward pass while a loop runs.

    Args:
        features: name of the submodule whose output, flattened, is the features. None takes "bottleneck" where the
            network has one, else the input of its last linear layer.
    """

    features: str | None = None
    _seen: "deque[Tensor] | None" = field(init=False, repr=False, default=None)

    @contextmanager
    def watch(self, model: Perturbed) -> Iterator[None]:
        """Record the features of each forward pass."""
        with watching(model.net, self.features) as self._seen:
            try:
                yield
            finally:
                self._seen = None


@contextmanager
def watching(net: nn.Module, name: str | None) -> Iterator[deque[Tensor]]:
    """Give a queue that holds the features of the latest forward pass, with their gradient.

    Args:
        name: of the submodule whose output is the features. None takes "bottleneck" where the network has one, else the
            input of its last linear layer.
    """
    modules = {plain_name(n): m for n, m in net.named_modules() if plain_name(n)}
    seen: deque[Tensor] = deque(maxlen=1)  # a pass over a whole domain must not pile up features
    if name is None and "bottleneck" not in modules:
        layers: list[nn.Module] = [m for m in modules.values() if isinstance(m, nn.Linear)]
        layers = layers or [m for m in modules.values() if isinstance(m, ConvNd)]
        if not layers:
            raise OptionError(
                f"{type(net).__name__} has neither a submodule called bottleneck nor a linear layer or convolution to "
                f"take the features from. Name one: features=…, of {', '.join(modules)[:300]}; "
                'for a class per pixel take a method that needs none: method="undrift" or "tent".'
            )
        of_positions = isinstance(layers[-1], ConvNd)
        handle = layers[-1].register_forward_pre_hook(
            lambda _m, args: seen.append(args[0].flatten(2).mean(2) if of_positions else args[0])
        )
    else:
        module = named(net, name or "bottleneck")
        handle = module.register_forward_hook(lambda _m, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def named(net: nn.Module, name: str) -> nn.Module:
    """Return the submodule that gives the features."""
    modules = {plain_name(n): m for n, m in net.named_modules() if plain_name(n)}
    if name not in modules:
        raise OptionError(
            f"features={name!r} names no submodule{_suggest(name, modules)}; needed: one whose output is the features. "
            f"{one_of(modules)}"
        )
    return modules[name]


def latest(seen: deque[Tensor], name: str | None) -> Tensor:
    """Take the features of the latest forward pass from the queue: one row per image, in float32 or better."""
    if not seen:
        raise OptionError(
            f"features={name!r}: the network never called that submodule. "
            "Name one that its forward pass calls, such as the layer before the classifier."
        )
    features = seen.pop().flatten(1)
    return features.to(torch.promote_types(features.dtype, torch.float32))


@torch.no_grad()
def look(model: Perturbed, batches: Batches, name: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return index (on the CPU), features and softmax of every image of the domain, under the mean network.

    If kept norm statistics are those of noisy steps, it first passes over the domain to collect statistics without
    noise: under the noisy ones a ResNet-50 was right for 18 % instead of 44 (benchmarks/noise_statistics.py).
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    domain = (images for _, images in batches())
    with evaluating(model), fitting_mean(model, domain), watching(model.net, name) as seen:
        for indices, images in batches():
            logits = logits_of(model(to_device(images, model)), model.options.outputs)
            check_positions(None, logits)
            features, probs = (model.key.whole(each) for each in (latest(seen, name), logits.softmax(1)))
            parts.append((indices.cpu(), features, probs))
    if not parts:
        raise DataError("the domain has no batch; a likelihood that reads it needs at least one image. Check it.")
    indices, features, probs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return indices, features, probs
