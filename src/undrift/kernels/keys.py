"""Make the keys of noise from a seed and a step by SplitMix64, 2^20 for each step.

Noise is a function of a key and a position (`epsilon`).
"""

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX1 = 0xBF58476D1CE4E5B9 - 2**64
MIX2 = 0x94D049BB133111EB - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int64; SplitMix64 shifts zeros in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output for the state z: 64 well-mixed bits."""
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def keys_of(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step."""
    # The step is added before the product: the compiler would take arange·γ for an index, and an index does not wrap.
    return mix(seed + (torch.arange(count, device=step.device) + step * (1 << 20)) * GOLDEN)


def key_of_use(key: Tensor, use: int) -> Tensor:
    """Return the key for the use-th time that a step uses a weight; `key` is that of use 0."""
    # As a signed 64-bit integer: Python's do not wrap by themselves.
    return key + ((use * GOLDEN + 2**63) % 2**64 - 2**63)
