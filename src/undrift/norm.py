"""What norm layers do while a network is perturbed: whose statistics they use, and whether scale and shift are trained.

The network keeps the user's own tensors untouched: while it is perturbed, each norm layer holds copies, and the
originals wait here. `exchange` puts the one set in the place of the other, without copying a value.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from undrift._errors import UndriftError
from undrift.key import Key
from undrift.options import Options, Statistics

KINDS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class Norm:
    """The policy of one norm layer, and the source's state of it.

    Its hooks set the layer's flags for the time of its forward pass only, so `train()` and `eval()` of the network
    keep their meaning for everything else.
    """

    def __init__(self, name: str, layer: nn.Module, options: Options, frozen: bool, key: Key) -> None:
        self.name, self.layer, self.key = name, layer, key
        tracked = getattr(layer, "running_mean", None) is not None
        wanted: Statistics = "source" if frozen else options.norm_statistics
        self.statistics: Statistics | None = wanted if tracked else None
        self.momentum = options.norm_momentum
        self.affine = options.norm_affine and not frozen
        self.away: dict[str, Tensor | None] = {}  # the set of tensors that is not in the layer now
        self.flags: dict[str, bool] = {}

    def copy(self, copies: dict[int, Tensor]) -> None:
        """Make copies of the layer's tensors to adapt, to wait here; `copies` lets tied parameters stay tied."""
        for name, tensor in self._tensors().items():
            if tensor is not None and id(tensor) not in copies:
                fresh = tensor.detach().clone()
                copies[id(tensor)] = nn.Parameter(fresh, self.affine) if isinstance(tensor, nn.Parameter) else fresh
            self.away[name] = None if tensor is None else copies[id(tensor)]

    def exchange(self) -> None:
        """Put the tensors that wait here into the layer, and those of the layer here."""
        self.settle()
        for name, tensor in self._tensors().items():
            other = self.away[name]
            if other is not None and tensor is not None:
                # model.to(…) moved what was in the layer; what waited follows, as nn.Module.to does it.
                other.data = other.data.to(tensor.device, tensor.dtype)
            self.away[name] = tensor
            self._put(name, other)

    def parameters(self) -> list[nn.Parameter]:
        """Return the scale and shift in the layer, if there are any."""
        return [p for p in self.layer._parameters.values() if p is not None]

    def _tensors(self) -> dict[str, Tensor | None]:
        return {**self.layer._parameters, **self.layer._buffers}

    def _put(self, name: str, tensor: Tensor | None) -> None:
        # Straight into the tables, so that no name changes its place among them.
        table: dict[str, Any] = self.layer._parameters if name in self.layer._parameters else self.layer._buffers
        table[name] = tensor

    # Hooks ------------------------------------------------------------------------------------------------------

    def before(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the layer to its policy: batch statistics, or the kept ones, after they have moved."""
        if not self.key.enabled or self.statistics is None:
            return
        self.settle()
        x: Tensor = args[0] if args else kwargs["input"]
        if self.statistics == "batch":
            self._refuse_single(x)
        elif self.statistics == "moving" and self.key.mode()[1]:
            self._move(layer, x)
        self.flags = {"training": layer.training, "track_running_stats": bool(layer.track_running_stats)}
        batch_norm = isinstance(layer, _BatchNorm)
        # Batch statistics are train mode for a batch norm, and "not tracking" for both; tracking off keeps a batch
        # norm from moving its averages.
        layer.training = self.statistics == "batch" and batch_norm
        layer.track_running_stats = self.statistics != "batch"

    def after(self, _layer: Any, _args: Any, _kwargs: Any, _output: Any) -> None:
        """Give the layer its own flags back."""
        self.settle()

    def settle(self) -> None:
        """Give the layer its own flags back; a forward pass that raised could not."""
        if self.flags:
            layer: Any = self.layer
            layer.training = self.flags["training"]
            layer.track_running_stats = self.flags["track_running_stats"]
            self.flags = {}

    def _refuse_single(self, x: Tensor) -> None:
        if x.numel() // x.shape[1] == 1:
            raise UndriftError(
                f"{self.name} ({type(self.layer).__name__}) got one value a channel (input {tuple(x.shape)}); batch "
                'statistics need at least two. Use a larger batch, or norm_statistics="moving" or "source".'
            )

    def _move(self, layer: Any, x: Tensor) -> None:
        """Move the kept statistics towards the batch's (they start at the source's)."""
        mean, var = self.key.once(lambda: self._moved(layer, x.detach()))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # An inference tensor could not take part in a later training step.
            with torch.inference_mode(False):
                mean, var = mean.clone(), var.clone()
        # New tensors: an earlier forward pass may still need the old ones for its backward pass.
        layer.running_mean, layer.running_var = mean, var

    @torch.no_grad()
    def _moved(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        old_mean: Tensor = layer.running_mean
        old_var: Tensor = layer.running_var
        if x.numel() // x.shape[1] == 1:
            return old_mean, old_var  # one value has no variance
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        positions = tuple(range(2, x.ndim))
        instances = isinstance(layer, _InstanceNorm)
        var = x.var(dim=positions).mean(0) if instances else x.var(dim=(0, *positions))
        mean = x.mean(dim=(0, *positions))
        # A NaN or infinite image must not stay in the average for ever.
        sound = torch.isfinite(mean) & torch.isfinite(var)

        def moved(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(sound, torch.lerp(old.to(new.dtype), new, self.momentum).to(old.dtype), old)

        return moved(old_mean, mean), moved(old_var, var)
