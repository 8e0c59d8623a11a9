"""Turn a traced network into an ONNX model. Needs the extra `undrift[onnx]`."""

import importlib.util
import logging
import warnings
from collections.abc import Mapping

import torch

from undrift._errors import OptionError

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
