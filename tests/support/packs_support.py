"""A small trained-looking network, three domains of random images, and packs of them that the tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift

DOMAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "home": lambda x: x,
    "night": lambda x: x / 10,
    "snow": lambda x: 1 - x / 5,
}


def network(norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(8)) -> nn.Module:
    """Return a network whose batch norms know the home domain."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    )
    net.train()
    with torch.no_grad():
        for seed in range(40):
            net(of("home", 64, seed))
    return net.eval()


def of(domain: str, count: int, seed: int = 0) -> Tensor:
    return DOMAINS[domain](torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)))


def packs_in(folder: Path, net: nn.Module, *names: str, method: str = "undrift-light", **settings: Any) -> list[Path]:
    """Adapt the network to domains, and save a pack of each; the network is as before."""
    places = []
    if method.startswith("undrift"):
        settings = {"least_agreement": 0.0, **settings}  # the network has learned nothing
    for name in names:
        model = undrift.adapt(net, of(name, 64, 99), method=method, epochs=1, progress=False, **settings).model
        assert model is not None
        places.append(folder / f"{name}.safetensors")
        undrift.save(model, places[-1])
        model.remove()
    return places


def mixed(count: int, *names: str) -> Tensor:
    return torch.cat([of(name, count, 7) for name in names])
