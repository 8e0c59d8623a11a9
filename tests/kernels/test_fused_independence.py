"""A network's noise is new in every step, layer, use and sample: not the other's, and not the other's moved along.

Two draws are compared at all lags at once, by FFT: a key or a row that is off by a little gives the same numbers at
another place, which a comparison position by position does not see.
"""

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift.kernels import force

CHANNELS, SIDE = 16, 64
LAGS = CHANNELS * SIDE**2  # of one sample: 65,536


class Thrice(nn.Module):
    """Two layers, one of them used twice; without weights that matter, its outputs are its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(1, CHANNELS, 1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(x), self.b(x), self.a(x)])


def steps(path: str, count: int = 3) -> Tensor:
    """Return ε of successive steps: step × (a, b, a again) × sample × channel × position."""
    torch.manual_seed(0)
    net, x = Thrice(), torch.ones(2, 1, SIDE, SIDE)
    model = undrift.perturb(net, first_energy="square", generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), force(path):  # type: ignore[arg-type]
        for noise in model.noises():
            noise.log_var.zero_()  # σ = 1, and each window holds an energy of 1
        drawn = torch.stack([model(x) for _ in range(count)])
        with model.off() as source:
            return (drawn - source(x)).flatten(3).double()


def worst(a: Tensor, b: Tensor) -> float:
    """Return the largest |z| of the correlation of two draws, and of their squares, over all lags.

    z is standard normal where the draws are independent. That one of a pair's 262,144 passes seven has odds of 10⁻⁶.
    """
    found = 0.0
    for u, v in ((a.flatten(), b.flatten()), ((a**2 - 1).flatten() / 2**0.5, (b**2 - 1).flatten() / 2**0.5)):
        z = torch.fft.irfft(torch.fft.rfft(u) * torch.fft.rfft(v).conj(), n=len(u)) / len(u) ** 0.5
        found = max(found, float(z.abs().max()))
    return found


@pytest.mark.parametrize("path", ["cpu", "plain"])
def test_steps_layers_uses_and_samples_are_independent_at_every_lag(path: str) -> None:
    noise = steps(path)
    assert noise[0, 0, 0].numel() == LAGS
    (first, second, third), (a, b, again) = noise, noise[0]
    pairs = {
        "steps": (first[0], second[0]),
        "steps, two apart": (first[0], third[0]),
        "a step's layer and the next step's other layer": (first[1], second[0]),
        "layers": (a, b),
        "uses": (a, again),
        "a layer's second use and the next layer": (again, b),
        "samples": (a[0], a[1]),
        "a sample and the next step's next": (first[0, 0], second[0, 1]),
    }
    for name, (u, v) in pairs.items():
        assert worst(u, v) < 7, name


def test_noise_that_is_moved_along_is_found() -> None:
    """The measure itself: a draw and its copy, one position or many samples away, and with other signs."""
    a = steps("cpu", 1)[0, 0]
    signs = torch.randint(2, a.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for other in (a, a.flatten().roll(1), a.flatten().roll(12_345), a * signs):
        assert worst(a, other) > 100
