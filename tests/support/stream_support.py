"""A small perturbed network and batches that the tests of streams share."""

import torch
from torch import Tensor

import undrift
from support import convnet, images, snapshot
from undrift import Prediction
from undrift.keep import Keeper

NAN, INF = float("nan"), float("inf")


class Stopping(Keeper):
    """Raises in the middle of the next step, once its gradient is there."""

    def __init__(self) -> None:
        self.error: type[BaseException] | None = None

    def gradients(self, model: undrift.Perturbed) -> None:
        if (error := self.error) is not None:
            self.error = None
            raise error


def model_of(seed: int = 0, **options: object) -> undrift.Perturbed:
    torch.manual_seed(seed)
    return undrift.perturb(convnet(), generator=torch.Generator().manual_seed(seed), **options)


def batches(count: int, size: int = 6) -> list[Tensor]:
    return [images(size, seed) for seed in range(count)]


def equal(a: Prediction, b: Prediction) -> bool:
    return torch.equal(a.probs, b.probs) and torch.equal(a.mutual_info, b.mutual_info)


def state_of(model: undrift.Perturbed) -> dict[str, Tensor]:
    return snapshot(model)
