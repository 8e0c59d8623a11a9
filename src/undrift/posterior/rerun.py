"""Perturb modules that do not support local noise: run them again with drawn weights."""

from typing import Any

from torch import nn
from torch.func import functional_call

from undrift.posterior.noise import Noise


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
