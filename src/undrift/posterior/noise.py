"""The perturbation of one weight: its prior, its log-variances, and the hooks that add noise to a layer's output."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from undrift._errors import UndriftError
from undrift.kernels import add_layer_noise, add_noise, narrowed, normal, square_sum
from undrift.kernels.reference import by_channel, safe_sqrt, spread, wide, without_autocast
from undrift.options import Energy, Options, Sharing
from undrift.posterior import layers
from undrift.posterior.norm import capturing
from undrift.posterior.seeds import Key
from undrift.system.private import hooked_globally


def kernel_variance(layer: nn.Module, weight: Tensor, floor: float) -> Tensor:
    """Return Var(w_s^li), one per kernel (per row of a linear layer), at least `floor`.

    A constant kernel, or one of a single weight, has no variance; the floor keeps log-variances and the KL finite.
    """
    rows = layers.kernels(layer, weight.to(torch.promote_types(weight.dtype, torch.float32)))
    variance = rows.var(dim=1) if rows.shape[1] > 1 else rows.new_zeros(rows.shape[0])
    return variance.clamp_min(floor)


def prior_variance(variance: Tensor, options: Options) -> Tensor:
    """Return the prior variance per kernel: λ·Var(w_s^li) (paper eq. 8), or one isotropic λ for the whole network."""
    if options.prior == "isotropic":
        return torch.full_like(variance, options.prior_scale)
    return options.prior_scale * variance


def initial_log_var(variance: Tensor, options: Options) -> Tensor:
    """Return the initial log-variance per kernel; a fraction of 0 gives −inf, which is exactly no noise."""
    if options.init == "prior":
        return prior_variance(variance, options).log()
    return (options.init_fraction * variance + options.init_offset).log()


class PriorRow(nn.Module):
    """The logarithm of each variance's prior, and half the number of weights behind it, of all noises as one row.

    They stay what they are, so the KL need not gather them from a hundred layers in each step.
    """

    log_prior: Tensor
    half_weights: Tensor

    def __init__(self, noises: Sequence["Noise"]) -> None:
        super().__init__()
        log_prior, half_weights = prior_row(noises)
        self.register_buffer("log_prior", log_prior, persistent=False)
        self.register_buffer("half_weights", half_weights, persistent=False)


def prior_row(noises: Sequence["Noise"]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each variance's prior, and half the number of weights behind it."""
    log_prior = torch.cat([n.prior_var.expand_as(n.log_var).flatten() for n in noises]).log()
    return log_prior, 0.5 * torch.cat([n.share.expand(n.log_var.numel()) for n in noises])


class Noise(nn.Module):
    """A zero-mean Gaussian on one weight: Δw ~ N(0, exp(log_var)).

    `local` and `drawn` are forward hooks: they look at the layer they are called on, so one Noise serves every layer
    that uses its weight.
    """

    log_var: nn.Parameter
    prior_var: Tensor
    kernel_var: Tensor
    share: Tensor

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
        # How many weights stand behind each variance; on the device, for sums over all layers at once.
        self.register_buffer("share", variance.new_tensor(self.weights / self.log_var.numel()), persistent=False)
        key.add_weight(number)
        self._key = (key,)  # in a tuple: shared by all noises, registered once, by the perturbed network

    @property
    def key(self) -> Key:
        """The seed, step and switch that all noises of a network share."""
        return self._key[0]

    def relative_std(self) -> Tensor:
        """Return σ over the standard deviation of its kernel."""
        return (0.5 * (self.log_var.detach() - self.kernel_var.log())).exp()

    # Hooks ------------------------------------------------------------------------------------------------------

    def local(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add noise with the right mean and variance to each output: local reparameterisation."""
        state, compiling = self._key[0], torch.compiler.is_compiling()
        key = state.next_key(self.number)
        if key is None:
            return None
        parts = None if compiling else state.parts
        # Asked for once, as a module's search for its parameters takes its time.
        log_var = self.log_var if parts is None else parts[self.number]
        x, batched = self._input(layer, args, kwargs, output, log_var)
        if compiling:
            x, output = self._narrow(layer, x, output)
        x, y = (x, output) if batched else (x.unsqueeze(0), output.unsqueeze(0))
        out = self._add(layer, x, y, log_var, key.to(x.device))
        return out if batched else out.squeeze(0)

    def drawn(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add the layer's response to one draw of Δw for the whole batch."""
        key = self.key.weight_key(self.number)
        if key is None:
            return None
        x, _ = self._input(layer, args, kwargs, output, self.log_var)
        with without_autocast(x.device):
            delta = self.draw(layer, layers.effective_shape(layer), key)
            full = x.to(wide(x.dtype))
            noise = layers.apply(layer, full, delta.to(full.dtype), output.shape)
        return output + noise.to(output.dtype)

    def _input(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor, log_var: Tensor
    ) -> tuple[Tensor, bool]:
        """Return a layer's input, and whether it has a batch dimension."""
        x: Tensor = args[0] if args else kwargs["input"]
        if x.device != log_var.device:
            raise UndriftError(
                f"{type(layer).__name__} runs on {x.device}, its log-variances are on {log_var.device}. "
                "Move the perturbed network, not the network inside: model.to(device)."
            )
        dims = 1 if isinstance(layer, nn.Linear) else len(layer.kernel_size) + 1
        return x, output.ndim > dims

    def _narrow(self, layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's input and output, in a compiled graph both in the precision of the product.

        Autocast hands the product a copy of x in lower precision. There the gradients of product and energy meet, and
        are one tensor of that precision. The product that the layer has made is not used again, so no kernel is made
        for it.
        """
        # Somebody else may have changed y, or made it otherwise.
        other = len(layer._forward_hooks) > 1 or hooked_globally() or "forward" in layer.__dict__
        if type(layer) is not nn.Linear or other or self.sharing != "kernel":
            return x, y
        low = narrowed(x, y.dtype)
        return (x, y) if low is None else (low, F.linear(low, layer.weight, layer.bias))

    # Noise ------------------------------------------------------------------------------------------------------

    def _add(self, layer: nn.Module, x: Tensor, y: Tensor, log_var: Tensor, key: Tensor) -> Tensor:
        """Return y + σ·ε for a batch; σ² is `variance`, which is not written out where kernels share one."""
        state = self._key[0]
        if self.sharing == "weight":
            with without_autocast(x.device):
                std = safe_sqrt(self.variance(layer, x, y.shape))
                noise = std * normal(key, y.shape, state.first_row(y.shape[0])).to(std.dtype)
                # Noise in float32, cast last: autocast must not turn its outputs into float32.
                return y + noise.to(y.dtype)
        if self.energy == "centred":
            x = centred(layer, x)
        (last, groups), pool = layers.channels(layer), layers.pool(layer)
        first_row, handles = state.first_row(y.shape[0]), state.handles
        handle = None if handles is None else handles[self.number]
        if pool is None:
            with without_autocast(x.device):
                plane = self._plane(layer, x, y.shape)
                return add_noise(y, plane, log_var, key, first_row, groups, last, handle)
        extra = self._constant(x, groups, last) if self.energy == "offset" else 0.0
        # A layer that widens vectors mostly follows a layer norm, which goes by rows: q, k, v; hidden units.
        by_rows = last and y.shape[-1] > x.shape[-1]
        how = (first_row, groups, last, pool, extra)
        return add_layer_noise(x, y, log_var, key, *how, lambda: self._factor(layer, x, last), handle, by_rows)

    def _factor(self, layer: nn.Module, x: Tensor, last: bool) -> Tensor | None:
        """Return the frozen weight of y's product if noise and product can share x's gradient, else None.

        By Python a convolution's gradient takes 10 µs more than by PyTorch's own node, so a convolution has one only
        in the recording of a CUDA graph, which waits for no Python.
        """
        # What is centred is not what the layer was given.
        if self.energy == "centred" or hooked_globally() or not (last or capturing(x)):
            return None
        return layers.only_weight(layer)

    def variance(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the variance of each output: σ² of the kernel × energy in its window, or the full second map."""
        if self.sharing == "weight":
            energy = input_energy(layer, x, self.energy, self.offset)
            return layers.apply(layer, energy, self.log_var.exp().to(energy.dtype), output_shape)
        last, groups = layers.channels(layer)
        plane = self._plane(layer, centred(layer, x) if self.energy == "centred" else x, output_shape)
        sigma_squared = by_channel(self.log_var.exp().to(plane.dtype), output_shape, last)
        return sigma_squared * spread(plane, output_shape, groups, last)

    def _plane(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the energy under each output's window, summed over a group's channels: batch, groups, *output."""
        last, groups = layers.channels(layer)
        energy = square_sum(x, groups, last)
        if self.energy == "offset":
            energy = energy + self._constant(x, groups, last)
        return layers.box(layer, energy, output_shape)

    def _constant(self, x: Tensor, groups: int, last: bool) -> float:
        """Return what the energy "offset" adds at each position."""
        return self.offset * (x.shape[-1] if last else x.shape[1] // groups)

    def draw(self, layer: nn.Module, shape: torch.Size, key: Tensor | None = None) -> Tensor:
        """Return one Δw, the same for every use of the weight in this step."""
        key = self.key.weight_key(self.number) if key is None else key
        assert key is not None, "no noise is drawn where it is off"
        sigma = (0.5 * self.log_var).exp()
        if self.sharing == "kernel":
            sigma = layers.per_weight(layer, sigma, torch.empty(shape, device="meta"))
        return sigma * normal(key.to(sigma.device), shape)


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
        weights = {}
        for name, noise in self._noises:
            key = noise.key.weight_key(noise.number)
            if key is None:
                return None
            holder, _, attribute = name.rpartition(".")
            module = layer.get_submodule(holder)
            weight = getattr(module, attribute)  # not detached: where it is trained, this pass is all that teaches it
            weights[name] = (weight + noise.draw(module, weight.shape, key)).to(weight.dtype)
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
    """Return the energy, which takes the place of x² in the variance path, in float32 or better.

    - "square": x², the paper's.
    - "offset": x² + constant, as released; zero padding still gets none.
    - "centred": (x − its mean over positions)², a sample and a channel at a time. A drawn kernel turns the constant
      part of its input into a constant shift, which the next norm layer removes; local noise would turn it into noise
      at every position. Without positions (a linear layer on plain vectors) there is nothing to centre: x².
    """
    if energy == "centred":
        x = centred(layer, x)
    square = x.to(wide(x.dtype)).square()
    return square + offset if energy == "offset" else square


def centred(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x less its mean over positions, a sample and a channel at a time, in float32 or better."""
    among, x = positions(layer, x), x.to(wide(x.dtype))
    return x - x.mean(dim=among, keepdim=True) if among else x


def positions(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a layer's input that are neither samples nor channels."""
    return tuple(range(1, x.ndim - 1)) if isinstance(layer, nn.Linear) else tuple(range(2, x.ndim))
