"""The perturbation of one weight: log-variances, their prior, and the hooks that add its noise to a layer's output."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import _global_forward_hooks

from undrift._errors import UndriftError
from undrift.kernels import add_noise, narrowed, normal, quick, square_sum
from undrift.kernels.reference import by_channel, safe_sqrt, spread, wide
from undrift.kernels.triton.known import Known
from undrift.kernels.triton.layer import noisy, plan_of
from undrift.kernels.triton.own import alone
from undrift.kernels.triton.tiles import dense
from undrift.options import Energy, Options, Sharing
from undrift.posterior import layers
from undrift.posterior.prior import initial_log_var, kernel_variance, prior_variance
from undrift.posterior.seeds import Key, rank


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
        key.enlist(number)
        self._known: Known | None = None  # the layer as its last pass met it
        self._key = (key,)  # in a tuple: shared by all noises, registered once, by the perturbed network

    @property
    def key(self) -> Key:
        """The seed, step and switch that all noises of a network share."""
        return self._key[0]

    def relative_std(self) -> Tensor:
        """Return σ over the standard deviation of its kernel."""
        return (0.5 * (self.log_var.detach() - self.kernel_var.log())).exp()

    def variance(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the variance of each output: σ² of the kernel × energy in its window, or the full second map."""
        if self.sharing == "weight":
            energy = input_energy(layer, x, self.energy, self.offset)
            return layers.apply(layer, energy, self.log_var.exp().to(energy.dtype), output_shape)
        plane = self.plane(layer, x, output_shape)
        last, groups = layers.channels(layer)
        return by_channel(self.log_var.exp().to(plane.dtype), output_shape, last) * spread(
            plane, output_shape, groups, last
        )

    def plane(self, layer: nn.Module, x: Tensor, output_shape: torch.Size, whole: bool = True) -> Tensor:
        """Return the energy under each output's window, summed over a group's channels: batch, groups, *output.

        Where it need not be `whole`, it may come in parts for `add_noise`.
        """
        last, groups = layers.channels(layer)
        if self.energy == "centred":
            x = centred(layer, x)
        energy = square_sum(x, groups, last, whole or self.energy == "offset")
        if self.energy == "offset":
            energy = energy + self.offset * (x.shape[-1] if last else x.shape[1] // groups)
        return layers.box(layer, energy, output_shape)

    def std(self, layer: nn.Module, x: Tensor, output_shape: torch.Size) -> Tensor:
        """Return the standard deviation of each output."""
        return safe_sqrt(self.variance(layer, x, output_shape))

    def draw(self, layer: nn.Module, shape: torch.Size, key: Tensor | None = None) -> Tensor:
        """Return one Δw, the same for every use of the weight in this step."""
        key = self.key.of(self.number) if key is None else key
        assert key is not None, "no noise is drawn where it is off"
        sigma = (0.5 * self.log_var).exp()
        if self.sharing == "kernel":
            sigma = layers.per_weight(layer, sigma, torch.empty(shape, device="meta"))
        return sigma * normal(key.to(sigma.device), shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}  # a copy has layers of its own

    # Hooks ------------------------------------------------------------------------------------------------------

    def local(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add noise with the right mean and variance to each output: local reparameterisation."""
        keys = self._key[0]
        if not torch.compiler.is_compiling():
            now, known = keys.ready, self._known
            if now is not None and known is not None and known.layer() is layer and keys.noisy and not keys.stale:
                again = known.add(now, layer, self, args[0] if args else kwargs["input"], output)
                if again is not None:
                    return again
        key = keys.next(self.number)
        if key is None:
            return None
        if not torch.compiler.is_compiling():
            quickly = self._quick(layer, args[0] if args else kwargs["input"], output, key)
            if quickly is not None:
                return quickly
        x, batched = self._input(layer, args, kwargs, output)
        x, output = self._narrow(layer, x, output)
        y = output if batched else output.unsqueeze(0)
        x = x if batched else x.unsqueeze(0)
        with without_autocast(x.device):
            out = self._add(layer, x, y, key.to(x.device), rank() * y.shape[0])
        return out if batched else out.squeeze(0)

    def _quick(self, layer: nn.Module, x: Tensor, y: Tensor, key: Tensor) -> Tensor | None:
        """Return y with its noise by one node of autograd, or None where that cannot be: autocast need not be left."""
        if self.sharing != "kernel" or not quick(x, y):
            return None
        now, given = self._key[0].ready, x
        place = rank() if now is None else now.rank  # asked for once a pass
        means: tuple[int, ...] = ()
        if self.energy == "centred":
            if x.requires_grad:
                return None
            means, x = positions(layer, x), centred(layer, x)  # images: nothing goes back through their mean
        log_var: Any = self._parameters.get("log_var")  # nn.Module looks elsewhere first
        if log_var is None:  # a parametrization makes it
            return None
        offset = self.offset if self.energy == "offset" else 0.0
        plan = plan_of(layer, x, y, log_var, offset, place)
        copied = plan is None
        if copied:
            # One token of a row of them, say: its copy takes a tenth of the time of the longer way.
            x = dense(x, isinstance(layer, nn.Linear))
            plan = plan_of(layer, x, y, log_var, offset, place)
        if plan is None:
            return None
        if key.get_device() != x.get_device():
            key = key.to(x.device)
        elif now is not None and (self._known is None or self._known.layer() is layer):
            # Of a weight that two layers share, the first is known: else each would be forgotten for the other.
            known = Known(layer, self.number, given, y, log_var, plan, now, means, copied)
            # Of an input that is prepared, one thing at a time: not centred and copied, nor cast alone.
            usable = known.add is not None and (x is given or bool(means) is not copied)
            vars(self)["_known"] = known if usable else None
        return noisy(x, y, log_var, key, plan, alone(layer, self))

    def _narrow(self, layer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's input and output, in a compiled graph both from the input in the product's own precision.

        Autocast hands the product a copy of x in lower precision. There the gradients of product and energy meet, and
        are one tensor of that precision. The product that the layer has made is not looked at again: no kernel is made
        for it.
        """
        # Somebody else may have changed y, or made it otherwise.
        other = len(layer._forward_hooks) > 1 or _global_forward_hooks or "forward" in layer.__dict__
        if type(layer) is not nn.Linear or other or self.sharing != "kernel":
            return x, y
        low = narrowed(x, y.dtype)
        return (x, y) if low is None else (low, F.linear(low, layer.weight, layer.bias))

    def _add(self, layer: nn.Module, x: Tensor, y: Tensor, key: Tensor, first_row: int) -> Tensor:
        last, groups = layers.channels(layer)
        if self.sharing == "kernel":
            handles = self.key.handles
            handle = None if handles is None else handles[self.number]
            plane = self.plane(layer, x, y.shape, whole=False)
            # What widens vectors mostly comes after a layer norm, which goes by rows: q, k, v; hidden units.
            by_rows = last and y.shape[-1] > x.shape[-1]
            return add_noise(y, plane, self.log_var, key, first_row, groups, last, handle, by_rows)
        std = self.std(layer, x, y.shape)
        noise = std * normal(key, y.shape, first_row).to(std.dtype)
        # Noise in float32, cast last: autocast must not turn its outputs into float32.
        return y + noise.to(y.dtype)

    def drawn(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """Add the layer's response to one draw of Δw for the whole batch."""
        key = self.key.of(self.number)
        if key is None:
            return None
        x, _ = self._input(layer, args, kwargs, output)
        with without_autocast(x.device):
            delta = self.draw(layer, layers.effective_shape(layer), key)
            full = x.to(wide(x.dtype))
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
        weights = {}
        for name, noise in self._noises:
            key = noise.key.of(noise.number)
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
    """Return what stands for x² in the variance path, in float32 or better.

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
    x, among = x.to(wide(x.dtype)), positions(layer, x)
    return x - x.mean(dim=among, keepdim=True) if among else x


def positions(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a layer's input that are neither samples nor channels."""
    return tuple(range(1, x.ndim - 1)) if isinstance(layer, nn.Linear) else tuple(range(2, x.ndim))


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast; most of the time there is none to leave, and entering takes its time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
