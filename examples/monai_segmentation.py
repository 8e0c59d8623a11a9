"""Follow a scanner with a network of MONAI that answers each voxel, and say which answers a person should look at.

pip install undrift monai
"""

from collections.abc import Iterable, Iterator
from itertools import tee

import torch
from monai.metrics import DiceMetric

import undrift


def answers(net: torch.nn.Module, scans: Iterable[torch.Tensor], unsure: float, **settings) -> Iterator:
    """Yield for each batch of scans the class of each voxel, and whether it is unsure; the network adapts meanwhile."""
    with undrift.stream(net, scans, **settings) as stream:
        for p in stream:
            yield p.label, p.entropy > unsure * torch.tensor(p.probs.shape[1]).log()
        stream.remove()  # the source network again, bit for bit


def dice(net: torch.nn.Module, loader: Iterable, classes: int, unsure: float = 0.5, **settings) -> tuple[float, float]:
    """Return the mean Dice score along a stream of (scans, labels), and the share of voxels to look at."""
    score, shares = DiceMetric(num_classes=classes), []
    images, labelled = tee(loader)
    for (label, look), (_, truth) in zip(answers(net, images, unsure, **settings), labelled, strict=True):
        score(label[:, None], truth[:, None])
        shares.append(look.float().mean())
    return float(score.aggregate()), float(torch.stack(shares).mean())
