"""Tied weights: layers that share a weight share its perturbation, if they divide it into the same kernels."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from undrift._errors import CannotPerturb
from undrift.options import Options
from undrift.posterior import layers
from undrift.posterior.select import Choice


def held_weights(layer: nn.Module) -> Iterable[tuple[str, nn.Module, str, int]]:
    """Yield each weight of a layer: its name, the module that holds it, its name there, and an id of its tensor."""
    for name in layers.weight_names(layer):
        holder, _, attribute = name.rpartition(".")
        module = layer.get_submodule(holder)
        # A parametrized weight is computed at each access, so its module identifies it.
        yield name, module, attribute, id(module._parameters.get(attribute, module))


def refuse_crosswise(choices: Iterable[Choice], options: Options) -> None:
    """Raise if one variance per kernel would have to serve two layers that cut one weight into different kernels.

    A convolution's kernel is a row of the weight, a transposed convolution's a column; an autoencoder may tie them.
    """
    first: dict[int, tuple[str, nn.Module]] = {}
    refusals = []
    for choice in choices:
        if choice.why_not is not None:
            continue
        for _, module, attribute, number in held_weights(choice.layer):
            other, before = first.setdefault(number, (choice.name, module))
            if before is module or _sharing(before, options) == "weight":
                continue
            weight = layers.effective_weight(module, attribute)
            ours, theirs = _kernel_of_each(module, weight), _kernel_of_each(before, weight)
            if not torch.equal(ours, theirs):
                refusals.append(
                    f"{choice.name} ({_counted(module, ours)}) shares its weight with {other} "
                    f"({_counted(before, theirs)}), which cuts it into kernels another way; one variance per kernel "
                    f"cannot serve both. Leave one out: exclude={choice.name!r}; or take one variance per weight: "
                    "conv_sharing='weight'."
                )
    if refusals:
        raise CannotPerturb("\n".join(refusals))


def _sharing(module: nn.Module, options: Options) -> str:
    return options.conv_sharing if layers.kind(module) in {"conv", "conv_transpose"} else options.linear_sharing


def _kernel_of_each(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the number of the kernel that each weight belongs to."""
    numbers = torch.arange(len(layers.kernels(layer, weight)))
    return layers.per_weight(layer, numbers, weight).expand(weight.shape)


def _counted(layer: nn.Module, numbers: Tensor) -> str:
    return f"{type(layer).__name__}, {int(numbers.max()) + 1} kernels"
