"""Two or three draws, averaged, and the temperature that makes them as unsure as more: small cases by hand."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from undrift.answer.fast_mode import FewDraws, averaged, evenly, joined, log_probs, temperature_of


def sharpness(probs: Tensor) -> float:
    return float(probs.square().sum(1).mean())


def test_a_part_of_the_images_evenly() -> None:
    assert evenly(torch.zeros(10), 0.3).tolist() == [0, 3, 6]
    for count, part in ((1, 1), (2, 1), (3, 1), (10, 4), (200, 80)):
        rows = evenly(torch.zeros(count))
        assert len(rows) == len(rows.unique()) == part
        assert int(rows.max()) < count


def test_the_average_and_its_temperature_by_hand() -> None:
    one, row = torch.tensor([True]), torch.tensor([0])
    a, b, c = (log_probs(torch.tensor([odds])) for odds in ([math.log(3), 0.0], [0.0, math.log(3)], [0.0, 0.0]))
    # Draws (3/4, 1/4), (1/4, 3/4) and (1/2, 1/2): Σ p₁p₂ = 3/8, Σ p₁² = 5/8, and all classes are alike.
    part = FewDraws.of(torch.cat([a, b, c]), row, one)
    torch.testing.assert_close(part.overlap, torch.tensor([3 / 8, 5 / 8, 1.0]))
    assert float(part.logits[0, 0]) == pytest.approx(float(part.logits[0, 1]))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert float(part.mean_entropy) == pytest.approx((2 * quarter + math.log(2)) / 3)
    # Twice (3/4, 1/4) and (1/2, 1/2): mean log odds 2/3 log 3.
    odds = averaged([a, a, c])[0] @ torch.tensor([1.0, -1.0])
    assert float(odds) == pytest.approx(2 / 3 * math.log(3))
    # One T makes the answer as sharp as the first two draws say that S are: Σ p₁p₂ = 5/8 of twice (3/4, 1/4), though
    # the third is another. It never makes it sharper.
    sharp = log_probs(torch.tensor([[math.log(9), 0.0]]))
    assert sharpness(joined([FewDraws.of(torch.cat([a, a, sharp]), row, one)], 10).probs) == pytest.approx(
        5 / 8, abs=1e-4
    )
    assert sharpness(joined([FewDraws.of(torch.cat([a, a, c]), row, one)], 10).probs) < 5 / 8 - 0.05
    # Two images, a third draw for the second of them: one T for both. Of the first, Σ p₁p₂ = Σ p₁² = 5/8; of the second
    # Σ p₁p₂ = 1/2, and Σ p² is 5/8 and 1/2. So four draws would have 3/4 · 9/16 + 1/4 · 19/32 on average.
    both = torch.tensor([True, True])
    few = FewDraws.of(torch.cat([a, a, a, c, sharp]), torch.tensor([1]), both)
    torch.testing.assert_close(few.overlap, torch.tensor([9 / 8, 19 / 16, 2.0]))
    torch.testing.assert_close(few.logits[:1], averaged([a, a])[0])
    torch.testing.assert_close(few.logits[1:], averaged([a, c, sharp])[0])
    p = joined([few], 4)
    assert sharpness(p.probs) == pytest.approx(3 / 4 * 9 / 16 + 1 / 4 * 19 / 32, abs=1e-4)
    heats = (few.logits @ torch.tensor([1.0, -1.0])) / (p.probs.log() @ torch.tensor([1.0, -1.0]))
    assert float(heats[0]) == pytest.approx(float(heats[1]), rel=1e-4)
    assert float(heats[0]) > 1.05


def test_the_temperature_is_found_and_never_below_one() -> None:
    logits = 3 * torch.randn(500, 7, generator=torch.Generator().manual_seed(0))
    for t in (1.0, 1.01, 1.7, 6.0, 15.0):
        wanted = (logits / t).softmax(1).square().sum(1).mean()
        assert float(temperature_of([logits[:200], logits[200:]], wanted)) == pytest.approx(t, rel=2e-3)
    assert float(temperature_of([logits], torch.tensor(0.99))) == 1.0
    assert float(temperature_of([logits], torch.tensor(0.0))) == pytest.approx(16.0)


def test_the_benchmark_that_chose_it_asks_the_same_question() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "predict_choice.py"))
    draws = (3 * torch.randn(3, 50, 6, generator=torch.Generator().manual_seed(0))).log_softmax(2)
    rows = evenly(draws[0])
    fast = joined(
        [FewDraws.of(torch.cat([draws[0], draws[1], draws[2, rows]]), rows, torch.ones(50, dtype=torch.bool))], 10
    )
    choice = script["CHOICES"]["third draw for 40 %, as ten (fast)"]
    torch.testing.assert_close(choice.probs(draws), fast.probs)
    # By the formula of the script, as many draws as there are: Σ p̄² of two is that of their mean.
    two_as_two = script["Choice"](third=0, stands_for=2, part=0.0).probs(draws)
    torch.testing.assert_close(two_as_two, draws[:2].exp().mean(0), atol=1e-3, rtol=0)
    # Both unsure is no dispute; opposite answers are one.
    sure = math.log(9)
    first = log_probs(torch.tensor([[sure, 0.0], [0.0, 0.0], [sure, 0.0], [sure, 0.0]]))
    second = log_probs(torch.tensor([[sure, 0.0], [0.0, 0.0], [0.0, sure], [0.0, 0.0]]))
    assert sorted(script["disputed"](torch.stack([first, second]), 0.5).tolist()) == [2, 3]
