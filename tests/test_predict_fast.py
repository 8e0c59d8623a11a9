"""The mode "fast": few passes, and answers near those of many draws."""

import math

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images
from undrift._few import Few, answer, temperature_of
from undrift.predict import predict


def classifier(classes: int = 6) -> tuple[nn.Module, Tensor]:
    """Return a random network that is sure of most images, with its images."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, classes))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5))
        net[3].weight.mul_(4)
    return net, torch.randn(400, 1, 4, 5, generator=generator)


def sharpness(probs: Tensor) -> float:
    return float(probs.square().sum(1).mean())


def nll_of_draws(probs: Tensor, truth: Tensor) -> float:
    """Return the negative log-likelihood where labels are as likely as the true average of draws says."""
    return float(-(truth * probs.log()).sum(1).mean())


def test_two_draws_in_as_many_passes_as_they_need() -> None:
    rows: list[int] = []
    net = convnet()
    net.register_forward_hook(lambda _m, args, _out: rows.append(len(args[0])))
    for changes, expected in (
        ({"norm_statistics": "source"}, [14]),
        ({"norm_statistics": "batch"}, [7, 7]),
        ({"estimator": "drawn"}, [7, 7]),
    ):
        model = undrift.perturb(net, **changes)
        for samples in (3, 10):
            rows.clear()
            predict(model, images(7), samples, mode="fast")
            assert rows == expected
        rows.clear()
        predict(model, images(7), 0, mode="fast")
        assert rows == [7]
        model.remove()


def test_without_noise_it_is_the_mean_network() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.0)
    p = predict(model, x, mode="fast")
    mean = predict(model, x, 0)
    torch.testing.assert_close(p.probs, mean.probs)
    torch.testing.assert_close(p.mutual_info, torch.zeros(400), atol=1e-6, rtol=0)


def test_it_is_near_the_average_of_many_draws() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.04)
    truth, ten, two, mean = (predict(model, x, n, generator=1) for n in (300, 10, 2, 0))
    calls = [predict(model, x, 10, generator=seed, mode="fast") for seed in range(16)]

    def gap(p: undrift.Prediction) -> float:
        return nll_of_draws(p.probs, truth.probs) - nll_of_draws(truth.probs, truth.probs)

    # As unsure as ten draws are, and nearer to the truth than as many draws.
    assert sum(sharpness(p.probs) for p in calls) / 16 == pytest.approx(sharpness(ten.probs), abs=0.025)
    assert sharpness(mean.probs) > sharpness(ten.probs) + 0.08
    assert sum(gap(p) for p in calls) / 16 < 0.6 * gap(two)
    assert all((p.label == truth.label).float().mean() > 0.8 for p in calls)
    # Mutual information still finds the images that draws disagree on.
    assert all(torch.corrcoef(torch.stack([p.mutual_info, truth.mutual_info]))[0, 1] > 0.5 for p in calls)
    assert all(bool((p.mutual_info >= 0).all()) for p in calls)


def test_seeds_repeat_it() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    a, b = (predict(model, x, generator=7, mode="fast", batch_size=90) for _ in range(2))
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.mutual_info, b.mutual_info)
    assert not torch.equal(a.probs, predict(model, x, generator=8, mode="fast").probs)


def test_one_temperature_serves_all_images_of_a_call() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    ten = predict(model, x, 10, generator=1)
    small = predict(model, x, 10, generator=2, mode="fast", batch_size=4)
    assert sharpness(small.probs) == pytest.approx(sharpness(ten.probs), abs=0.02)


def test_more_samples_stand_for_a_less_sure_answer() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    one, two, many = (sharpness(predict(model, x, n, generator=1, mode="fast").probs) for n in (1, 2, 1000))
    assert one > two > many


def test_the_sharpness_of_the_average_by_hand() -> None:
    # One image, two draws (3/4, 1/4) and (1/4, 3/4): Σ p₁p₂ = 3/8, Σ p² = 5/8. The average of two has Σ p̄² = 1/2.
    first, second = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, math.log(3)]])
    part = Few.of(first, second, torch.tensor([True]))
    torch.testing.assert_close(part.both, torch.tensor([3 / 8, 5 / 8, 1.0]))
    assert part.logits[0, 0] == part.logits[0, 1]
    # Draws (3/4, 1/4) and (1/2, 1/2): their mean log odds are log(3)/2, those of their mean probability log(5/3).
    other = Few.of(first, torch.zeros(1, 2), torch.tensor([True]), part=0.25)
    odds = other.logits[0, 0] - other.logits[0, 1]
    assert float(odds) == pytest.approx(0.25 * math.log(3) / 2 + 0.75 * math.log(5 / 3))
    # No temperature makes two classes less sharp than 1/2; one sample is as sharp as a draw.
    assert sharpness(answer([part], 2).probs) < 0.51
    same = Few.of(first, first, torch.tensor([True]))
    assert sharpness(answer([same], 1).probs) == pytest.approx(5 / 8, abs=1e-4)


def test_the_temperature_is_found_and_never_below_one() -> None:
    logits = 3 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    for t in (1.0, 1.01, 1.7, 6.0, 15.0):
        wanted = (logits / t).softmax(1).square().sum(1).mean()
        assert float(temperature_of([logits[:200], logits[200:]], wanted)) == pytest.approx(t, rel=2e-3)
    assert float(temperature_of([logits], torch.tensor(0.99))) == 1.0
    assert float(temperature_of([logits], torch.tensor(0.0))) == pytest.approx(16.0)


def test_rows_without_an_answer_spoil_nothing() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    x = x.clone()
    x[3] = float("nan")
    p = predict(model, x, generator=1, mode="fast", batch_size=100)
    assert p.label[3] == -1
    assert int((p.label < 0).sum()) == 1
    assert predict(model, x[3:4], mode="fast").label.tolist() == [-1]
    assert len(predict(model, x[:0], mode="fast")) == 0
    # Logits that are not finite, of an image that is.
    good = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    bad = good.clone()
    bad[0] = float("inf")
    mixed = answer([Few.of(bad, good, torch.tensor([True, True]))], 10)
    assert mixed.label.tolist() == [-1, 1]
    with pytest.raises(undrift.DataError, match="no prediction"):
        predict(model, [], mode="fast")


def test_a_plain_network_gives_its_one_answer() -> None:
    net, x = classifier()
    assert torch.equal(predict(net, x, mode="fast").probs, predict(net, x).probs)
