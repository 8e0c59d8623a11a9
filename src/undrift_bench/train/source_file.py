"""The file of a source model: safetensors with a header that describes the weights.

| header | what |
|---|---|
| undrift_source | version of this header, "1" |
| network | the zoo's name of the architecture, or the class of the user's own |
| class_names | JSON list, by label |
| preprocess | JSON of `Preprocess.to_dict` |
| domain, images | name of the source domain, number of images trained on |
| accuracy, epoch | on the validation images ("" where there were none), of the epoch that was kept |
| seed, options | JSON of `TrainOptions.as_dict` |
| layout | "v1: …" for the first ResNet layout, which shapes cannot tell from the usual one |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from undrift._errors import DataError
from undrift.images import Preprocess
from undrift.system.atomic import write_bytes
from undrift_bench import zoo

VERSION = "1"
V1_LAYOUT = "v1: stride on the first 1x1, BatchNorm eps 1e-3"


@dataclass(frozen=True)
class SourceHeader:
    """What a source file knows of itself; the table above says it field by field."""

    network: str
    class_names: tuple[str, ...]
    preprocess: Preprocess
    domain: str
    images: int
    accuracy: float | None
    epoch: int
    seed: int
    options: Mapping[str, Any]


def write_source(path: Path, weights: Mapping[str, Tensor], header: SourceHeader) -> int:
    """Write the file whole or not at all and return its size in bytes."""
    text = {
        "undrift_source": VERSION,
        "network": header.network,
        "class_names": json.dumps(header.class_names, ensure_ascii=False),
        "preprocess": json.dumps(header.preprocess.to_dict()),
        "domain": header.domain,
        "images": str(header.images),
        "accuracy": "" if header.accuracy is None else repr(header.accuracy),
        "epoch": str(header.epoch),
        "seed": str(header.seed),
        "options": json.dumps(dict(header.options)),
    }
    if header.network.endswith("_v1"):
        text["layout"] = V1_LAYOUT
    return write_bytes(path, save({name: value.cpu().contiguous() for name, value in weights.items()}, text))


def read_header(path: str | PathLike[str]) -> SourceHeader:
    """Return what a source file says of itself, without reading its weights."""
    if not Path(path).is_file():
        raise DataError(f"there is no file {path}; needed: a source model. Train one with `undrift train`.")
    try:
        with safe_open(path, framework="pt") as file:
            text: dict[str, str] = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); needed: a safetensors file. It may be cut short: copy it again."
        ) from error
    if text.get("undrift_source") != VERSION:
        found = f"version {text['undrift_source']}" if "undrift_source" in text else "none of undrift's"
        raise DataError(
            f"{path} has a header of another kind ({found}); needed: one that `undrift train` wrote, version "
            f"{VERSION}. Name architecture, classes and preprocessing yourself: undrift_bench.zoo.load(name, path)."
        )
    try:
        return SourceHeader(
            text["network"],
            tuple(str(name) for name in json.loads(text["class_names"])),
            Preprocess.from_dict(json.loads(text["preprocess"])),
            text["domain"],
            int(text["images"]),
            float(text["accuracy"]) if text["accuracy"] else None,
            int(text["epoch"]),
            int(text["seed"]),
            json.loads(text["options"]),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"the header of {path} is damaged ({type(error).__name__}: {error}); needed: every field that `undrift "
            "train` writes. Copy the file again."
        ) from error


def load_source(path: str | PathLike[str]) -> tuple[nn.Module, SourceHeader]:
    """Return the network in eval mode, every tensor matched by name and shape, and what its file says of it."""
    header = read_header(path)
    return zoo.load(header.network, path, len(header.class_names)), header
