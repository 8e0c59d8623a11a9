"""Make generators and keys for parts of a method, so that a stream can be repeated and resumed."""

import torch


def own_generator(seed: int | None) -> torch.Generator:
    """Return a generator on the CPU; without a seed, torch's global generator gives one.

    Bulk numbers are not drawn from it but computed on the device from a key that is (`kernels.normal`), so that a seed
    means the same numbers on every device and nothing waits for a copy.
    """
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    return torch.Generator().manual_seed(chosen)


def draw_keys(generator: torch.Generator, count: int, device: torch.device) -> torch.Tensor:
    """Return fresh keys for `undrift.kernels.normal`."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device, non_blocking=True)
