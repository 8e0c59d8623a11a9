"""Folding: several draws in one pass are what they are in passes of their own."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images
from undrift import predict


class Counted(nn.Module):
    """A network that knows how many rows each pass had, and runs out of memory above some number of them."""

    def __init__(self, net: nn.Module, room: int = 10**9) -> None:
        super().__init__()
        self.net, self.room, self.rows = net, room, []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.rows.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("no room")
        return out


def passes(model: undrift.Perturbed, x: Tensor, samples: int = 10, **settings: object) -> list[int]:
    model.net.rows.clear()
    predict(model, x, samples, **settings)  # type: ignore[arg-type]
    return list(model.net.rows)


def noisy(net: nn.Module, **changes: object) -> undrift.Perturbed:
    return undrift.perturb(net, **{"norm_statistics": "source", "init_fraction": 0.3, **changes})


@pytest.mark.parametrize("statistics", ["source", "moving", "batch"])
def test_without_noise_folding_changes_nothing(statistics: str) -> None:
    model = undrift.perturb(convnet(), init_fraction=0.0, norm_statistics=statistics)
    apart = predict(model, images(), 7, fold_limit=0)
    for limit in (None, 6, 13, 20, 1000):
        together = predict(model, images(), 7, fold_limit=limit)
        torch.testing.assert_close(together.probs, apart.probs)
        torch.testing.assert_close(together.entropy, apart.entropy)
        torch.testing.assert_close(together.mutual_info, apart.mutual_info, atol=1e-6, rtol=0)
    torch.testing.assert_close(apart.probs, predict(model, images(), 0).probs)


def test_as_few_passes_of_one_size_as_the_limit_allows() -> None:
    model = noisy(Counted(convnet()))
    assert passes(model, images(6)) == [30, 30]  # on a CPU
    assert passes(model, images(6), fold_limit=1000) == [60]
    assert passes(model, images(6), fold_limit=0) == [6] * 10
    assert passes(model, images(6), fold_limit=5) == [6] * 10
    assert passes(model, images(6), fold_limit=24) == [24, 18, 18]
    assert passes(model, images(6), fold_limit=35) == [30, 30]
    assert passes(model, images(6), 0) == [6]
    assert passes(model, images(32)) == [32] * 10


@pytest.mark.parametrize(
    ("net", "changes"),
    [
        (convnet(), {"norm_statistics": "batch"}),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4, track_running_stats=False)), {}),
        (convnet(), {"estimator": "drawn"}),
        (nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8), nn.Flatten(), nn.Linear(192, 4)), {}),
    ],
)
def test_draws_that_would_not_be_independent_are_passes_of_their_own(net: nn.Module, changes: dict[str, str]) -> None:
    model = noisy(Counted(net), **changes)
    assert passes(model, images(6), 4) == [6] * 4


def test_instance_statistics_belong_to_a_row_and_fold() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten())
    model = noisy(Counted(net), norm_statistics="batch")
    assert passes(model, images(2), 3) == [6]


def test_copies_of_an_image_in_one_pass_have_independent_noise() -> None:
    model = noisy(nn.Sequential(nn.Flatten(), nn.Linear(192, 40)))
    seen: list[Tensor] = []
    model.net.register_forward_hook(lambda _m, _args, out: seen.append(out))
    predict(model, images(1).expand(3, -1, -1, -1), 300, fold_limit=900)
    (logits,) = [out.view(300, 3, 40) for out in seen]  # one pass
    noise = logits - logits.mean((0, 1))
    rows = noise.permute(1, 0, 2).reshape(3, -1) / noise.std()
    assert torch.corrcoef(rows).fill_diagonal_(0).abs().max() < 0.05  # 12,000 numbers a row: four deviations
    following = (noise[1:] * noise[:-1]).mean() / noise.var()
    assert abs(float(following)) < 0.03


def test_folded_and_unfolded_predictions_have_one_distribution() -> None:
    torch.manual_seed(0)
    model = noisy(convnet().eval(), init_fraction=0.5)
    many = 400
    apart, together = (predict(model, images(), many, generator=s, fold_limit=n) for s, n in ((1, 0), (2, None)))
    singles = torch.stack([predict(model, images(), 1, generator=s).probs for s in range(60)])
    error = singles.std(0) * (2 / many) ** 0.5
    assert ((apart.probs - together.probs).abs() < 5 * error + 1e-6).all()
    torch.testing.assert_close(together.mutual_info, apart.mutual_info, rtol=0.35, atol=1e-5)


def test_seeds_repeat_and_the_limit_only_changes_the_draws() -> None:
    model = noisy(convnet())
    a, b = (predict(model, images(), generator=4, fold_limit=12) for _ in range(2))
    assert torch.equal(a.probs, b.probs)
    assert not torch.equal(a.probs, predict(model, images(), generator=4, fold_limit=0).probs)


def test_a_pass_that_does_not_fit_is_made_again_with_half_the_draws_and_once_only() -> None:
    torch.manual_seed(0)
    model = noisy(Counted(convnet()))
    expected = predict(model, images(6), 10, generator=3, fold_limit=12)
    model.net.room = 20
    assert passes(model, images(6), generator=3, fold_limit=60) == [60, 30, 12, 12, 12, 12, 12]
    assert passes(model, images(6), generator=3) == [12] * 5  # remembered
    assert torch.equal(predict(model, images(6), 10, generator=3).probs, expected.probs)
    model.net.room = 5
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        predict(model, images(6))


def test_a_failed_pass_leaves_no_trace_in_the_noise() -> None:
    torch.manual_seed(0)
    model = noisy(Counted(convnet(), room=10))
    first = predict(model, images(6), 2, generator=3, fold_limit=6)
    torch.testing.assert_close(predict(model, images(6), 2, generator=3, fold_limit=1000).probs, first.probs)


def test_images_that_are_not_finite_are_left_out_of_every_copy() -> None:
    model = noisy(Counted(convnet()))
    x = images(6)
    x[1] = float("nan")
    assert passes(model, x, 4) == [5 * 4]
    p = predict(model, x, 4)
    assert p.label[1] == -1
    assert (p.label[[0, 2, 3, 4, 5]] >= 0).all()
