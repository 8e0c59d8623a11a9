"""A small classifier with opinions of its own, and its twin in plain PyTorch, for methods that adapt on a stream."""

import torch
from torch import Tensor, nn

from support import convnet, images

BATCHES = [images(12, seed) for seed in range(3)]
NORM_AFFINE = {"1.weight", "1.bias", "4.weight", "4.bias"}


def network() -> nn.Module:
    """Return a network in float64 that spreads its predictions over the classes, some of them sure."""
    torch.manual_seed(1)
    net = convnet().double()
    with torch.no_grad():
        batch_statistics(net)
        x = torch.cat(BATCHES).double()
        head = net[8]
        head.weight *= 60  # type: ignore[union-attr, operator]
        head.bias -= net(x).mean(0)  # type: ignore[union-attr, operator]
    net[1].track_running_stats = True  # type: ignore[union-attr]
    return net.eval()


def batch_statistics(net: nn.Module) -> nn.Module:
    """Let the norm layer of `convnet` use batch statistics, as plain PyTorch does it."""
    net[1].train().track_running_stats = False  # type: ignore[operator, index, union-attr]
    return net


def twin(train: bool = False) -> nn.Module:
    """Return the network with batch statistics; trained is its norm affine, or everything."""
    net = batch_statistics(network()).requires_grad_(train)
    for number in (1, 4):
        net[number].requires_grad_(True)  # type: ignore[index]
    return net


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def batches(count: int = 3) -> list[Tensor]:
    return [x.double() for x in BATCHES[:count]]


def entropies(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def close(one: nn.Module, other: nn.Module) -> None:
    """Check that what is trained of two networks is the same."""
    for got, wanted in zip(trained(one), trained(other), strict=True):
        torch.testing.assert_close(got, wanted)


def corrected_prior(logits: Tensor) -> Tensor:
    """Return ROID's prior by hand: the mean prediction, smoothed by as much as there are few images or classes."""
    images, classes = logits.shape
    mean = logits.softmax(1).mean(0)
    smooth = max(1 / images, 1 / classes) / mean.max()
    return (mean + smooth) / (1 + smooth * classes)


class Given(nn.Module):
    """A network that is told what to answer: an image is the number of a row of probabilities."""

    def __init__(self, probs: Tensor) -> None:
        super().__init__()
        self.probs, self.place = probs, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.probs[x[:, 0].long()].log() + self.place


def numbered(labels: Tensor, batch: int = 1000) -> list[tuple[Tensor, Tensor]]:
    """Return the images of `Given` with their labels."""
    numbers = torch.arange(len(labels))[:, None].float()
    return list(zip(numbers.split(batch), labels.split(batch), strict=True))
