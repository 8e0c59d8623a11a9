"""Read checkpoints without unpickling code: safetensors, or PyTorch files restricted to weights."""

import pickle
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from undrift._errors import DataError
from undrift.system.validate import a_type

UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, TypeError, AttributeError),
    *(KeyError, IndexError, OverflowError, MemoryError, AssertionError, struct.error),
)
"""What `torch.load` is known to raise on files that are broken or hold more than weights."""

WRAPPERS = ("state_dict", "model", "model_state_dict")
"""Keys under which training programs put the weights beside an optimiser's state."""

COUNT = "num_batches_tracked"
PARALLEL = "module."
"""What nn.DataParallel leaves before every name; where only some have it, it is a module of the network's own."""


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a checkpoint's tensors, floating ones in float32, and its text header (empty for PyTorch files)."""
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; needed: a checkpoint (.safetensors, or a PyTorch file of weights). "
            "Check the path, or train one with `undrift train`."
        )
    tensors, header = _safetensors(path) if path.suffix == ".safetensors" else (_torch(path), {})
    _check_stored(path, tensors)
    if all(name.startswith(PARALLEL) for name in tensors):
        tensors = {name.removeprefix(PARALLEL): value for name, value in tensors.items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}, header


def fill(network: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy `tensors` into `network`; names, shapes and kinds of number must match exactly.

    Only BatchNorm's count of batches may be missing or be cast to float, as only cumulative averages read it.
    """
    needed = network.state_dict()
    missing = [name for name in needed if name not in tensors and not name.endswith(COUNT)]
    extra = [name for name in tensors if name not in needed]
    shapes = [
        f"{name} {tuple(value.shape)} instead of {tuple(needed[name].shape)}"
        for name, value in tensors.items()
        if name in needed and value.shape != needed[name].shape
    ]
    kinds = [
        f"{name} {value.dtype} instead of {needed[name].dtype}"
        for name, value in tensors.items()
        if name in needed and _kind(value) != _kind(needed[name]) and not name.endswith(COUNT)
    ]
    if missing or extra or shapes or kinds:
        found = [_some(missing, "missing"), _some(extra, "unknown"), _some(shapes, "of another shape")]
        found.append(_some(kinds, "of another kind of number"))
        advice = f"Name the network that the file was trained with ({_guess(tensors)})."
        if shapes and not (missing or extra or kinds):  # most often a head for other classes
            advice = "Give the network the arguments that it was trained with, such as --model-args num_classes=…."
        raise DataError(
            f"{what} does not fit: {'; '.join(filter(None, found))}. Needed: exactly the {len(needed)} tensors of this "
            f"network. {advice}"
        )
    network.load_state_dict({**needed, **tensors}, strict=True)


def _check_stored(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise if a tensor is not stored element by element: copying would fail, or need too much memory."""
    size = path.stat().st_size
    for name, value in tensors.items():
        plain = value.layout is torch.strided and not (value.is_meta or value.is_nested or value.is_quantized)
        if not plain or value.numel() * value.element_size() > size:
            what = tuple(value.shape) if plain else "meta" if value.is_meta else f"{value.layout} {value.dtype}"
            raise DataError(
                f"{path} holds {name} without all its numbers ({what} in {size} bytes); needed: dense tensors, stored "
                "whole. Save the state_dict() of the network itself, on a CPU and not quantised."
            )


def _kind(value: Tensor) -> str:
    return "complex" if value.is_complex() else "floating" if value.is_floating_point() else "whole"


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); needed: a safetensors file. It may be cut short: copy it again, or "
            "give a PyTorch file its own ending (.pt)."
        ) from error


def _torch(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            # PyTorch warns of old pickle protocols; the error below says all that a user needs.
            warnings.simplefilter("ignore", UserWarning)
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise DataError(
            f"{path} is not a file of weights alone ({type(error).__name__}); needed: a state_dict, as undrift never "
            "runs code out of a checkpoint. If you trust it, load it yourself and save its state_dict()."
        ) from error
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise DataError(
            f"{path} holds {a_type(content)} that is no mapping of names to tensors; needed: a state_dict, "
            f"alone or under {', '.join(WRAPPERS)}. Save the network's state_dict()."
        )
    return {str(name): value for name, value in content.items()}


def _some(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what} ({shown})" if names else ""


def _guess(tensors: Mapping[str, Tensor]) -> str:
    signs = {
        "bottleneck.linear.weight": "its names are shot_resnet50's",
        "block1.layer.0.conv1.weight": "its names are a WideResNet's",
        "conv_1_3x3.weight": "its names are ResNeXt-29's",
        "layer4.2.conv3.weight": "its names are a ResNet-50's",
        "conv4.weight": "its names are digits'",
    }
    known = (text for sign, text in signs.items() if any(name.endswith(sign) for name in tensors))
    return next(known, "its names are of no network in the zoo")
