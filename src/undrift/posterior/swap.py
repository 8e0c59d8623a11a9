"""Exchange a module's tensors: copies for adaptation, the source's own for `off()` and `remove()`.

The user's own tensors are never changed: while the network is perturbed, a module holds copies and the originals are
kept here. `exchange` swaps the two sets without copying a value.
"""

from collections.abc import Container
from typing import Any

from torch import Tensor, nn


class Swapped:
    """The two sets of tensors of one module; `away` is the one not in it now.

    Attributes:
        name: of the module in the network.
        layer: the module.
        learned: whether the copies of its parameters are trained.
    """

    hears_of_errors = True  # its hooks run behind a pass that raised, too: what the pass put in may not stay

    def __init__(self, name: str, layer: nn.Module, learned: bool) -> None:
        self.name, self.layer, self.learned = name, layer, learned
        self.away: dict[str, Tensor | None] = {}

    def copy(self, copies: dict[int, Tensor]) -> None:
        """Make copies of the module's tensors to adapt; `copies` keeps tied parameters tied."""
        for name, tensor in self.tensors().items():
            if tensor is not None and id(tensor) not in copies:
                fresh = tensor.detach().clone()
                copies[id(tensor)] = nn.Parameter(fresh, self.learned) if isinstance(tensor, nn.Parameter) else fresh
            self.away[name] = None if tensor is None else copies[id(tensor)]

    def exchange(self) -> None:
        """Exchange the module's tensors and those kept here."""
        for name, tensor in self.tensors().items():
            other = self.away[name]
            if other is not None and tensor is not None:
                # model.to(…) moved only what was in the module; the others follow now.
                other.data = other.data.to(tensor.device, tensor.dtype)
            self.away[name] = tensor
            # Directly into the dictionaries, so that the order of names stays.
            table: dict[str, Any] = self.layer._parameters if name in self.layer._parameters else self.layer._buffers
            table[name] = other

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the module now."""
        return [p for p in self.layer._parameters.values() if p is not None]

    def tensors(self) -> dict[str, Tensor | None]:
        """Return all tensors to exchange, by name in the module."""
        return {**self.layer._parameters, **self.layer._buffers}


class Trained(Swapped):
    """The weights of one module that a scheme trains (option `train`), all but those named in `without`."""

    def __init__(self, name: str, layer: nn.Module, without: Container[str] = ()) -> None:
        super().__init__(name, layer, learned=True)
        self._without = without

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the module's own parameters; buffers other than norm statistics stay the source's."""
        return {name: p for name, p in self.layer._parameters.items() if name not in self._without}
