"""Load a source network by its name, or the function that makes it, and a file of weights.

| name | network |
|---|---|
| `wrn40_2` | of `undrift_bench.zoo`, with weights |
| `package.module:function` | what that function returns; the current folder is importable |
| `timm:NAME`, `torchvision:NAME`, `hf:NAME` | from these packages, with their weights or given ones |
| none | the network named in a file of `undrift train` |

Preprocessing and class names come along if the network, its package or its file has them. Weights are read as tensors
only: no file is unpickled.
"""

import difflib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift.cli.extensions import extensions, known_networks, networks
from undrift.cli.model_packages import PACKAGES, huggingface, of_timm, timm, torchvision, understood
from undrift.images.preprocess import Preprocess
from undrift.system.validate import a_type
from undrift.system.weights_file import fill, read

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class SourceModel:
    """A source network and what is known of it.

    Attributes:
        network: in eval mode.
        name: its name, which domain files store.
        preprocess: the preprocessing of its images, or None if unknown.
        classes: the names of its classes in the order of its outputs, or None if unknown.
        untrained: whether its weights are random: no file of them was given, and a second call makes others.
    """

    network: nn.Module
    name: str
    preprocess: Preprocess | None = None
    classes: tuple[str, ...] | None = None
    untrained: bool = False


def load_model(
    name: str | None = None, weights: str | PathLike[str] | None = None, arguments: Arguments | None = None
) -> SourceModel:
    """Return a network by name with the weights of a file, in eval mode.

    Args:
        name: see the table above; None takes it from the file.
        weights: a .safetensors file, or a PyTorch file of weights.
        arguments: for the function that makes the network.

    Examples:
        >>> load_model("torch.nn:Linear", arguments={"in_features": 4, "out_features": 3}).network
        Linear(in_features=4, out_features=3, bias=True)
    """
    path, given = None if weights is None else Path(weights), dict(arguments or {})
    header = {} if path is None else _header(path)
    chosen = name or _named_in(path, header)
    package, colon, rest = chosen.partition(":")
    if not colon:
        found = _from_zoo(chosen, path, given)
    elif package in PACKAGES:
        makers = {"timm": timm, "torchvision": torchvision, "hf": huggingface}
        network, preprocess, classes = makers[package](rest, path is None, given)
        found = SourceModel(network, chosen, preprocess, classes)
    else:
        network = _call(package, rest, given)
        untrained = path is None and _random_weights(network, package, rest, given)
        found = SourceModel(network, chosen, _own_preprocess(network), untrained=untrained)
    if path is not None:
        if colon:
            fill(found.network, read(path)[0], f"{path} as {chosen}")
        preprocess, classes = _told(path, header)
        found = replace(
            found,
            name=f"{chosen} {path.name}",
            # A file knows its own weights better than the architecture does.
            preprocess=preprocess or found.preprocess,
            classes=classes or found.classes,
        )
    found.network.eval()
    return found


def parse_arguments(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return `name=value` texts as arguments, with JSON values where possible, else text.

    Examples:
        >>> parse_arguments(("depth=28", "norm=batch", "bias=false"))
        {'depth': 28, 'norm': 'batch', 'bias': False}
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"{text!r} is no argument; needed: NAME=VALUE, such as classes=10. Correct it.")
        words = {"True": True, "False": False, "None": None}
        try:
            out[name] = words[value] if value in words else json.loads(value)
        except ValueError:
            out[name] = value
    return out


def _named_in(path: Path | None, header: Mapping[str, str]) -> str:
    if path is None:
        raise OptionError(
            f"no network was named; needed: --model NAME (known are {known_networks()}), "
            "package.module:function, timm:NAME, torchvision:NAME or hf:NAME; or --weights with a file of `undrift "
            "train`. Name one."
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}; needed: the source network's weights. Check the path of --weights.")
    network = header.get("network", "")
    if network in networks():
        return network
    said = f"its header names {network!r}, not of the zoo" if network else "its header names no network"
    raise OptionError(
        f"{path} does not say which network it belongs to ({said}); needed: its name. Add --model, such as "
        "--model timm:resnet18 or --model package.module:function."
    )


def _from_zoo(name: str, path: Path | None, arguments: Arguments) -> SourceModel:
    if name not in networks():
        close = difflib.get_close_matches(name.lower().replace("-", "_"), networks(), n=1)
        own, package = name.rpartition("."), name.partition("/")
        hint = f"Did you mean {close[0]!r}?" if close else ""
        if package[0] in PACKAGES:
            hint = f"Did you mean {package[0]}:{package[2]}?"
        elif not close and own[0]:
            hint = f"Did you mean {own[0]}:{own[2]}?"
        raise OptionError(
            f"there is no network {name!r}; known are {known_networks()}; needed: one of these, timm:NAME, "
            f"torchvision:NAME, hf:NAME, or package.module:function for your own. {hint or 'Name one.'}"
        )
    if path is None:
        raise OptionError(
            f"{name} was named without weights; needed: a checkpoint, because fresh weights answer at random. Add "
            "--weights FILE, or train one with `undrift train`."
        )
    if arguments.keys() - {"classes"}:
        raise OptionError(f"{name} takes no {', '.join(arguments.keys() - {'classes'})}; needed: at most classes=….")
    known = next(extension for extension in extensions() if name in extension.NETWORKS)
    network, preprocess = known.load_network(name, path, arguments.get("classes"))
    return SourceModel(network, name, preprocess)


def _call(module_name: str, function: str, arguments: Arguments) -> nn.Module:
    """Return the network that the user's function makes."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _theirs(f"importing {module_name}", error) from error
        raise OptionError(
            f"there is no module {module_name!r} (no {error.name!r}); needed: package.module:function, installed "
            f"or importable from {here}. {_other_name(module_name, function)}"
        ) from error
    except Exception as error:
        raise _theirs(f"importing {module_name}", error) from error
    make: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(make):
        close = difflib.get_close_matches(function, dir(module), n=1)
        hint = f"Did you mean {module_name}:{close[0]}?" if close else f"Look into {module.__file__}."
        if module_name == PACKAGES["hf"]:
            hint = f"Did you mean hf:{function}?"
        raise OptionError(f"{module_name} has no function {function!r}; needed: one that returns the network. {hint}")
    try:
        network = make(**arguments)
    except UndriftError:
        raise
    except Exception as error:
        raise _theirs(
            f"{module_name}:{function}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})", error
        ) from error
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"{module_name}:{function} returned {a_type(network)}; needed: a torch.nn.Module. Return the network."
        )
    return network


def _other_name(module_name: str, function: str) -> str:
    """Return what to do about a module that is not there; a file's path names none."""
    if module_name.endswith(".py"):
        path = Path(module_name)
        return f"Did you mean {path.stem}:{function}{'' if path.parent == Path() else f', called in {path.parent}'}?"
    return "Check the name, or change to its folder."


def _random_weights(network: nn.Module, module_name: str, function: str, arguments: Arguments) -> bool:
    """Return whether the function that made a network makes one of other weights next time."""
    try:
        again = _call(module_name, function, arguments)
    except OptionError:  # it works once only
        return False
    pairs = zip(network.state_dict().values(), again.state_dict().values(), strict=False)
    return any(isinstance(a, Tensor) and isinstance(b, Tensor) and not torch.equal(a, b) for a, b in pairs)


def _theirs(what: str, error: Exception) -> UndriftError:
    return OptionError(
        f"{what} raised {type(error).__name__}: {error}; needed: a network. Correct the function, or give it its "
        "arguments with --model-args NAME=VALUE."
    )


def _own_preprocess(network: nn.Module) -> Preprocess | None:
    """Return the preprocessing that the network states: its attribute `preprocess`, or timm's configuration."""
    own = getattr(network, "preprocess", None)
    if isinstance(own, Preprocess):
        return own
    config = getattr(network, "pretrained_cfg", None) or getattr(network, "default_cfg", None)
    return understood(of_timm, config) if isinstance(config, Mapping) else None


def _header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; a damaged file raises later, when it is read."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return {}
    if "undrift_format" in header:
        raise DataError(
            f"{path} is a domain file, which holds no source weights; needed: the source network's checkpoint. Give it "
            "with --weights, and this file with --domain."
        )
    return header


def _told(path: Path, header: Mapping[str, str]) -> tuple[Preprocess | None, tuple[str, ...] | None]:
    """Return preprocessing and class names from the metadata of a file of `train` or `export`."""
    if not header.keys() & {"undrift", "undrift_source"}:
        return None, None
    try:
        preprocess, names = (json.loads(header.get(k, "null")) for k in ("preprocess", "class_names"))
        names = names or json.loads(header.get("classes", "null"))
        return (
            None if preprocess is None else Preprocess.from_dict(preprocess),
            None if not names else tuple(str(n) for n in names),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"the header of {path} is damaged ({error}); needed: JSON as undrift writes it. Copy the file again."
        ) from error
