"""Export the adapted mean network: as a plain `state_dict` file, a program of `torch.export`, or an ONNX model."""

import copy
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift.answer.forward import finite_batches
from undrift.options import _suggest
from undrift.packs.state import domain_state
from undrift.posterior.extra_modules import extra_modules
from undrift.posterior.kept_statistics import noise_kept, own_statistics, warn_of_noise
from undrift.posterior.layers import evaluating, from_kernels
from undrift.posterior.model_lock import turn
from undrift.posterior.norm import Norm
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name
from undrift.posterior.state import keeping_noise
from undrift.system.atomic import check, write_bytes
from undrift.system.validate import a_type, instead_of
from undrift.system.version import own_version

Format = Literal["state_dict", "torch.export", "onnx"]
FORMATS: dict[Format, str] = {"state_dict": ".safetensors", "torch.export": ".pt2", "onnx": ".onnx"}
"""The formats, each with the usual ending of its files."""


def export(
    model: Perturbed,
    path: str | os.PathLike[str],
    format: Format | None = None,  # noqa: A002
    example: Any = None,
    images: Tensor | Iterable[Any] | None = None,
) -> int:
    """Write the adapted mean network for other programs, and return the file's size in bytes.

    All compute what `predict(model, images, samples=0)` computes, without noise and mutual information. Norm statistics
    from noisy passes do not fit the mean network: pass images of the domain to collect new ones. Otherwise it warns.

    - "state_dict": a safetensors file of source weights and adapted norm layers, which loads strictly into your own
      class: `net.load_state_dict(safetensors.torch.load_file(path))`, then `net.eval()`.
    - "torch.export": a .pt2 program, which needs neither your class nor undrift:
      `torch.export.load(path).module()(images)`. The batch may have any size.
    - "onnx": an ONNX model, for runtimes without PyTorch; needs `pip install 'undrift[onnx]'`.

    Args:
        model: a perturbed network.
        path: where to; written whole or not at all.
        format: "state_dict", "torch.export" or "onnx". Default: as the path ends (.pt2, .onnx), or else "state_dict".
        example: a batch of images (or a tuple of the network's arguments), for all but "state_dict".
        images: of the domain, for the mean network's own norm statistics: a tensor, a domain, or batches.

    Raises:
        OptionError: the network uses batch statistics, which a state_dict cannot hold.
    """
    if format is None:
        format = format_of(path)  # noqa: A001
    if not isinstance(format, str) or format not in FORMATS:
        found = f"{format!r}{_suggest(format, FORMATS)}" if isinstance(format, str) else a_type(format)
        raise OptionError(
            f"format={found} is not one of {', '.join(FORMATS)}. Take state_dict to "
            "load into your own class, torch.export for a program that needs none, onnx for other runtimes."
        )
    if not isinstance(model, Perturbed):
        raise UndriftError(
            f"got {a_type(model)}; undrift.export needs a perturbed network. "
            + instead_of(model, "A plain one has its state_dict().")
        )
    check(path)
    if format == "onnx":
        check_installed()
    if images is None and (size := noise_kept(model)):
        asked = "the exported network has none; needed: statistics of its own"
        warn_of_noise(size, asked, "Give images of the domain: export(model, path, images=…).")
    plain = mean_network(model, images)
    if format == "state_dict":
        return write_bytes(path, _state_dict(model, plain))
    program = _program(plain, example, format)
    return write_bytes(path, onnx_bytes(program, _about(model)) if format == "onnx" else _saved(program, _about(model)))


def format_of(path: str | os.PathLike[str]) -> Format:
    """Return the format that a path's ending says; a state_dict where it says none."""
    return next((name for name, ending in FORMATS.items() if str(path).endswith(ending)), "state_dict")


def mean_network(model: Perturbed, images: Tensor | Iterable[Any] | None = None) -> nn.Module:
    """Return a plain copy of the adapted mean network, in eval mode: no hooks, no noise, no link to the model.

    Args:
        images: of the domain, for norm statistics of its own (see `export`).
    """
    if model._removed:
        raise UndriftError("this perturbation was removed, and with it what it learned. Export before remove().")
    for module in extra_modules(model):
        raise OptionError(module.no_export)
    statistics = nullcontext() if images is None else own_statistics(model, _sound_batches(model, images))
    with turn(model), evaluating(model), keeping_noise(model.key), statistics, model.off() as net, torch.no_grad():
        plain = copy.deepcopy(getattr(net, "_orig_mod", net)).eval()
        state = dict(domain_state(model))
        _add_changes(model, net, plain)
    held = {part.name: part for part in (*model.norms, *model.trained)}
    for name, layer in plain.named_modules():
        part = held.get(plain_name(name))
        if part is None:
            continue
        for own in part.tensors():
            tensor = layer._parameters.get(own, layer._buffers.get(own))
            if tensor is not None:
                tensor.data = state[f"{part.name}.{own}" if part.name else own].detach().clone()
        if isinstance(part, Norm) and part.statistics == "batch":
            # Without kept statistics a norm layer uses those of its batch, in eval mode too.
            layer.running_mean = layer.running_var = None
            layer.track_running_stats = False
    return plain.requires_grad_(False)


def _add_changes(model: Perturbed, net: nn.Module, plain: nn.Module) -> None:
    """Add low-rank changes to the weights of a copy."""
    twin = dict(zip(map(id, getattr(net, "_orig_mod", net).modules()), plain.modules(), strict=True))
    done = set[int]()
    for layer, name, change in model.changed:
        weight = twin[id(layer)]._parameters[name]
        assert weight is not None, "a weight that is changed is there"
        if id(weight) in done:
            continue  # tied to one that has it
        done.add(id(weight))
        delta = from_kernels(layer, change.rows(), weight.shape)
        weight.data = (weight + delta).to(weight.dtype)


def _sound_batches(model: Perturbed, images: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """Yield the finite images, but no batch of one: behind a pooling it has no variance."""
    none = True
    for batch in finite_batches(model, images, 100 if isinstance(images, Tensor) else None):
        if len(batch) > 1:
            none = False
            yield batch
    if none:
        raise DataError(
            "images has no batch of two finite images or more; needed: images of the domain, from which norm "
            "statistics are taken. Give a tensor, a domain or batches of them."
        )


def _state_dict(model: Perturbed, plain: nn.Module) -> bytes:
    batch = [policy.name for policy in model.norms if policy.statistics == "batch"]
    if batch:
        raise OptionError(
            f'norm_statistics="batch": {", ".join(batch[:3])}{", …" if len(batch) > 3 else ""} use the statistics of '
            "each test batch; a state_dict holds kept statistics only, and would be another network. Export with "
            'format="torch.export", which can, or adapt with norm_statistics="moving".'
        )
    state = {plain_name(name): value for name, value in plain.state_dict().items()}
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise DataError(
            f"{', '.join(odd)} in the network's state_dict is no tensor; a safetensors file holds tensors only. Export "
            'with format="torch.export", or use torch.save(mean_network(model).state_dict(), path) yourself.'
        )
    # Copies: tied weights share memory, which the format does not allow; each name gets its own.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    return safetensors.torch.save(tensors, {"format": "pt", **_about(model)})


def _program(plain: nn.Module, example: Any, format: Format) -> torch.export.ExportedProgram:  # noqa: A002
    args = example if isinstance(example, tuple) else (example,)
    if not args or not all(isinstance(a, Tensor) and a.ndim > 0 for a in args):
        found = "no example" if example is None else f"an example that is {type(example).__name__}"
        raise OptionError(f"{found} was given; {format} needs a batch to trace. Give it: example=images.")
    # torch.export would take a batch of one for a constant size.
    args = tuple(torch.cat([a, a]) if a.shape[0] == 1 else a for a in args)
    shapes = tuple({0: torch.export.Dim.AUTO} for _ in args)
    with torch.no_grad():
        return torch.export.export(plain, args, dynamic_shapes=shapes if len(args) > 1 else (shapes[0],))


def _saved(program: torch.export.ExportedProgram, about: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"undrift.json": json.dumps(about)})
    return buffer.getvalue()


def _about(model: Perturbed) -> dict[str, str]:
    """Return metadata for users of the file: what wrote it, preprocessing, class names."""
    texts = {"undrift": own_version()}
    if model.preprocess is not None:
        texts["preprocess"] = json.dumps(model.preprocess.to_dict())
    if model.classes is not None:
        texts["classes"] = json.dumps(model.classes, ensure_ascii=False)
    return texts


MOST = 2**31 - 2**20
"""Bytes of weights that fit into one ONNX file, less some room for the graph."""


def check_installed() -> None:
    """Raise unless PyTorch's exporter to ONNX has what it needs."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f'format="onnx": {" and ".join(missing)} not installed; needed: PyTorch\'s exporter to ONNX. Run '
            "pip install 'undrift[onnx]', or take the format torch.export, which needs nothing."
        )


def onnx_bytes(program: torch.export.ExportedProgram, about: Mapping[str, str]) -> bytes:
    """Return the ONNX model of a program, weights included, with these texts as its metadata."""
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    if weights > MOST:
        raise OptionError(
            f'format="onnx": the network has {weights:,} bytes of weights; an ONNX file holds {MOST:,} at most. Take '
            "the format torch.export or state_dict."
        )
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        # PyTorch's own: parts of it that it calls deprecated, and operators of torchvision that nobody asked for.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        log.setLevel(logging.ERROR)
        try:
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        finally:
            log.setLevel(level)
    assert made is not None, "the exporter returns its program"
    made.model.metadata_props.update(about)
    content: bytes = made.model_proto.SerializeToString(deterministic=True)
    return content
