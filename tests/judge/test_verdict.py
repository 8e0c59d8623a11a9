"""The label-free verdict: hand-computed numbers, a constructed collapse, a healthy run."""

import math

import pytest
import torch
from torch import Tensor

import undrift
from undrift import Verdict
from undrift.judge.verdict import Survey, better, has_collapsed, same_answers, survey


def look(probs: list[list[float]], places: list[int] | None = None) -> tuple[Survey, Tensor]:
    logits = torch.tensor(probs).log()
    where = torch.arange(len(logits)) if places is None else torch.tensor(places)
    halves = [(where[:1], logits[:1]), (where[1:], logits[1:])]
    return survey(lambda images: images, halves)


def made(entropy: float, diversity: float, predicted: int = 10, classes: int = 10) -> Survey:
    return Survey(1000, classes, predicted, entropy, diversity)


def test_a_survey_by_hand() -> None:
    found, answers = look([[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]], places=[4, 0, 2])
    sure = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert found.entropy == pytest.approx((2 * sure + math.log(2)) / 3)
    assert found.diversity == pytest.approx(1)  # the mean is one half each
    assert found.information == pytest.approx(math.log(2) - found.entropy)
    assert (found.samples, found.classes, found.predicted) == (3, 2, 2)
    assert answers.tolist() == [0, -1, 1, -1, 0]


def test_zero_probabilities_and_overflow_are_no_trouble() -> None:
    found, answers = survey(
        lambda images: images, [(torch.arange(3), torch.tensor([[1e4, -1e4], [torch.inf, 0.0], [1e4, -1e4]]))]
    )
    assert found == Survey(2, 2, 1, 0.0, 0.0)
    assert answers.tolist() == [0, -1, 0]
    with pytest.raises(undrift.DataError, match="no finite output"):
        survey(lambda images: images, [(torch.arange(1), torch.tensor([[torch.nan, 0.0]]))])
    with pytest.raises(undrift.DataError, match="no finite output"):
        survey(lambda images: images, [])


def test_answers_are_compared_where_both_saw_the_image() -> None:
    assert same_answers(torch.tensor([1, 2, -1, 3]), torch.tensor([1, 0, 2, 3, 4])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("after", "collapsed"),
    [
        (made(0.3, 0.97), False),  # healthy: surer and as diverse
        (made(0.01, 0.02), True),  # one answer for nearly everything
        (made(0.05, 0.30), True),  # two of ten classes in equal parts
        (made(0.05, 0.70), False),  # five of ten: an unequal domain may well be so
        (made(1.8, 0.30), False),  # lost diversity and confidence: lost, not collapsed
        (made(0.9, 0.5, predicted=1), True),  # one class for everything, whatever else
    ],
)
def test_what_counts_as_collapse(after: Survey, collapsed: bool) -> None:
    before = made(1.5, 0.95)
    assert has_collapsed(before, after) is collapsed
    assert Verdict(before, after).collapsed is collapsed
    assert ("COLLAPSED" in str(Verdict(before, after))) is collapsed


def test_two_classes_can_collapse_too() -> None:
    before = made(0.4, 0.98, 2, classes=2)
    assert has_collapsed(before, made(0.01, 0.1, 2, classes=2))
    assert not has_collapsed(before, made(0.1, 0.9, 2, classes=2))


def test_a_source_that_says_one_thing_already_cannot_collapse() -> None:
    assert not has_collapsed(made(1.6, 0.95, 1), made(1.5, 0.95, 1))
    nearly = Survey(1000, 10, 1, 1.5, 0.95, agreement=0.95)
    assert not has_collapsed(made(1.6, 0.95, 2), nearly)


def test_a_source_that_was_sure_already() -> None:
    before = made(0.05, 0.95)
    assert has_collapsed(before, made(0.04, 0.1))


def test_the_sentence_says_what_was_found() -> None:
    before = made(1.5, 0.9)
    assert str(Verdict(before, made(1.8, 0.85))).startswith("doubtful")
    settled = Survey(100, 10, 10, 0.2, 0.97, agreement=0.8, stability=0.99)
    said = str(Verdict(before, settled))
    assert said.startswith("no sign of collapse: entropy 1.500 → 0.200, diversity 0.90 → 0.97")
    assert "80% as the source network says" in said
    assert "99% as the epoch before" in said
    assert str(Verdict(before, Survey(100, 10, 10, 0.2, 0.97, 0.8, 0.5))).startswith("not settled")


def test_the_warning_is_loud_on_collapse_only() -> None:
    before = made(1.5, 0.95)
    with pytest.warns(undrift.UndriftWarning, match="COLLAPSED") as caught:
        Verdict(before, made(0.01, 0.02)).warn()
    assert caught[0].filename == __file__
    Verdict(before, made(0.3, 0.97)).warn()


def test_the_better_epoch_is_sure_and_diverse() -> None:
    before, healthy, surer = made(1.5, 0.95), made(0.5, 0.95), made(0.2, 0.95)
    collapsed = made(0.0, 0.02)
    assert better(before, surer, healthy)
    assert not better(before, healthy, surer)
    assert better(before, healthy, collapsed)
    assert not better(before, healthy, healthy)  # among equals the first stays


def test_a_source_that_answers_one_class_only_is_said() -> None:
    one, other = made(0.02, 0.02, predicted=1), made(0.03, 0.03, predicted=1)
    assert str(Verdict(one, other)).startswith("nothing to tell a collapse by, the source network answers one class")
    assert not Verdict(one, other).collapsed
    assert str(Verdict(one, made(0.03, 0.9))).startswith("no sign of collapse")
