"""Networks by name, each with the preprocessing it was trained with."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError
from undrift.images.preprocess import GREY, IMAGENET, RAW, SHOT, Preprocess
from undrift.system.weights_file import fill, read
from undrift_bench.zoo.digits_net import digits
from undrift_bench.zoo.resnet import resnet50
from undrift_bench.zoo.resnext import resnext29
from undrift_bench.zoo.shot import shot_resnet50
from undrift_bench.zoo.ttt import resnet26_gn
from undrift_bench.zoo.wideresnet import wrn28_10, wrn40_2


@dataclass(frozen=True)
class Entry:
    """What the zoo knows of a network.

    Args:
        make: builds it with fresh weights, given `classes`.
        preprocess: what its published weights expect of an image.
        classes: the usual number of classes, None where there is none.
        head: the parameter whose rows are the classes.
        trunk: prefix of the tensors that come from a plain network's checkpoint.
        v1: whether it is the first ResNet layout.
    """

    make: Callable[[int], nn.Module]
    preprocess: Preprocess
    classes: int | None
    head: str = "fc.weight"
    trunk: str = ""
    v1: bool = False


_HEADS = ("fc.", "classifier.")
_HALVES = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))

_ENTRIES: dict[str, Entry] = {
    "digits": Entry(digits, GREY, 10),
    "resnet26_gn": Entry(resnet26_gn, RAW, 10),
    "resnet50": Entry(resnet50, IMAGENET, 1000),
    "resnet50_v1": Entry(partial(resnet50, v1=True), IMAGENET, 1000, v1=True),
    "resnext29": Entry(resnext29, _HALVES, 100, "classifier.weight"),
    "shot_resnet50": Entry(shot_resnet50, SHOT, None, "classifier.weight_v", "backbone."),
    "shot_resnet50_v1": Entry(partial(shot_resnet50, v1=True), SHOT, None, "classifier.weight_v", "backbone.", v1=True),
    "wrn28_10": Entry(wrn28_10, RAW, 10),
    "wrn40_2": Entry(wrn40_2, RAW, 10),
}


def names() -> tuple[str, ...]:
    """Return the names that `build`, `load`, `preprocess` and `transfer` know, sorted."""
    return tuple(sorted(_ENTRIES))


def preprocess(name: str) -> Preprocess:
    """Return what the network's published weights expect of an image."""
    return _entry(name).preprocess


def build(name: str, classes: int | None = None) -> nn.Module:
    """Return a network with fresh weights.

    Args:
        classes: number of classes; None takes the usual one (10 for CIFAR-10, 1,000 for ImageNet, …).
    """
    entry = _entry(name)
    classes = entry.classes if classes is None else classes
    if classes is None or classes < 1:
        raise OptionError(
            f"{name} was asked for with classes={classes}; needed: the number of classes of the source domain. "
            f"Say it: undrift_bench.zoo.build({name!r}, classes=31)."
        )
    return entry.make(classes)


def load(name: str, path: str | PathLike[str], classes: int | None = None) -> nn.Module:
    """Return a network in eval mode with a checkpoint's weights, every tensor matched by name and shape.

    Args:
        path: a .safetensors file, or a PyTorch file of weights; nothing in it is executed. Half precision becomes
            float32.
        classes: number of classes; None reads it from the file.
    """
    entry, path = _entry(name), Path(path)
    tensors, header = read(path)
    _check_layout(name, entry, path, header)
    network = build(name, classes or _classes(entry, tensors) or entry.classes or 1)
    fill(network, tensors, f"{path} as {name}")
    return network.eval()


def transfer(name: str, path: str | PathLike[str], classes: int) -> nn.Module:
    """Return a network for new classes whose trunk comes from a checkpoint; only its head (and bottleneck) is fresh.

    Args:
        path: a checkpoint of the plain network, such as ImageNet's ResNet-50 for `shot_resnet50`.
        classes: number of classes of the source domain.
    """
    entry, path = _entry(name), Path(path)
    tensors, header = read(path)
    _check_layout(name, entry, path, header, trunk=True)
    network = build(name, classes)
    own = network.state_dict()
    fresh = {key: own[key] for key in own if key.startswith(_HEADS) or not key.startswith(entry.trunk)}
    trunk = {entry.trunk + key: value for key, value in tensors.items() if not key.startswith(_HEADS)}
    fill(network, fresh | trunk, f"{path} as the trunk of {name}")
    return network


def _entry(name: str) -> Entry:
    if name in _ENTRIES:
        return _ENTRIES[name]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), _ENTRIES, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Choose one of these, or build the network yourself."
    raise OptionError(f"the zoo has no network {name!r}; known: {', '.join(names())}. {hint}")


def _classes(entry: Entry, tensors: Mapping[str, Tensor]) -> int | None:
    """Return the rows of a checkpoint's head, None where it has none of this network's: `fill` says what is wrong."""
    with torch.device("meta"):
        row = entry.make(1).state_dict()[entry.head].shape[1:]
    head = tensors.get(entry.head)
    return len(head) if head is not None and head.dim() and head.shape[1:] == row else None


def _twin(name: str) -> str | None:
    """Return the network's name in the other layout, None where there is one layout."""
    other = name.removesuffix("_v1") if name.endswith("_v1") else f"{name}_v1"
    return other if other in _ENTRIES else None


def _check_layout(name: str, entry: Entry, path: Path, header: Mapping[str, str], trunk: bool = False) -> None:
    # Both layouts have the same names and shapes: only the header can tell that strides and eps differ.
    layout, network = header.get("layout", ""), header.get("network", "")
    v1 = True if layout.startswith("v1:") else _ENTRIES[network].v1 if network in _ENTRIES else entry.v1
    other = _twin(name)
    # A file of another network altogether is for `fill` to refuse, which says whose names it has. A trunk may be one's.
    meant = network in ("", other) or (trunk and _twin(network) is not None)
    if v1 != entry.v1 and other is not None and meant:
        raise DataError(
            f"{path} was written for another layout ({layout or network}); needed: weights of {name}, whose strides "
            f"and eps differ. Use {other}."
        )
