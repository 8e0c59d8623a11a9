"""Risk against coverage, computed by hand and by brute force."""

import itertools
import statistics

import pytest
import torch

from undrift.judge.metrics import Tally
from undrift.judge.selective import augrc, aurc, curve, risk_coverage

# In order of confidence: right, wrong, right, wrong.
CONFIDENCE = torch.tensor([0.5, 0.9, 0.6, 0.8])
RIGHT = torch.tensor([False, True, True, False])


def by_definition(confidence: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Return AURC and AUGRC as means over every order of the images that is sorted by confidence."""
    selective, generalised = [], []
    for order in itertools.permutations(range(len(right))):
        sure = [float(confidence[i]) for i in order]
        if sure == sorted(sure, reverse=True):
            wrong = list(itertools.accumulate(int(not right[i]) for i in order))
            selective.append(statistics.fmean(w / k for k, w in enumerate(wrong, 1)))
            generalised.append(statistics.fmean(w / len(order) for w in wrong))
    return statistics.fmean(selective), statistics.fmean(generalised)


def test_by_hand() -> None:
    coverage, risk = risk_coverage(CONFIDENCE, RIGHT)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert aurc(CONFIDENCE, RIGHT) == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert augrc(CONFIDENCE, RIGHT) == pytest.approx((0 + 1 + 1 + 2) / 4 / 4)


def test_the_curve_that_is_kept() -> None:
    assert curve(CONFIDENCE, RIGHT, 4) == tuple(risk_coverage(CONFIDENCE, RIGHT)[1].tolist())
    assert curve(CONFIDENCE, RIGHT, 3) == pytest.approx((1 / 2, 1 / 3, 1 / 2))  # 4/3 and 8/3 images: 2 and 3
    assert curve(CONFIDENCE, RIGHT, 8)[:2] == (0, 0)  # half an image is one
    assert len(curve(torch.rand(7), torch.ones(7))) == 50


@pytest.mark.parametrize("levels", [1, 2, 3, 100])
def test_it_is_the_mean_over_orders_of_equal_confidences(levels: int) -> None:
    drawn = torch.Generator().manual_seed(levels)
    confidence = torch.randint(levels, (6,), generator=drawn) / levels
    right = torch.rand(6, generator=drawn) < 0.6
    assert (aurc(confidence, right), augrc(confidence, right)) == pytest.approx(by_definition(confidence, right))


def test_the_order_of_the_images_does_not_matter() -> None:
    drawn = torch.Generator().manual_seed(0)
    confidence, right = torch.randint(5, (200,), generator=drawn) / 5, torch.rand(200, generator=drawn) < 0.7
    other = torch.randperm(200, generator=drawn)
    for score in (aurc, augrc):
        assert score(confidence, right) == pytest.approx(score(confidence[other], right[other]), rel=1e-12)


def test_limits() -> None:
    assert aurc(CONFIDENCE, torch.ones(4)) == augrc(CONFIDENCE, torch.ones(4)) == 0
    assert aurc(CONFIDENCE, torch.zeros(4)) == 1
    assert augrc(CONFIDENCE, torch.zeros(4)) == (1 + 2 + 3 + 4) / 16
    # A confidence that says nothing has the error as its AURC.
    assert aurc(torch.full((4,), 0.5), RIGHT) == 0.5


def test_a_tally_has_both() -> None:
    probs = torch.stack((CONFIDENCE, 1 - CONFIDENCE), 1)
    tally = Tally()
    tally.add(probs, 1 - RIGHT.long(), torch.zeros(4, dtype=torch.long))
    assert tally.scores().aurc == pytest.approx(aurc(CONFIDENCE, RIGHT))
    assert tally.scores().augrc == pytest.approx(augrc(CONFIDENCE, RIGHT))
    assert tally.risks() == curve(CONFIDENCE, RIGHT)
