"""The perturbation of one weight: log-variances, their prior, and the hooks that add its noise to a layer's output."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from undrift import layers
from undrift._errors import UndriftError
from undrift.key import Key, normal, rank
from undrift.options import Energy, Options, Sharing
from undrift.prior import initial_log_var, kernel_variance, prior_variance


class Noise(nn.Module):
    """A zero-mean Gaussian on one weight: Δw ~ N(0, exp(log_var)).

    `local` and `drawn` are forward hooks: they look at the layer they are called on, so one Noise serves every layer
    that uses its weight.
    """

    log_var: nn.Parameter
    prior_var: Tensor
    kernel_var: Tensor

    def __init__(
        self,
        layer: nn.Module,
        weight: Tensor,
        sharing: Sharing,
        energy: Energy,
        options: Options,
        key: Key,
        number: int,
    ) -> None:
        super().__init__()
        variance = kernel_variance(layer, weight, options.variance_floor)
        log_var, prior = initial_log_var(variance, options), prior_variance(variance, options)
        if sharing == "weight":
            log_var = layers.per_weight(layer, log_var, weight).expand_as(weight).contiguous()
            prior, variance = (layers.per_weight(layer, v, weight) for v in (prior, variance))
        self.log_var = nn.Parameter(log_var.clone())
        # They follow from the source weights and the options, so they are not part of a state dict.
        self.register_buffer("prior_var", prior, persistent=False)
        self.register_buffer("kernel_var", variance, persistent=False)
        self.sharing, self.energy, self.offset, self.number = sharing, energy, options.energy_offset, number
        self.weights = weight.numel()
        self._key = (key,)  # in a tuple: shared by all noises, registered once, by the perturbed network

    @property
    def key(self) -> Key:
        """The seed, step and switch that all noises of a network share."""
        return self._key[0]

    def kl(self) -> Tensor:
        """Return KL[q(Δw) || p(Δw)] summed over the weights: each counts, however many share a variance.

        A variance of exactly 0 (init_fraction=0, the control without noise) is no perturbation and has no KL.
        """
        ratio = self.log_var - self.prior_var.log()
        random = ratio > -torch.inf
        ratio = torch.where(random, ratio, 0)
        per_variance = torch.where(random, 0.5 * (ratio.exp() - 1 - ratio), 0)
        return per_variance.sum() * (self.weights / self.log_var.numel())

    def relative_std(self) -> Tensor:
        """Return σ over the standard deviation of its kernel."""
        return (0.5 * (self.log_var.detach() - self.kernel_var.log())).exp()

    def variance(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the variance of each output: σ² of the kernel × energy in its window, or the full second map."""
        energy = input_energy(layer, x, self.energy, self.offset)
        var = self.log_var.exp().to(energy.dtype)
        if self.sharing == "weight":
            return layers.apply(layer, energy, var, output_shape)
        return _by_channel(layer, var) * _spread(layer, layers.box(layer, energy, output_shape))

    def std(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the standard deviation of each output."""
        if self.sharing == "weight":
            return safe_sqrt(self.variance(layer, x, output_shape))
        # σ · √energy: the root is taken on one plane a group, not on every channel.
        energy = layers.box(layer, input_energy(layer, x, self.energy, self.offset), output_shape)
        sigma = (0.5 * self.log_var).exp().to(energy.dtype)
        return _by_channel(layer, sigma) * _spread(layer, safe_sqrt(energy))

    def draw(self, layer: nn.Module, shape: torch.Size) -> Tensor:
        """Return one Δw, the same for every use of the weight in this step."""
        sigma = (0.5 * self.log_var).exp()
        if self.sharing == "kernel":
            sigma = layers.per_weight(layer, sigma, torch.empty(shape, device="meta"))
        return sigma * normal(self.key.of(self.number).to(sigma.device), shape)

    # Hooks ------------------------------------------------------------------------------------------------------

    def local(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add noise with the right mean and variance to each output: local reparameterisation."""
        if not self.key.mode()[0]:
            return None
        x, batched = self._input(layer, args, kwargs, output)
        y = output if batched else output.unsqueeze(0)
        with torch.autocast(x.device.type, enabled=False):
            std = self.std(layer, x if batched else x.unsqueeze(0), y.shape)
            key = self.key.next(self.number).to(x.device)
            noise = std * normal(key, y.shape, first_row=rank() * y.shape[0]).to(std.dtype)
        # Noise in float32, cast last: autocast must not turn its outputs into float32.
        return output + (noise if batched else noise.squeeze(0)).to(output.dtype)

    def drawn(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add the layer's response to one draw of Δw for the whole batch."""
        if not self.key.mode()[0]:
            return None
        x, _ = self._input(layer, args, kwargs, output)
        with torch.autocast(x.device.type, enabled=False):
            delta = self.draw(layer, layers.effective_shape(layer))
            full = x.to(torch.promote_types(x.dtype, torch.float32))
            noise = layers.apply(layer, full, delta.to(full.dtype), output.shape)
        return output + noise.to(output.dtype)

    def _input(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> tuple[Tensor, bool]:
        x: Tensor = args[0] if args else kwargs["input"]
        if x.device != self.log_var.device:
            raise UndriftError(
                f"{type(layer).__name__} runs on {x.device}, its log-variances are on {self.log_var.device}. "
                "Move the perturbed network, not the network inside: model.to(device)."
            )
        dims = 1 if isinstance(layer, nn.Linear) else len(layer.kernel_size) + 1
        return x, output.ndim > dims


class Rerun(nn.Module):
    """Perturbs a module that noise cannot be added behind, by running it again with drawn weights.

    `nn.MultiheadAttention` uses its projections without calling them, and a subclass of a convolution may do anything
    to its input first. Both are faithful when their weights are w_s + Δw while they run.
    """

    def __init__(self, layer: nn.Module, noises: dict[str, Noise]) -> None:
        super().__init__()
        # In tuples: the perturbed network registers them.
        self._noises = tuple(noises.items())
        self._forward = (_Forward(layer),)

    def drawn(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> Any:
        """Return the module's output under one draw of its weights."""
        if not self._noises[0][1].key.mode()[0]:
            return None
        weights = {}
        for name, noise in self._noises:
            holder, _, attribute = name.rpartition(".")
            module = layer.get_submodule(holder)
            weight = getattr(module, attribute).detach()
            weights[name] = (weight + noise.draw(module, weight.shape)).to(weight.dtype)
        # Its forward, not the module: the user's hooks on it see one call.
        return functional_call(self._forward[0], {f"layer.{n}": w for n, w in weights.items()}, args, kwargs)


class _Forward(nn.Module):
    """A module that is another one's forward method."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def input_energy(layer: nn.Module, x: Tensor, energy: Energy, offset: float) -> Tensor:
    """Return what stands for x² in the variance path, in float32 or better.

    - "square": x², the paper's.
    - "offset": x² + constant, as released; zero padding still gets none.
    - "centred": (x − its mean over positions)², a sample and a channel at a time. A drawn kernel turns the constant
      part of its input into a constant shift, which the next norm layer removes; local noise would turn it into noise
      at every position. Without positions (a linear layer on plain vectors) there is nothing to centre: x².
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    positions = tuple(range(1, x.ndim - 1)) if isinstance(layer, nn.Linear) else tuple(range(2, x.ndim))
    if energy == "centred" and positions:
        x = x - x.mean(dim=positions, keepdim=True)
    return x.square() + offset if energy == "offset" else x.square()


def safe_sqrt(x: Tensor) -> Tensor:
    """Return √x with slope 0 at 0: the root's own slope there is infinite, and ReLU makes all-zero windows."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def _by_channel(layer: Any, values: Tensor) -> Tensor:
    """Return one value a kernel, shaped to meet the layer's output."""
    return values if isinstance(layer, nn.Linear) else values.view(-1, *(1,) * len(layer.kernel_size))


def _spread(layer: Any, planes: Tensor) -> Tensor:
    """Return one plane a group as one plane an output channel."""
    if isinstance(layer, nn.Linear) or layer.groups == 1:
        return planes
    return planes.repeat_interleave(layer.out_channels // layer.groups, dim=1)
