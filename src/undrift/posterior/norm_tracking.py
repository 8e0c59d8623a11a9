"""Let a batch norm update its own statistics in a pass, as in training.

It computes the batch's statistics anyway. Computing them again would be a second pass over every activation, which
takes half of a training step in a wide network on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn

from undrift.system.private import BatchNorm

AVERAGES = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)  # what a subclass does with its averages is unknown


def can_track(layer: Any, x: Tensor) -> bool:
    """Return whether the layer can normalise by batch statistics and move its averages in one call.

    PyTorch then requires averages, scale and shift of one dtype: the input's, or float32 for half precision.
    """
    if torch.compiler.is_compiling() or type(layer).forward not in FORWARDS or "forward" in vars(layer):
        return False
    tensors = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return dtypes in ({x.dtype}, {torch.promote_types(x.dtype, torch.float32)})


class Tracking:
    """The state to restore after such a pass; `again` marks a checkpoint's second run, whose updates are dropped."""

    def __init__(self, layer: Any, pace: float, again: bool = False) -> None:
        self.layer, self.pace, self.again = layer, pace, again
        self.momentum: float | None = layer.momentum
        self.old: dict[str, Any] = {name: layer._buffers.get(name) for name in (*AVERAGES, COUNT)}

    def begin(self) -> None:
        """Let the layer move copies of its averages at the given pace.

        Copies, as an earlier forward pass may still need the averages for its backward pass, and as a pass can fail.
        Apart from the constructor: whoever is stopped in here knows already what there is to undo.
        """
        self.layer._buffers.update({name: self.old[name].clone() for name in AVERAGES})
        # Batches are not counted. A synchronised layer requires a count; on the host it costs no launch.
        self.layer._buffers[COUNT] = torch.zeros(()) if isinstance(self.layer, nn.SyncBatchNorm) else None
        self.layer.__dict__["momentum"] = self.pace

    def undo(self) -> tuple[Tensor, Tensor]:
        """Restore the layer; return the mean and the variance that it moved."""
        mean, var = (self.layer._buffers[name] for name in AVERAGES)
        self.layer._buffers.update(self.old)
        self.layer.__dict__["momentum"] = self.momentum
        return mean, var

    def keep(self, in_place: bool) -> None:
        """Restore the layer except its averages, which have moved if the batch's statistics were finite."""
        mean, var = self.undo()
        # A later training step could not use tensors made in inference mode.
        with torch.inference_mode(False):
            # A NaN or infinite image must not stay in the average for ever. Either may tell of it alone, by the kernel
            # that computed them; 0 · ∞ is NaN.
            sound = torch.add(var, mean, alpha=0) < torch.inf
            for name, moved in zip(AVERAGES, (mean, var), strict=True):
                value = torch.where(sound, moved, self.old[name])
                if in_place:
                    self.old[name].copy_(value)
                else:
                    self.layer._buffers[name] = value
