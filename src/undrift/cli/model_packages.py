"""Load networks of timm, torchvision and Hugging Face with their packages' preprocessing.

None of the three is a dependency; each is imported on first use. The packages download weights themselves. From
Hugging Face, only safetensors files are loaded, because the other formats are pickles.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift.images.preprocess import Preprocess
from undrift.system.warning import warn

Found = tuple[nn.Module, Preprocess | None, tuple[str, ...] | None]

PACKAGES = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}
PROCESSOR = "preprocessor_config.json"
"""Hugging Face's file of a network's preprocessing."""
LEVELS = 1
"""Grey levels by which a smooth image may differ from Hugging Face's on average: rounding, crops half a pixel off."""
RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers for interpolations, which Hugging Face stores."""


def timm(name: str, pretrained: bool, arguments: dict[str, Any]) -> Found:
    """Return a network of timm, with its pretrained weights if asked."""
    package = _package("timm")
    network = _made(f"timm:{name}", lambda: package.create_model(name, pretrained=pretrained, **arguments))
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None) or {}
    names = config.get("label_names") if isinstance(config, Mapping) else None
    return network, understood(of_timm, config) if config else None, None if not names else tuple(map(str, names))


def torchvision(name: str, pretrained: bool, arguments: dict[str, Any]) -> Found:
    """Return a classifier of torchvision; `weights=IMAGENET1K_V1` among the arguments chooses among its weights."""
    models = importlib.import_module(f"{_package('torchvision').__name__}.models")
    chosen = arguments.pop("weights", "DEFAULT")

    def make() -> tuple[nn.Module, Any]:
        entry = models.get_model_weights(name)[chosen]
        return models.get_model(name, weights=entry if pretrained else None, **arguments), entry

    network, entry = _made(f"torchvision:{name}", make)
    names = entry.meta.get("categories") if pretrained else None
    return network, understood(of_torchvision, entry.transforms()), None if not names else tuple(map(str, names))


def huggingface(name: str, pretrained: bool, arguments: dict[str, Any]) -> Found:
    """Return an image classifier of Hugging Face, from a name or a folder."""
    package = _package("hf")

    def make() -> Any:
        auto = package.AutoModelForImageClassification
        if pretrained:
            return auto.from_pretrained(name, use_safetensors=True, **arguments)
        return auto.from_config(package.AutoConfig.from_pretrained(name, **arguments))

    network = _made(f"hf:{name}", make)
    processor = _processor(package, name)
    labels = getattr(network.config, "id2label", None) or {}
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    # Default names (LABEL_0, LABEL_1, …) say less than numbers.
    known = names if names and not all(n.startswith("LABEL_") for n in names) else None
    return network, None if processor is None else understood(of_processor, processor), known


def _processor(package: Any, name: str) -> Any:
    """Return a network's image processor, or None if its folder has none."""
    try:
        return package.AutoImageProcessor.from_pretrained(name)
    except Exception as error:
        if isinstance(error, OSError) and Path(name).is_dir() and not Path(name, PROCESSOR).exists():
            return None
        raise DataError(
            f"the image processor of hf:{name} could not be made ({type(error).__name__}: {error}); needed: its "
            f"{PROCESSOR}, the network's preprocessing. Get it; or download the network into a folder without it, name "
            "that folder, and give --preprocess none, or --mean, --std, --resize, --crop."
        ) from error


def understood(read: Callable[[Any], Preprocess], config: Any) -> Preprocess | None:
    """Return the preprocessing of a configuration; None, with a warning, if undrift cannot reproduce it."""
    try:
        return read(config)
    except OptionError as error:
        warn(str(error))
        return None


def of_timm(config: Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing of timm's `pretrained_cfg`: scaled by 1 / crop_pct, then cropped to input_size."""
    _, height, width = config.get("input_size", (3, 224, 224))
    mode = config.get("crop_mode") or "center"
    if height != width or mode not in ("center", "squash"):
        raise _cannot(f"timm's crop_mode {mode!r} to {height}×{width}")
    side = math.floor(height / (config.get("crop_pct") or 0.875))
    return _preprocess(
        config.get("mean", (0.485, 0.456, 0.406)),
        config.get("std", (0.229, 0.224, 0.225)),
        (side, side) if mode == "squash" else side,
        height,
        config.get("interpolation") or "bicubic",
    )


def of_torchvision(transforms: Any) -> Preprocess:
    """Return the preprocessing of a weights entry's `transforms()`."""
    try:
        (resize,), (crop,) = transforms.resize_size, transforms.crop_size
        interpolation = getattr(transforms.interpolation, "value", transforms.interpolation)
        return _preprocess(transforms.mean, transforms.std, int(resize), int(crop), str(interpolation))
    except (AttributeError, TypeError, ValueError) as error:
        raise _cannot(f"torchvision's {type(transforms).__name__} ({error})") from error


def of_processor(processor: Any) -> Preprocess:
    """Return the preprocessing of an image processor, tried on an image: not all do what their configuration says."""
    read, name = of_huggingface(processor.to_dict()), type(processor).__name__
    ours, theirs = _tried(processor, read)
    if ours.shape != theirs.shape:
        raise _cannot(f"a {name}, whose images are {_by(theirs)} where its settings say {_by(ours)}")
    apart = 255 * float(((theirs - ours) * torch.tensor(read.std).view(-1, 1, 1)).abs().mean())
    if apart > LEVELS:
        raise _cannot(f"a {name}, whose images are {apart:.1f} grey levels from what its settings say")
    return read


def _tried(processor: Any, read: Preprocess) -> tuple[Tensor, Tensor]:
    """Return what our preprocessing and the processor make of one smooth image."""
    rows, columns = torch.linspace(0, 255, 300)[:, None], torch.linspace(0, 255, 340)
    planes = (rows + 0 * columns, columns + 0 * rows, (rows + columns) / 2)
    image = torch.stack(planes).byte()[: read.channels]
    return read(image[None]), processor(image.permute(1, 2, 0).numpy(), return_tensors="pt")["pixel_values"]


def _by(images: Tensor) -> str:
    return "×".join(map(str, images.shape[-2:]))


def of_huggingface(config: Mapping[str, Any]) -> Preprocess:
    """Return the preprocessing of an image processor's configuration."""
    size, crop_size = _sizes(config.get("size")), _sizes(config.get("crop_size"))
    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    if config.get("do_resize", True) and size is not None:
        resize = size
        fraction = config.get("crop_pct")
        if fraction and isinstance(size, int):  # ConvNeXT's: what is kept of the resized image
            resize, crop = ((size, size), None) if size >= 384 else (int(size / fraction), size)
    if config.get("do_center_crop") and crop_size is not None:
        if isinstance(crop_size, tuple) and crop_size[0] != crop_size[1]:
            raise _cannot(f"a crop of {crop_size[0]}×{crop_size[1]}")
        crop = crop_size if isinstance(crop_size, int) else crop_size[0]
    channels = len(config.get("image_mean") or (0, 0, 0))
    normal = config.get("do_normalize", True)
    mean = config.get("image_mean") if normal else None
    std = config.get("image_std") if normal else None
    # undrift divides by 255 first; Hugging Face multiplies by a factor, or not at all.
    factor = 255 * (config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0)
    means, deviations = list(mean or [0.0] * channels), list(std or [1.0] * channels)
    if config.get("rescale_offset"):  # EfficientNet's: [−1, 1] before the mean
        means = [m + 1 for m in means]
    if config.get("include_top") and config.get("image_std"):  # EfficientNet's, which divides once more
        deviations = [s * again for s, again in zip(deviations, config["image_std"], strict=True)]
    return _preprocess(
        [round(m / factor, 10) for m in means],
        [round(s / factor, 10) for s in deviations],
        resize,
        crop,
        RESAMPLE.get(config.get("resample", 2), str(config.get("resample"))),
    )


def _sizes(size: Any) -> int | tuple[int, int] | None:
    """Return a size as the length of the shorter side or as (height, width)."""
    if isinstance(size, Mapping):
        if "shortest_edge" in size:
            return int(size["shortest_edge"])
        if "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
        raise _cannot(f"a size of {dict(size)}")
    if isinstance(size, list | tuple):
        return int(size[0]), int(size[1])
    return None if size is None else int(size)


def _preprocess(
    mean: Any, std: Any, resize: int | tuple[int, int] | None, crop: int | None, interpolation: str
) -> Preprocess:
    if interpolation not in ("nearest", "bilinear", "bicubic"):
        raise _cannot(f"interpolation {interpolation!r}")
    numbers = tuple(float(m) for m in mean), tuple(float(s) for s in std)
    return Preprocess(*numbers, resize=resize, crop=crop, interpolation=interpolation)  # type: ignore[arg-type]


def _cannot(what: str) -> UndriftError:
    return OptionError(
        f"the network's preprocessing has {what}; needed: a resize, a square centre crop and a normalisation. Give the "
        "nearest of these with --mean, --std, --resize, --crop and --interpolation."
    )


def _package(key: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[key])
    except ImportError as error:
        raise OptionError(
            f"{PACKAGES[key]} is not installed ({error}); needed for networks named {key}:…. Install it: pip install "
            f"{PACKAGES[key]}."
        ) from error


def _made(what: str, make: Callable[[], Any]) -> Any:
    """Return what a package makes; turn its errors (unknown name, no connection) into ours."""
    try:
        return make()
    except UndriftError:
        raise
    except Exception as error:
        raise DataError(
            f"{what} could not be made ({type(error).__name__}: {error}); needed: a name that the package knows, and "
            "weights it can download. Check the name and its arguments, or give --weights FILE."
        ) from error
