"""G-SFDA's two feature masks (Yang et al. 2021).

    mask_d = sigmoid(s · e_d),   s = 100

Row 0 of e belongs to the network's own domain, row 1 to the other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from undrift.posterior.extra_modules import ExtraModule, extra_modules
from undrift.posterior.perturbed import Perturbed

SHARP = 100.0
"""The scale of masks in use: all but binary."""


class Masks(ExtraModule):
    """Two masks of a network's features, one of which is in use.

    Attributes:
        embedding: e, 2 × width.
        scale: s.
        chosen: the rows to use; (0, 1) gives the batch under both masks, one after the other.

    Args:
        width: number of features.
        generator: of the embedding, on the CPU; without it torch's global generator gives it.
    """

    kind = "masks"
    no_export = (
        "random feature masks were put on this network for G-SFDA, and a plain copy of it has no place for them: "
        "it would be another network. Train the source with undrift_bench.zoo.masked, or keep the domain file."
    )

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        device = None if generator is None else generator.device
        self.embedding = nn.Parameter(torch.randn(2, width, generator=generator, device=device))
        self.scale = SHARP
        self.chosen: tuple[int, ...] = (0,)

    @classmethod
    def sized_as(cls, tensors: Mapping[str, Tensor]) -> "Masks | None":
        """Return masks of the width that an embedding has, or None without one."""
        embedding = tensors.get("embedding")
        return None if embedding is None or embedding.ndim != 2 else cls(embedding.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Return the features under the chosen masks."""
        shape, masks = (1, -1, *(1,) * (x.ndim - 2)), self.masks()
        return torch.cat([x * masks[row].view(shape) for row in self.chosen])

    def masks(self) -> Tensor:
        """Return both masks, 2 × width."""
        return torch.sigmoid(self.scale * self.embedding)

    @contextmanager
    def using(self, *rows: int) -> Iterator[None]:
        """Use these masks for the length of a `with` block: `using(1)` tests an adapted network on its source."""
        before, self.chosen = self.chosen, rows
        try:
            yield
        finally:
            self.chosen = before


def masks_of(net: nn.Module) -> Masks | None:
    """Return the network's masks, or None."""
    return next((m for m in net.modules() if isinstance(m, Masks)), None)


def attached_masks(model: Perturbed) -> Masks | None:
    """Return masks that were added by the perturbation, or None; the network's own do not count."""
    return next((module for module in extra_modules(model) if isinstance(module, Masks)), None)
