"""What a network was when it was perturbed, beside its norm layers: flags, gradients, buffers.

Together with `norm.Norm`, which keeps the norm layers' own tensors, this is what `off()` and `remove()` give back.
"""

import torch
from torch import Tensor, nn


class Source:
    """The user's side of a perturbed network; `restore` puts it in force, `leave` hands over to the perturbation."""

    def __init__(self, net: nn.Module) -> None:
        modules = list(net.modules())
        self._flags = [(m, m.training) for m in modules]
        self._left: list[bool] | None = None  # the flags of the perturbed network while it is off
        self._grads = [(p, p.requires_grad) for p in net.parameters()]
        self._buffers = [(m, n, b.detach().clone()) for m in modules for n, b in m._buffers.items() if b is not None]
        # It packs padded batches before it looks whether its layers are hooked, and hooked layers cannot take that.
        encoders = [m for m in modules if isinstance(m, nn.TransformerEncoder)]
        self._packing = [m for m in encoders if getattr(m, "use_nested_tensor", False)]

    def restore(self) -> None:
        """Give the network its flags, its requires_grad and its buffers back, bit for bit."""
        self._left = [m.training for m, _ in self._flags]
        for module, flag in self._flags:
            module.training = flag
        for parameter, flag in self._grads:
            parameter.requires_grad_(flag)
        for encoder in self._packing:
            encoder.use_nested_tensor = True
        self._restore_buffers()

    def leave(self) -> None:
        """Freeze the weights, and undo what a forward pass in train mode did to the source's buffers."""
        self._restore_buffers()
        for parameter, _ in self._grads:
            parameter.requires_grad_(False)
        for encoder in self._packing:
            encoder.use_nested_tensor = False
        for (module, _), flag in zip(self._flags, self._left or [f for _, f in self._flags], strict=True):
            module.training = flag

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for module, name, value in self._buffers:
            now: Tensor | None = module._buffers.get(name)
            if now is None or now.shape != value.shape:
                module._buffers[name] = value.clone()
            elif not torch.equal(now, value.to(now)):
                now.copy_(value)
