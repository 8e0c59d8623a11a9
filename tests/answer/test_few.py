"""Two or three draws, averaged, and the temperature that makes them as unsure as more: small cases by hand."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift


class Scripted(nn.Module):
    """A network that is told what each of its draws says of each image; an image is its number."""

    def __init__(self, draws: Tensor) -> None:
        super().__init__()
        self.noisy, self.draws = nn.Linear(1, 1), draws
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        at, numbers = len(self.seen), x[:, 0].long()
        self.seen += numbers.tolist()
        draw = torch.arange(at, at + len(x)) // self.draws.shape[1]
        return self.draws[draw, numbers] + 0 * self.noisy(x)


def fast(draws: Tensor, samples: int = 10, limit: int | None = 100_000) -> undrift.Prediction:
    """Return what the fast mode makes of draws × images × classes of log-probabilities."""
    images = torch.arange(draws.shape[1])[:, None].float()
    model = undrift.perturb(Scripted(draws))
    return undrift.predict(model, images, samples, mode="fast", fold_limit=limit, batch_size=len(images))


def sharpness(probs: Tensor) -> float:
    return float(probs.square().sum(1).mean())


def odds(p: undrift.Prediction) -> Tensor:
    return p.probs.log() @ torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(("count", "part"), [(1, 1), (2, 1), (3, 1), (10, 4), (200, 80)])
def test_a_third_draw_of_a_part_of_the_images_evenly(count: int, part: int) -> None:
    net = Scripted(torch.zeros(3, count, 2))
    images = torch.arange(count)[:, None].float()
    undrift.predict(undrift.perturb(net), images, mode="fast", fold_limit=1000)
    first, second, third = net.seen[:count], net.seen[count : 2 * count], net.seen[2 * count :]
    assert first == second == list(range(count))
    assert len(third) == len(set(third)) == part
    apart = [b - a for a, b in zip(third, [*third[1:], count], strict=True)]
    assert max(apart) - min(apart) <= 1 or part == 1


def test_the_average_and_its_temperature_by_hand() -> None:
    a, b, c = (torch.tensor(odds_of).log_softmax(0) for odds_of in ([math.log(3), 0.0], [0.0, math.log(3)], [0.0, 0.0]))
    sharp = torch.tensor([math.log(9), 0.0]).log_softmax(0)

    def one(*draws: Tensor) -> undrift.Prediction:
        return fast(torch.stack(draws)[:, None])

    # Draws (3/4, 1/4), (1/4, 3/4) and (1/2, 1/2): all classes are alike.
    p = one(a, b, c)
    torch.testing.assert_close(p.probs, torch.full((1, 2), 0.5))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(p.mutual_info) == pytest.approx(math.log(2) - (2 * quarter + math.log(2)) / 3, abs=1e-6)
    # One T makes the answer as sharp as the first two draws say that S are: Σ p₁p₂ = 5/8 of twice (3/4, 1/4), though
    # the third is another. It never makes it sharper: of twice (3/4, 1/4) and (1/2, 1/2) log odds are 2/3 log 3.
    assert sharpness(one(a, a, sharp).probs) == pytest.approx(5 / 8, abs=1e-4)
    assert float(odds(one(a, a, c))) == pytest.approx(2 / 3 * math.log(3))
    assert sharpness(one(a, a, c).probs) < 5 / 8 - 0.05
    # Two images, a third draw for the first of them: one T for both. Of the second, Σ p₁p₂ = Σ p₁² = 5/8; of the first
    # Σ p₁p₂ = 1/2, and Σ p² is 5/8 and 1/2. So four draws would have 3/4 · 9/16 + 1/4 · 19/32 on average.
    p = fast(torch.stack([torch.stack(draw) for draw in ((a, a), (c, a), (sharp, a))]), 4)
    assert sharpness(p.probs) == pytest.approx(3 / 4 * 9 / 16 + 1 / 4 * 19 / 32, abs=1e-4)
    heats = torch.tensor([(math.log(3) + math.log(9)) / 3, math.log(3)]) / odds(p)
    assert float(heats[0]) == pytest.approx(float(heats[1]), rel=1e-4)
    assert float(heats[0]) > 1.05


@pytest.mark.parametrize("samples", [4, 10, 100])
@pytest.mark.parametrize("scatter", [0.3, 1.0, 2.0, 5.0])
def test_one_temperature_makes_the_answers_as_sharp_as_two_draws_say(samples: int, scatter: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    draws = 3 * torch.randn(500, 7, generator=drawn) + scatter * torch.randn(3, 500, 7, generator=drawn)
    draws = draws.log_softmax(2)
    p = fast(draws, samples, limit=0)  # all have three
    across, own = (draws[0] + draws[1]).exp().sum(1).mean(), (2 * draws[:2]).exp().sum(2).mean()
    wanted = float((1 - 1 / samples) * across + own / samples)
    logits = draws.mean(0)
    plain = sharpness(logits.softmax(1))
    assert sharpness(p.probs) == pytest.approx(min(plain, wanted), rel=2e-3)
    heat = (logits[0, 0] - logits[0, 1]) / (p.probs[0, 0] / p.probs[0, 1]).log()
    torch.testing.assert_close(p.probs, (logits / heat).softmax(1), rtol=1e-3, atol=1e-4)
    assert float(heat) > 1.001 if wanted < 0.999 * plain else float(heat) == pytest.approx(1, abs=1e-3)


def test_the_benchmark_that_chose_it_asks_the_same_question() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "predict_choice.py"))
    draws = (3 * torch.randn(3, 50, 6, generator=torch.Generator().manual_seed(0))).log_softmax(2)
    choice = script["CHOICES"]["third draw for 40 %, as ten (fast)"]
    torch.testing.assert_close(choice.probs(draws), fast(draws).probs)
    # By the formula of the script, as many draws as there are: Σ p̄² of two is that of their mean.
    two_as_two = script["Choice"](third=0, stands_for=2, part=0.0).probs(draws)
    torch.testing.assert_close(two_as_two, draws[:2].exp().mean(0), atol=1e-3, rtol=0)
    # Both unsure is no dispute; opposite answers are one.
    sure = math.log(9)
    first = torch.tensor([[sure, 0.0], [0.0, 0.0], [sure, 0.0], [sure, 0.0]]).log_softmax(1)
    second = torch.tensor([[sure, 0.0], [0.0, 0.0], [0.0, sure], [0.0, 0.0]]).log_softmax(1)
    assert sorted(script["disputed"](torch.stack([first, second]), 0.5).tolist()) == [2, 3]


def test_logits_that_are_not_finite_spoil_no_other_row() -> None:
    good = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    bad = good.clone()
    bad[0] = float("inf")
    clean = fast(good[1:].repeat(3, 1)[:, None])
    for draws in ([bad, good, good], [good, good, bad]):
        mixed = fast(torch.stack(draws), limit=0)
        assert mixed.label.tolist() == [-1, 1]
        torch.testing.assert_close(mixed.probs[1:], clean.probs)
