"""Describe a layer: its kind, its weight, and the linear map it applies.

Only this module depends on PyTorch's convolution and linear classes.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from undrift.kernels.reference import box_filter
from undrift.system.interrupts import surely
from undrift.system.private import ConvNd, ConvTransposeNd

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONVOLVE_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_STANDARD = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def kind(layer: nn.Module) -> str | None:
    """Return "conv", "conv_transpose", "linear" or "attention"; None for anything that is not perturbed."""
    if isinstance(layer, ConvTransposeNd):
        return "conv_transpose"
    if isinstance(layer, ConvNd):
        return "conv"
    if isinstance(layer, nn.Linear):
        return "linear"
    if isinstance(layer, nn.MultiheadAttention):
        return "attention"
    return None


def weight_names(layer: nn.Module) -> list[str]:
    """Return the names of the weights to perturb: one for most layers, two or four for attention."""
    if not isinstance(layer, nn.MultiheadAttention):
        return ["weight"]
    inner = ["in_proj_weight"] if layer.in_proj_weight is not None else [f"{n}_proj_weight" for n in "qkv"]
    return [*inner, "out_proj.weight"]


def held_weights(layer: nn.Module) -> Iterable[tuple[str, nn.Module, str, int]]:
    """Yield each weight of a layer: its name, the module that holds it, its name there, and an id of its tensor."""
    for name in weight_names(layer):
        holder, _, attribute = name.rpartition(".")
        module = layer.get_submodule(holder)
        # A parametrized weight is computed at each access, so its module identifies it.
        yield name, module, attribute, id(module._parameters.get(attribute, module))


def is_standard(layer: nn.Module) -> bool:
    """Return whether the layer computes just what its PyTorch class computes, so that noise can be added behind it."""
    base = next((c for c in _STANDARD if isinstance(layer, c)), None)
    if base is None or "forward" in vars(layer):
        return False
    return all(getattr(type(layer), f, None) is getattr(base, f, None) for f in ("forward", "_conv_forward"))


def is_lazy(layer: nn.Module) -> bool:
    """Return whether the layer still waits for its first batch to have weights."""
    return isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params()


def refusal(layer: nn.Module) -> str | None:
    """Return why this module cannot be perturbed faithfully, or None if it can (or is not a layer of ours)."""
    if _is_quantised(layer):
        return "is quantised; the perturbation needs floating-point weights"
    if kind(layer) is None:
        return None
    for weight in weight_names(layer):
        holder, _, attribute = weight.rpartition(".")
        module = layer.get_submodule(holder)
        value = effective_weight(module, attribute)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
            found = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            return f"has a {weight} of {found}; the perturbation needs dense real floating-point weights"
        if not is_standard(layer) and attribute not in module._parameters:
            return f"has a forward of its own and a parametrized {weight}; how its noise acts cannot be known"
    return None


def _is_quantised(layer: nn.Module) -> bool:
    places = [c.__module__ for c in type(layer).__mro__]
    return any("quantized" in p or ".qat" in p for p in places) or hasattr(layer, "weight_fake_quant")


def effective_weight(layer: nn.Module, name: str = "weight") -> Tensor:
    """Return the weight the layer multiplies with (behind weight norm, spectral norm, any parametrization), detached.

    Reading it changes nothing: a spectral norm takes a power step at each reading in train mode, so it is read in eval
    mode; the older hooks keep a stale copy until the next forward pass, so they are asked to compute it.
    """
    if parametrize.is_parametrized(layer, name):
        with evaluating(layer.get_submodule("parametrizations")):
            return getattr(layer, name).detach()
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm) and hook.name == name:
            return hook.compute_weight(layer, do_power_iteration=False).detach()
        if isinstance(hook, WeightNorm) and hook.name == name:
            return hook.compute_weight(layer).detach()
    value = getattr(layer, name)
    # Packed weights of quantised layers are methods; the caller looks at what it got.
    return value.detach() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put every module in eval mode for the length of a `with` block; each gets its own flag back."""
    modules = _all_modules(module)
    flags = [m.training for m in modules]
    quick = True in flags and _eval_only_sets_flags(modules)
    put = _set_training if quick else _set_changed
    try:
        if quick:
            _set_training(modules, [False] * len(modules))
        elif True in flags:
            module.eval()
        yield
    finally:
        surely(lambda: put(modules, flags))


def _all_modules(module: nn.Module) -> list[nn.Module]:
    """Return what `module.modules()` yields, in another order: that one is a generator in a generator for each level.

    `predict` asks before a GPU has anything to do.
    """
    found, seen = [module], {module}
    for m in found:  # which grows meanwhile
        for child in m._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _eval_only_sets_flags(modules: list[nn.Module]) -> bool:
    """Return whether `eval()` sets the flag of each of these modules and does nothing else.

    A module may have an `eval` or `train` of its own, by its class or put there later: to stay in train mode, say.
    """
    plain = nn.Module
    for kind in {type(m) for m in modules}:
        if kind.train is not plain.train or kind.eval is not plain.eval or kind.__setattr__ is not plain.__setattr__:
            return False
        if hasattr(kind, "training"):  # a property
            return False
    for m in modules:
        own = m.__dict__
        if "train" in own or "eval" in own:
            return False
    return True


def _set_training(modules: list[nn.Module], flags: list[bool]) -> None:
    for m, flag in zip(modules, flags, strict=True):
        m.__dict__["training"] = flag  # past Module's own setter, which first looks for parameters of that name


def _set_changed(modules: list[nn.Module], flags: list[bool]) -> None:
    for m, flag in zip(modules, flags, strict=True):
        if m.training != flag:
            m.training = flag


def kernels(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight as one row per kernel: all weights that feed one output channel (or one output unit)."""
    if not isinstance(layer, ConvTransposeNd):
        return weight.flatten(1)
    grouped = weight.unflatten(0, (layer.groups, -1))  # groups, inputs, outputs, *window
    return grouped.transpose(1, 2).flatten(0, 1).flatten(1)


def from_kernels(layer: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return a weight of this shape from one row per kernel: the inverse of `kernels`."""
    if not isinstance(layer, ConvTransposeNd):
        return rows.reshape(shape)
    grouped = rows.view(layer.groups, shape[1], shape[0] // layer.groups, *shape[2:])
    return grouped.transpose(1, 2).reshape(shape)


def per_weight(layer: nn.Module, values: Tensor, weight: Tensor) -> Tensor:
    """Return one value per kernel, spread so that it broadcasts against the weight."""
    tail = (1,) * (weight.ndim - 2)
    if not isinstance(layer, ConvTransposeNd):
        return values.view(-1, 1, *tail)
    per_group = values.view(layer.groups, 1, -1).expand(-1, weight.shape[0] // layer.groups, -1)
    return per_group.reshape(weight.shape[0], weight.shape[1], *tail)


def apply(layer: nn.Module, x: Tensor, weight: Tensor, output_shape: torch.Size, groups: int | None = None) -> Tensor:
    """Return the layer's linear map with another weight and no bias; `output_shape` settles a transposed one's size."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    assert isinstance(layer, ConvNd)
    groups = layer.groups if groups is None else groups
    dims = len(layer.kernel_size)
    if isinstance(layer, ConvTransposeNd):
        # forward(x, output_size=…) overrides output_padding, so it is read off what came out.
        padding = [int(p) for p in layer.padding]
        least = [
            (x.shape[-dims + d] - 1) * layer.stride[d] - 2 * padding[d] + layer.dilation[d] * (layer.kernel_size[d] - 1)
            for d in range(dims)
        ]
        extra = [output_shape[-dims + d] - least[d] - 1 for d in range(dims)]
        return _CONVOLVE_TRANSPOSED[dims](x, weight, None, layer.stride, padding, extra, groups, layer.dilation)
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return _CONVOLVE[dims](x, weight, None, layer.stride, 0, layer.dilation, groups)
    return _CONVOLVE[dims](x, weight, None, layer.stride, layer.padding, layer.dilation, groups)


def channels(layer: nn.Module) -> tuple[bool, int]:
    """Return whether a layer's channels are the last dimension (linear layers), and how many groups they form."""
    return (True, 1) if isinstance(layer, nn.Linear) else (False, int(layer.groups))  # type: ignore[arg-type]


def box(layer: nn.Module, plane: Tensor, output_shape: torch.Size) -> Tensor:
    """Return the energy under each output's window (batch, groups, *output) from the energy of a group's channels.

    With one variance per kernel, every weight of the window has the same variance, so the second convolution of local
    reparameterisation is a sum over channels and a box filter. Exact, for any stride, padding and dilation.
    """
    how = pool(layer)
    if how is None:
        assert isinstance(layer, ConvNd)
        window = plane.new_ones(layer.groups, 1, *layer.kernel_size)
        return apply(layer, plane, window, output_shape, groups=layer.groups)
    return box_filter(plane, how)


def pool(layer: nn.Module) -> tuple[tuple[int, ...], ...] | None:
    """Return window, stride and padding where pooling sums over a layer's windows: one small kernel, always float32.

    () where each window is one input, None where neither holds.
    """
    if isinstance(layer, nn.Linear):
        return ()
    assert isinstance(layer, ConvNd)
    if isinstance(layer, ConvTransposeNd) or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    window, stride, padding = layer.kernel_size, layer.stride, layer.padding
    if len(window) != 2 or max(layer.dilation) > 1 or 2 * padding[0] > window[0] or 2 * padding[1] > window[1]:
        return None
    return () if max(window) == 1 and max(stride) == 1 else (window, stride, padding)


def only_weight(layer: nn.Module) -> Tensor | None:
    """Return a layer's weight where all that a gradient of the output goes to is the input; else None.

    Not where weight or bias are trained or computed, or where somebody else's hook may have changed the output.
    """
    if len(layer._forward_hooks) > 1 or layer._modules or "forward" in layer.__dict__:
        return None
    weight, bias = layer._parameters.get("weight"), layer.bias
    trained = weight is None or weight.requires_grad or (bias is not None and bias.requires_grad)
    return None if trained else weight


def effective_shape(layer: nn.Module) -> torch.Size:
    """Return the shape of the layer's weight without computing it."""
    if isinstance(layer, nn.Linear):
        return torch.Size((layer.out_features, layer.in_features))
    assert isinstance(layer, ConvNd)
    outer, inner = layer.out_channels, layer.in_channels // layer.groups
    if isinstance(layer, ConvTransposeNd):
        outer, inner = layer.in_channels, layer.out_channels // layer.groups
    return torch.Size((outer, inner, *layer.kernel_size))
