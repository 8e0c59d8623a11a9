"""The energy of a layer's input, which takes the place of x² in the noise's variance."""

from torch import Tensor, nn

from undrift.kernels.reference import wide
from undrift.options import Energy


def input_energy(layer: nn.Module, x: Tensor, energy: Energy, offset: float) -> Tensor:
    """Return what stands for x² in the variance path, in float32 or better.

    - "square": x², the paper's.
    - "offset": x² + constant, as released; zero padding still gets none.
    - "centred": (x − its mean over positions)², a sample and a channel at a time. A drawn kernel turns the constant
      part of its input into a constant shift, which the next norm layer removes; local noise would turn it into noise
      at every position. Without positions (a linear layer on plain vectors) there is nothing to centre: x².
    """
    if energy == "centred":
        x = centred(layer, x)
    square = x.to(wide(x.dtype)).square()
    return square + offset if energy == "offset" else square


def centred(layer: nn.Module, x: Tensor) -> Tensor:
    """Return x less its mean over positions, a sample and a channel at a time, in float32 or better."""
    x, among = x.to(wide(x.dtype)), positions(layer, x)
    return x - x.mean(dim=among, keepdim=True) if among else x


def positions(layer: nn.Module, x: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a layer's input that are neither samples nor channels."""
    return tuple(range(1, x.ndim - 1)) if isinstance(layer, nn.Linear) else tuple(range(2, x.ndim))
