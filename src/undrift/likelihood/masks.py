"""G-SFDA's two feature masks, and the one that is on (Yang et al. 2021).

    mask_d = sigmoid(s · e_d),   s = 100

Row 0 of e is the domain that the network is for, row 1 the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift.posterior.batch import device_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name

SHARP = 100.0
"""The scale of masks in use: all but binary."""


class Masks(nn.Module):
    """Two masks of a network's features, and which of them is on.

    Attributes:
        embedding: e, 2 × width.
        scale: s.
        chosen: the rows to use; (0, 1) gives the batch under both masks, one after the other.
        place: name of the module whose output they mask, where they belong to a perturbation (`attach_masks`).

    Args:
        width: number of features.
        generator: of the embedding, on the CPU; without it torch's global generator gives it.
    """

    def __init__(self, width: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        device = None if generator is None else generator.device
        self.embedding = nn.Parameter(torch.randn(2, width, generator=generator, device=device))
        self.place = ""
        self.scale = SHARP
        self.chosen: tuple[int, ...] = (0,)

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

    def behind(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Return a module's output under the mask: a hook, which a copy of the network takes along with its masks."""
        under: Tensor = self(output)
        return under

    def behind_with_kwargs(self, module: nn.Module, args: Any, _kwargs: Any, output: Tensor) -> Tensor:
        """Return the same, as a hook of a perturbation."""
        return self.behind(module, args, output)


def masks_of(net: nn.Module) -> Masks | None:
    """Return the network's masks, None where it has none."""
    return next((m for m in net.modules() if isinstance(m, Masks)), None)


def attach_masks(model: Perturbed, features: str, masks: Masks) -> Masks:
    """Put masks behind a module of a perturbed network, as part of the perturbation; `remove()` takes them off.

    Args:
        features: name of that module.
    """
    module = {plain_name(name): m for name, m in model.net.named_modules()}[features]
    masks.place = features
    with model.off():  # hooks go on again, with one more, at the end
        model.masks = masks.to(device_of(model)).requires_grad_(False)
        model._after.append((module, masks.behind_with_kwargs))
    return masks


def attached_masks(model: Perturbed) -> Masks | None:
    """Return the masks that came with the perturbation, None where there are none but the network's own."""
    masks = model._modules.get("masks")
    return masks if isinstance(masks, Masks) else None
