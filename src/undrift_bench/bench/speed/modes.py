"""The modes in which steps and predictions are measured, and their names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quickest() -> Iterator[None]:
    """Let every rival have what makes it quickest without a change of its own: tf32, and cuDNN's choice by trial.

    Shapes stay the same in a measurement, so the quickest algorithm of each convolution is worth looking for.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def settings(device: torch.device) -> dict[str, Any]:
    """Return what a record says of `quickest`; on a CPU it says nothing."""
    return {"cudnn_benchmark": True, "tf32": True} if device.type == "cuda" else {}


def how(row: dict[str, Any]) -> str:
    """Return in which mode a step ran."""
    layout = "channels-last bf16" if row["low"] else "contiguous float32"
    return (
        f"{layout}, {'compiled' if row.get('compiled') else 'uncompiled'}{', CUDA graphs' * row.get('graphs', False)}"
    )
