"""Images and source networks of the offline benchmarks: decoded once, trained once, shared by all cells."""

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from undrift._errors import DataError
from undrift.images import FileDomain, Preprocess, TensorDomain, split
from undrift.images.preprocess import SHOT
from undrift.system.atomic import write_bytes, writing
from undrift.system.weights_file import fill, read
from undrift_bench import zoo
from undrift_bench.bench.harness.networks import RESNET50
from undrift_bench.bench.harness.request import CannotRun, Request, TooLate
from undrift_bench.bench.offline.masked import train_masked
from undrift_bench.bench.offline.sets import DataSet
from undrift_bench.train import TrainOptions, load_source, train_preset, train_source
from undrift_bench.zoo.gsfda import masked

HELD_OUT = 0.2  # of the source, as the generalized setting has it: one source network serves both tables


@dataclass(frozen=True)
class Setup:
    """What a benchmark's cells are made of.

    Attributes:
        dataset: which tasks.
        network: the name in cells.
        options: of source training; the seed is the cell's.
        read: gives a domain by its name.
        preprocess: what the network expects of an image.
        make: builds the network for a number of classes; None takes SHOT's ResNet-50 and ImageNet's weights.
        epochs: of every adaptation; None leaves each method its own.
    """

    dataset: DataSet
    network: str
    options: TrainOptions
    read: Callable[[str], FileDomain | TensorDomain]
    preprocess: Preprocess = SHOT
    make: Callable[[int], nn.Module] | None = None
    epochs: int | None = None


def setup(dataset: DataSet, request: Request) -> Setup:
    """Return the real thing: SHOT's ResNet-50 and the images of the data folder."""
    options = train_preset("shot").replace(epochs=dataset.source_epochs, held_out=HELD_OUT)

    def load(domain: str) -> FileDomain:
        below = request.data / dataset.folder
        try:
            return dataset.load(below if below.is_dir() else request.data, domain)
        except DataError as error:
            raise CannotRun(f"{error} Name the folder with --data.") from error

    return Setup(dataset, "resnet50", options, load)


class Images:
    """The domains of a data set as uint8 on the device; `cache` keeps what was decoded, for other processes too."""

    def __init__(self, made_of: Setup, request: Request) -> None:
        self.setup, self.cache, self.most, self.device = made_of, request.cache, request.images, request.place
        self._held: dict[str, TensorDomain] = {}

    def __call__(self, domain: str) -> TensorDomain:
        """Return a domain: whole frames, not yet cropped; its preprocessing is the network's."""
        if domain not in self._held:
            found = self.setup.read(domain)
            if self.most is not None and self.most < len(found):
                found = found.select(range(self.most))
            held = self._frames(found, domain) if isinstance(found, FileDomain) else found
            self._held[domain] = held.prepared(self.setup.preprocess).to(self.device)
        return self._held[domain]

    def _frames(self, domain: FileDomain, name: str) -> TensorDomain:
        uncropped = replace(self.setup.preprocess, crop=None)
        size = "x".join(map(str, uncropped.resize if isinstance(uncropped.resize, tuple) else (uncropped.resize,)))
        file = f"{self.setup.dataset.name}-{name}-{size}-n{len(domain)}.npz"
        place = None if self.cache is None else self.cache / file
        if place is not None and place.is_file():
            images, labels = _read_frames(place)
            return TensorDomain(domain.name, images, labels, domain.class_names)
        held = domain.prepared(uncropped).hold()
        assert held.labels is not None, "a benchmark's images have labels"
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with writing(place) as file_out:
                np.savez(file_out, images=held.images.numpy(), labels=held.labels.numpy())
        return held


def _read_frames(place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with np.load(place, allow_pickle=False) as found:
            images, labels = found["images"], found["labels"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(
            f"{place} cannot be read ({error}); needed: decoded images. Delete it: it is made again."
        ) from error
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
        raise DataError(
            f"{place} holds {images.dtype} of shape {images.shape} and {len(labels)} labels; needed: uint8 N×C×H×W "
            "with a label per image. Delete it: it is made again."
        )
    return torch.from_numpy(images), torch.from_numpy(labels)


class Sources:
    """Source networks, trained when first asked for on 80 % of a domain, and kept under `cache`.

    Args:
        before: what a training has to be finished before, as `time.monotonic` counts; None is never.
    """

    def __init__(self, made_of: Setup, images: Images, request: Request, before: float | None = None) -> None:
        self.setup, self.images, self.request, self.before = made_of, images, request, before
        self._networks: dict[tuple[str, int, bool], nn.Module] = {}
        self._seconds_an_image = 0.0
        self._scratch: Path | None = None

    def network(self, domain: str, seed: int, masks: bool = False) -> nn.Module:
        """Return the source network of a domain and seed in eval mode, on the CPU; a cell takes a copy of its own.

        Args:
            masks: the one with G-SFDA's feature masks, which is trained by itself.
        """
        key = (domain, seed, masks)
        if key not in self._networks:
            place = self._place(*key)
            if not place.is_file():
                self._train(*key, place)
            self._networks[key] = self._load(place, domain, masks)
        return self._networks[key]

    def held_out(self, domain: str, seed: int) -> TensorDomain:
        """Return the 20 % of a domain that its source network was not trained on."""
        return split(self.images(domain), HELD_OUT, seed)[1]

    def _train(self, domain: str, seed: int, masks: bool, place: Path) -> None:
        images = self.images(domain)
        self._refuse_if_late(domain, len(images))
        options = self.setup.options.replace(seed=seed)
        trunk = self._trunk() if self.setup.make is None else None
        options = options if trunk is None else options.replace(network=shot_network(trunk))
        begun = time.monotonic()
        # Under a name of this process: two that train the same source at once must not share a checkpoint.
        own = place.with_name(f".{place.stem}-{os.getpid()}.safetensors")
        if masks:
            parts = split(images, HELD_OUT, seed)
            net = masked(self._fresh(len(images.class_names), seed, trunk, options.network))
            weights = train_masked(net, *parts, options, self.request.place)
            write_bytes(own, save({n: w.cpu().contiguous() for n, w in weights.items()}, {"network": options.network}))
        else:
            how: dict[str, Any] = {"device": self.request.place, "progress": False, "overwrite": True}
            network = None if trunk else self._fresh(len(images.class_names), seed, None, "")
            train_source(images, own, options, trunk=trunk, network=network, **how)
        self._seconds_an_image = (time.monotonic() - begun) / len(images)
        if place.is_file():
            own.unlink()  # another process was first: all cells have one source
        else:
            own.replace(place)
        own.with_suffix(".png").unlink(missing_ok=True)

    def _fresh(self, classes: int, seed: int, trunk: Path | None, name: str) -> nn.Module:
        torch.manual_seed(seed)
        if self.setup.make is not None:
            return self.setup.make(classes)
        return zoo.build(name, classes) if trunk is None else zoo.transfer(name, trunk, classes)

    def _refuse_if_late(self, domain: str, images: int) -> None:
        if self.before is not None:
            left, guess = self.before - time.monotonic(), self._seconds_an_image * images
            if left < guess:
                raise TooLate(
                    f"{left:.0f} s are left, and training the source network on {domain} takes about {guess:.0f} s. "
                    "Call again with more time."
                )

    def _load(self, place: Path, domain: str, masks: bool) -> nn.Module:
        if self.setup.make is None and not masks:
            return load_source(place)[0]
        tensors, header = read(place)
        network = self._fresh(len(self.images(domain).class_names), 0, None, header.get("network", ""))
        fill(masked(network) if masks else network, tensors, str(place))
        return network.eval()

    def _place(self, domain: str, seed: int, masks: bool) -> Path:
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        made_of = f"{self.setup.dataset.name}-{domain}-{self.setup.network}-e{self.setup.options.epochs}"
        made_of += "-masks" if masks else ""
        return folder / f"{made_of}-n{len(self.images(domain))}-s{seed}.safetensors"

    def _folder(self) -> Path:
        if self.request.cache is not None:
            return self.request.cache / "sources"
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _trunk(self) -> Path:
        given = [f for n in ("resnet50_v1", "resnet50", "shot_resnet50") if (f := self.request.weights.get(n))]
        data_folder = self.request.data
        places = given or [data_folder / RESNET50.file, data_folder.parent / RESNET50.file]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise CannotRun(f"there is no {places[0]}; needed: ImageNet's ResNet-50. {RESNET50.get}")
        return found


def shot_network(trunk: Path) -> str:
    """Return the zoo's name of SHOT's network over a ResNet-50 file, whose layout only its header can tell."""
    layout = ""
    if trunk.suffix == ".safetensors":
        try:
            with safe_open(trunk, framework="pt") as file:
                layout = (file.metadata() or {}).get("layout", "")
        except (SafetensorError, OSError) as error:
            raise DataError(
                f"{trunk} cannot be read ({error}); needed: a safetensors file of ResNet-50. Copy it again."
            ) from error
    name = "shot_resnet50_v1" if layout.startswith("v1:") else "shot_resnet50"
    assert name in zoo.names(), "the zoo has both layouts"
    return name
