"""Save and restore the random state that the order of images depends on; make generators for parts of a method."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Randomness:
    """Torch's global generators and those of a loader; the state is a dict of tensors.

    Worker processes are seeded from these. Augmentations in this process that use NumPy or `random` are not, so a
    resumed run does not repeat them.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self.device, self.generators = device, list(generators)

    def state(self) -> dict[str, Tensor]:
        """Return the state of all generators."""
        state = {"torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state | {str(i): generator.get_state() for i, generator in enumerate(self.generators)}

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state."""
        torch.set_rng_state(state["torch"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)
        for i, generator in enumerate(self.generators):
            generator.set_state(state[str(i)])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore all state at the end of a `with` block, so that a pass over the images changes no later order."""
        state = self.state()
        try:
            yield
        finally:
            self.put(state)


def own_generator(seed: int | None) -> torch.Generator:
    """Return a generator on the CPU; without a seed, torch's global generator gives one.

    Bulk numbers are not drawn from it but computed on the device from a key that is (`kernels.normal`), so that a seed
    means the same numbers on every device and nothing waits for a copy.
    """
    chosen = int(torch.randint(2**62, ())) if seed is None else seed
    return torch.Generator().manual_seed(chosen)


def draw_keys(generator: torch.Generator, count: int, device: torch.device) -> Tensor:
    """Return fresh keys for `undrift.kernels.normal`."""
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device, non_blocking=True)


def drawn_seed(generator: torch.Generator | None) -> Tensor:
    """Return a seed of noise, drawn from a generator, or from torch's global one."""
    device = generator.device if generator is not None else None
    return torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=device)
