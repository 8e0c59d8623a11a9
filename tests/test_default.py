"""The defaults must not hurt: on unlike small networks and few images, and on a real network's low-contrast stream."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift_bench import data, zoo

LEARN = {"least_agreement": 0.0}
SHARED = Path(__file__).parents[2] / "shared" / "data" / "cifar10"


def trained(
    norm: nn.Module, *, dropout: float = 0.0, shares: tuple[float, ...] = (1.0,) * 4, images: int = 240
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a small network that learned noisy patterns, and darker, flatter images of them with their classes."""
    torch.manual_seed(0)
    patterns = torch.rand(len(shares), 1, 12, 12)

    def draw(count: int, shares: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        y = torch.multinomial(torch.tensor(shares), count, replacement=True)
        return patterns[y] + 0.8 * torch.randn(count, 1, 12, 12), y

    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), norm, nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(1600, len(shares))
    )
    optimiser = torch.optim.Adam(net.parameters())
    x, y = draw(1000, (1.0,) * len(shares))
    for some, of in zip(x.split(50), y.split(50), strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(some), of).backward()
        optimiser.step()
    x, y = draw(images, shares)
    return net.eval(), 0.15 * x + 0.8, y


def accuracy(p: undrift.Prediction, y: Tensor) -> float:
    return float((p.label == y).double().mean())


@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
@pytest.mark.parametrize(
    ("norm", "given", "gained", "in_a_stream"),
    [
        pytest.param(nn.BatchNorm2d(16), {}, 0.1, 0.1, id="batch norm"),
        # Their neighbours agree too little to be learned from; noise in the answers costs a point or two.
        pytest.param(nn.Identity(), {}, -0.03, -0.02, id="no norm layer"),
        pytest.param(nn.GroupNorm(4, 16), {}, -0.03, -0.05, id="group norm"),
        pytest.param(nn.Identity(), {"settings": LEARN}, 0.05, None, id="no norm layer, told to learn"),
        pytest.param(nn.GroupNorm(4, 16), {"settings": LEARN}, 0.1, None, id="group norm, told to learn"),
        pytest.param(nn.BatchNorm2d(16), {"dropout": 0.5}, 0.1, 0.1, id="dropout"),
        pytest.param(nn.BatchNorm2d(16), {"images": 24}, 0.1, 0.1, id="few images"),
        pytest.param(nn.BatchNorm2d(16), {"shares": (1.0, 1.0)}, 0.03, 0.03, id="two classes"),
        pytest.param(nn.BatchNorm2d(16), {"shares": (17.0, 1, 1, 1)}, 0.05, 0.05, id="imbalanced classes"),
    ],
)
def test_the_defaults_gain_on_unlike_networks(
    norm: nn.Module, given: dict[str, object], gained: float, in_a_stream: float | None
) -> None:
    given = dict(given)
    settings = given.pop("settings", {})
    net, x, y = trained(norm, **given)  # type: ignore[arg-type]
    before = accuracy(undrift.predict(net, x), y)
    history = undrift.adapt(net, x, generator=torch.Generator().manual_seed(0), progress=False, **settings)  # type: ignore[arg-type]
    model = history.model
    assert model is not None
    assert accuracy(undrift.predict(model, x, generator=0), y) >= before + gained
    net = model.remove()
    if in_a_stream is not None:
        answers = undrift.stream(net, x.split(50), generator=torch.Generator().manual_seed(0), seed=0)
        assert accuracy(undrift.Prediction.cat(answers), y) >= before + in_a_stream


def test_too_few_images_say_what_is_needed() -> None:
    net, x, _ = trained(nn.BatchNorm2d(16), images=3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(undrift.DataError, match=r"the domain has 3 images .* needed: 6"):
        undrift.adapt(net, x)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/cifar10 beside the checkout")
def test_streaming_contrast_gains_twenty_points_over_the_source() -> None:
    domain = data.cifar10(SHARED).select(range(600))
    clean, labels = next(iter(domain.batches(600)))
    images = undrift.corrupt(clean, "contrast", 5)
    net = zoo.load("wrn40_2", SHARED / "wrn40_2.safetensors").eval()
    with torch.no_grad():
        source = (torch.cat([net(x).argmax(1) for x in images.split(200)]) == labels).double().mean()
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(0))
    # One draw an answer: ten take ten times as long and are better still.
    answers = [p.label for p in undrift.stream(model, images.split(200), likelihood=undrift.entropy, answer="before")]
    adapted = (torch.cat(answers) == labels).double().mean()
    assert adapted > source + 0.20


@pytest.mark.parametrize(("norm", "noise", "rate"), [(nn.BatchNorm2d(4), 0.1, 0.03), (nn.GroupNorm(2, 4), 0.0, 0.01)])
def test_a_stream_without_batch_norm_takes_small_steps_and_no_noise(norm: nn.Module, noise: float, rate: float) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    going = undrift.stream(net, [torch.rand(64, 3, 8, 8)])
    assert (going.model.options.init_fraction, going.model.options.weights_lr) == (noise, rate)
    assert len(next(going)) == 64
    assert going.report.steps == 1
    going.remove()
    given = undrift.stream(net, [torch.rand(64, 3, 8, 8)], init_fraction=0.2)
    assert given.model.options.init_fraction == 0.2
