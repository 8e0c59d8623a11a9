"""Make corrupted images once and keep them as uint8: domains × images × channels × height × width."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images import TensorDomain
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.images.sources import BROKEN_ARRAY
from undrift.system.atomic import writing
from undrift_bench.data import cifar10

Kind = tuple[str, int]
"""A corruption and its severity."""


class Corrupted:
    """The corruptions of one data set; what was made before is handed out again.

    Corruptions are drawn with seed 0 always: a benchmark's seed changes the order of the images and the method's own
    randomness, not the images. CPU and GPU draw different numbers, so a cached file says which.
    """

    def __init__(self, clean: TensorDomain, device: torch.device, cache: Path | None, frost: Path | None) -> None:
        self.clean, self.device, self.cache, self.frost = clean, device, cache, frost
        self._held: dict[tuple[Kind, ...], Tensor] = {}

    def held(self, kinds: Sequence[Kind], count: int) -> Tensor:
        """Return the first images under each corruption, on the device where they fit there easily."""
        asked = tuple(kinds)
        if asked not in self._held or self._held[asked].shape[1] < count:
            shape = (len(asked), count, *self.clean.images.shape[1:])
            out = torch.empty(shape, dtype=torch.uint8, device=self._place(shape))
            for place, (name, severity) in enumerate(asked):
                out[place] = self._one(name, severity, count)
            self._held[asked] = out
        return self._held[asked][:, :count]

    def _one(self, name: str, severity: int, count: int) -> Tensor:
        file = self._file(name, severity, count)
        if file is not None and file.is_file():
            return _read(file, (count, *self.clean.images.shape[1:]))
        clean = self.clean.images[:count].to(self.device)
        made = corrupt(clean, name, severity, frost=self.frost)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with writing(file) as out:
                np.save(out, made.cpu().numpy())
        return made

    def _file(self, name: str, severity: int, count: int) -> Path | None:
        if self.cache is None:
            return None
        data = self.clean.name.replace(" ", "-")
        return self.cache / f"{data}-{name}-{severity}-n{count}-{self.device.type}.npy"

    def _place(self, shape: tuple[int, ...]) -> torch.device:
        if self.device.type != "cuda":
            return self.device
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if int(np.prod(shape)) < free / 2 else torch.device("cpu")


def _read(file: Path, shape: tuple[int, ...]) -> Tensor:
    try:
        images = np.load(file, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise DataError(
            f"{file} cannot be read ({error}); needed: corrupted images. Delete it: it is made again."
        ) from error
    if images.shape != shape or images.dtype != np.uint8:
        raise DataError(
            f"{file} holds {images.dtype} of shape {images.shape}; needed: uint8 of shape {shape}. Delete it: it is "
            "made again."
        )
    return torch.from_numpy(images)


def development(folder: Path, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a stream to choose values on, and its labels: CIFAR-10's first images under each development corruption.

    At severity 5, one corruption after another; never among the fifteen that results are reported on.
    """
    clean, labels = next(iter(cifar10(folder).select(range(count)).batches(count)))
    return torch.cat([corrupt(clean, name, 5) for name in DEVELOPMENT]).to(device), labels.repeat(len(DEVELOPMENT))
