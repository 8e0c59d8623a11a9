"""A small network and second heads for the methods that need something from source training."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift.likelihood import Rotation

UNTRAINED = "untrained"


class Small(nn.Module):
    """A shared part of two modules, and a classifier behind functional operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.layer2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.layer2(x))).mean((2, 3)))

    def shared(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.norm1(self.conv1(x))))


SHARED = ("conv1", "norm1", "layer2")


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def head_of(net: nn.Module, split: str | None = None) -> nn.Module:
    """Return the head that TTT makes of what comes after the split, by itself where none is given."""
    asked, model = Rotation(split), undrift.perturb(net, layers=())
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED), asked.watch(model):
        head = asked.head
    model.remove()
    assert head is not None
    return head


def trained_head(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return head_of(net)


def crops(images: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Return a window of each padded image, drawn as TTT draws it: two corners, and whether it is mirrored."""
    top, left = (torch.randint(2 * pad + 1, (len(images),), generator=generator).tolist() for _ in range(2))
    mirrored = (torch.rand(len(images), generator=generator) < 0.5).tolist()
    height, width = images.shape[-2:]
    cut = [
        padded[:, y : y + height, x : x + width].flip(-1) if flip else padded[:, y : y + height, x : x + width]
        for padded, y, x, flip in zip(F.pad(images, (pad,) * 4), top, left, mirrored, strict=True)
    ]
    return torch.stack(cut)


def rotated(images: Tensor, turns: Tensor) -> Tensor:
    return torch.stack([image.rot90(int(turn), (1, 2)) for image, turn in zip(images, turns, strict=True)])


class Fixed(nn.Module):
    """A head that says the same of every view."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, features: Tensor) -> Tensor:
        return self.logits + 0 * features.flatten(1).sum(1, keepdim=True)
