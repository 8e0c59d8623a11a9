"""G-SFDA's two feature masks, and the source training that makes them (Yang et al. 2021).

    mask_d = sigmoid(s · e_d),   s = 100

Row 0 of e is the domain that the network is for, row 1 the other: on a source network the source's and the target's,
and on one that was adapted, whose copy of e has its rows exchanged, the target's and the source's. So no network has to
be told which mask is its own, wherever it is saved, loaded or exported to.

The source network is trained under both masks at once, so that each leaves features enough to classify with. A step:

    net = masked(zoo.build("shot_resnet50", classes=65))
    masks = masks_of(net)
    masks.scale = mask_scale(batch, batches)        # 0.01 at the first batch of an epoch, 100 at its last
    masked_loss(net, images, labels).backward()
    compensate(masks)
    optimiser.step()

The authors divide by the number of their loaders where the number of batches was meant, so their s passes 100 after
three batches. After training the scale is 100.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._batches import device_of
from undrift._errors import OptionError
from undrift._outputs import logits as logits_of
from undrift.perturb import Perturbed
from undrift.select import plain_name

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


def masked(net: nn.Module, width: int | None = None, features: str = "bottleneck") -> nn.Module:
    """Return the network, changed in place, with fresh masks behind the module that gives its features.

    Args:
        width: number of features; None reads it from the module's last norm or linear layer.
        features: name of that module.

    Examples:
        >>> net = nn.Sequential()
        >>> net.bottleneck, net.fc = nn.Linear(4, 8), nn.Linear(8, 2)
        >>> sorted(masked(net).state_dict())[:3]
        ['bottleneck.bias', 'bottleneck.masks.embedding', 'bottleneck.weight']
    """
    module = dict(net.named_modules()).get(features)
    if module is None or masks_of(net) is not None:
        found = "has masks already" if module is not None else f"has no module {features!r}"
        raise OptionError(f"{type(net).__name__} {found}; masks go behind the features, once. Name it: features=….")
    sizes = [getattr(m, "num_features", None) or getattr(m, "out_features", None) for m in module.modules()]
    known = [size for size in sizes if size is not None]
    if width is None and not known:
        raise OptionError(f"{features} has neither a norm nor a linear layer that tells its width. Give it: width=….")
    masks = Masks(known[-1] if width is None else width)
    module.add_module("masks", masks)
    if not isinstance(module, nn.Sequential):  # a Sequential calls it by itself
        module.register_forward_hook(masks.behind)
    return net


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


def mask_scale(batch: int, batches: int) -> float:
    """Return the scale of the batch-th (from 0) of an epoch's batches: it rises from 0.01 to 100."""
    return 1 / SHARP + (SHARP - 1 / SHARP) * min(1.0, batch / max(1, batches - 1))


def masked_loss(
    net: nn.Module, images: Tensor, labels: Tensor, sparsity: float = 0.15, label_smoothing: float = 0.1
) -> Tensor:
    """Return G-SFDA's source loss: smoothed cross-entropy under each mask, and `sparsity` times the mean of both masks.

    Args:
        net: from `masked`; what comes after its masks treats each row by itself, as a classifier does.
        sparsity: 0.15 on Office-Home, 0.75 on VisDA.
    """
    masks = masks_of(net)
    if masks is None:
        raise OptionError(f"{type(net).__name__} has no masks to train. Put them on: undrift.zoo.masked(net).")
    with masks.using(0, 1):
        both = logits_of(net(images)).chunk(2)
    fits = [F.cross_entropy(z, labels, label_smoothing=label_smoothing) for z in both]
    return fits[0] + fits[1] + sparsity * masks.masks().mean()


@torch.no_grad()
def compensate(masks: Masks) -> None:
    """Multiply e's gradient by (100/s) · (cosh(clip(s·e, ±10)) + 1) / (cosh e + 1), as steep sigmoids pass none."""
    e, s = masks.embedding, masks.scale
    if e.grad is not None:
        e.grad *= SHARP / s * (torch.cosh((s * e).clamp(-10, 10)) + 1) / (torch.cosh(e) + 1)
