"""G-SFDA's two feature masks, and the source training that makes them (Yang et al. 2021).

    mask_d = sigmoid(s · e_d),   s = 100

Row 0 of e belongs to the network's own domain, row 1 to the other: source and target on a source network, target and
source on an adapted one, whose copy of e has its rows exchanged. So a network uses row 0 wherever it is saved, loaded
or exported.

The source network is trained under both masks at once, so that each leaves enough features. A step:

    net = masked(zoo.build("shot_resnet50", classes=65))
    masks = masks_of(net)
    masks.scale = mask_scale(batch, batches)        # 0.01 at the first batch of an epoch, 100 at its last
    masked_loss(net, images, labels).backward()
    compensate(masks)
    optimiser.step()

(The authors divide by the number of loaders instead of batches, so their s passes 100 after three batches.) After
training the scale is 100.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.likelihood.masks import SHARP, Masks, masks_of
from undrift.posterior.outputs import logits as logits_of


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
        raise OptionError(f"{type(net).__name__} has no masks to train. Put them on: undrift_bench.zoo.masked(net).")
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
