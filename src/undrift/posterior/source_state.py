"""Keep and restore a source network's flags, requires_grad and buffers.

`off()` and `remove()` restore these, and the norm layers' own tensors, which `norm.Norm` keeps.
"""

import math

import torch
from torch import Tensor, nn

from undrift.system.private import write_count
from undrift.system.warning import warn


class SourceState:
    """The source side of a perturbed network: `restore` puts it in force, `leave` hands over to the perturbation."""

    def __init__(self, net: nn.Module) -> None:
        self.net, modules = net, list(net.modules())
        self._flags = [(m, m.training) for m in modules]
        self._left: list[bool] | None = None  # the flags of the perturbed network while it is off
        self._grads = [(p, p.requires_grad) for p in net.parameters()]
        self._names = [name for name, _ in net.named_parameters()]
        self._written: list[float] = []  # `_write_counts` at the last `restore`
        self._warned = False
        self._buffers = [(m, n, b.detach().clone()) for m in modules for n, b in m._buffers.items() if b is not None]
        # It packs padded batches before it checks for hooks, and hooked layers cannot take packed ones.
        encoders = [m for m in modules if isinstance(m, nn.TransformerEncoder)]
        self._packing = [m for m in encoders if getattr(m, "use_nested_tensor", False)]

    def restore(self) -> None:
        """Give the network its flags, its requires_grad and its buffers back, bit for bit."""
        self._left = [m.training for m, _ in self._flags]
        for module, flag in self._flags:
            module.training = flag
        for parameter, flag in self._grads:
            parameter.requires_grad_(flag)
        self._restore_buffers()
        self._written = self._write_counts()

    def leave(self) -> None:
        """Freeze the weights, and undo what forward passes in train mode did to the source's buffers."""
        self._restore_buffers()
        for parameter, _ in self._grads:
            parameter.requires_grad_(False)
        for (module, _), flag in zip(self._flags, self._left or [f for _, f in self._flags], strict=True):
            module.training = flag

    def pack_padding(self, packing: bool) -> None:
        """Let the network's transformer encoders pack padded batches, or not."""
        for encoder in self._packing:
            encoder.use_nested_tensor = packing

    def warn_of_changes(self) -> None:
        """Warn, once, if a weight was written to or replaced since `restore`.

        Only a warning, because the same values may have been written (an average that is tried and taken back), and
        some layers write in a forward pass (an embedding with `max_norm`). Moves to another device or dtype do not
        count; writes past autograd (`weight.data.copy_`) are not seen.
        """
        counts = zip(self._names, self._written, self._write_counts(), strict=True)
        changed = [name for name, before, now in counts if now > before]
        if not changed or self._warned:
            return
        self._warned = True
        few = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
        warn(
            f"{len(changed)} weights of the source network ({few}) were written to or replaced inside `with "
            "model.off():`; needed: unchanged weights, because σ, the prior and the norm statistics belong to them. "
            "For other weights: net = model.remove(), load them, undrift.perturb(net)."
        )

    def _write_counts(self) -> list[float]:
        """Return how often each weight was written to; infinity for one that is gone."""
        there = {id(p) for p in self.net.parameters()}
        return [write_count(p) if id(p) in there else math.inf for p, _ in self._grads]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for module, name, value in self._buffers:
            now: Tensor | None = module._buffers.get(name)
            if now is None or now.shape != value.shape:
                module._buffers[name] = value.clone()
            elif not torch.equal(now, value.to(now)):
                now.copy_(value)
