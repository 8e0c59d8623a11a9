"""Tensors of one module that adaptation works on, while the source's own wait.

The network keeps the user's own tensors untouched: while it is perturbed, a module holds copies, and the originals wait
here. `exchange` puts the one set in the place of the other, without copying a value.
"""

from typing import Any

from torch import Tensor, nn


class Swapped:
    """The two sets of tensors of one module; `away` is the one that is not in it now.

    Attributes:
        name: of the module in the network.
        layer: the module.
        learned: whether the copies of its parameters are trained.
    """

    def __init__(self, name: str, layer: nn.Module, learned: bool) -> None:
        self.name, self.layer, self.learned = name, layer, learned
        self.away: dict[str, Tensor | None] = {}

    def copy(self, copies: dict[int, Tensor]) -> None:
        """Make copies of the module's tensors to adapt, to wait here; `copies` lets tied parameters stay tied."""
        for name, tensor in self.tensors().items():
            if tensor is not None and id(tensor) not in copies:
                fresh = tensor.detach().clone()
                copies[id(tensor)] = nn.Parameter(fresh, self.learned) if isinstance(tensor, nn.Parameter) else fresh
            self.away[name] = None if tensor is None else copies[id(tensor)]

    def exchange(self) -> None:
        """Put the tensors that wait here into the module, and those of the module here."""
        for name, tensor in self.tensors().items():
            other = self.away[name]
            if other is not None and tensor is not None:
                # model.to(…) moved what was in the module; what waited follows, as nn.Module.to does it.
                other.data = other.data.to(tensor.device, tensor.dtype)
            self.away[name] = tensor
            # Straight into the tables, so that no name changes its place among them.
            table: dict[str, Any] = self.layer._parameters if name in self.layer._parameters else self.layer._buffers
            table[name] = other

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the module now."""
        return [p for p in self.layer._parameters.values() if p is not None]

    def tensors(self) -> dict[str, Tensor | None]:
        """Return all that changes places, by its name in the module."""
        return {**self.layer._parameters, **self.layer._buffers}


class Trained(Swapped):
    """The own weights of one module, where a scheme trains them (option `train`)."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__(name, layer, learned=True)

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the module's own parameters; buffers that are no norm statistics stay the source's."""
        return dict(self.layer._parameters)
