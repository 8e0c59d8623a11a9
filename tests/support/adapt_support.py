"""Networks, a shift and data sets that the tests of adapt share."""

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import undrift
from support import convnet

CLASSES = 3


def domain(count: int, seed: int, shifted: bool) -> tuple[Tensor, Tensor]:
    """Three patterns in noise; the shift takes contrast away and changes the brightness of each channel."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    x = patterns[labels] + 2.0 * torch.randn(count, 3, 8, 8, generator=generator)
    if shifted:
        x = 0.2 * x + torch.tensor([3.0, -3.0, 2.0]).view(3, 1, 1)
    return x, labels


@functools.cache
def trained() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, CLASSES),
    )
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    x, y = domain(192, 1, shifted=False)
    for at in list(range(0, 192, 32)) * 8:
        optimiser.zero_grad()
        F.cross_entropy(net(x[at : at + 32]), y[at : at + 32]).backward()
        optimiser.step()
    return net.eval()


def source(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return copy.deepcopy(trained())


def small(**options: Any) -> undrift.Perturbed:
    """Return the same small perturbed network every time; its answers differ from image to image."""
    torch.manual_seed(3)
    *body, _pool, flatten, _head = convnet()
    return undrift.perturb(nn.Sequential(*body, flatten, nn.Linear(128, 5)), **options)


class Untouchable:
    """A label that raises whatever is done to it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"a label was touched: {name}")


class Labelled(Dataset[Any]):
    def __init__(self, x: Tensor, form: str = "tuple") -> None:
        self.x, self.form = x, form

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        if self.form == "dict":
            return {"labels": Untouchable(), "pixel_values": self.x[i]}
        return self.x[i] if self.form == "plain" else (self.x[i], Untouchable())
