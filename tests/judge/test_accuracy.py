"""Accuracy without labels: hand-computed numbers, networks of which one is known to be better, and doubts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from undrift import Helping
from undrift.judge.accuracy import LAPSE, SURE, Estimate, belief, flattening, helping, margin, right


def test_margin_and_temperature_by_hand() -> None:
    logits = torch.tensor([[6.0, 0.0, 0.0], [0.0, 3.0, 3.0]])
    assert margin(logits) == pytest.approx((6 + 1.5) / 2)
    assert margin(logits.log_softmax(1)) == pytest.approx(margin(logits))  # logits or log-probabilities
    # At this T an image of the mean margin is answered with probability sigmoid(sure) against two other classes.
    t = flattening(30.0, 3)
    assert torch.tensor([30.0 / t, 0.0, 0.0]).softmax(0)[0] == pytest.approx(1 / (1 + math.exp(-SURE)))
    assert flattening(0.1, 3) == 1  # never sharpened


def test_belief_by_hand() -> None:
    # Two images, two classes, two views: the second image's views contradict each other.
    views = torch.tensor([[[0.8, 0.2], [0.9, 0.1]], [[0.8, 0.2], [0.1, 0.9]]]).log()
    p = belief(views, 1.0)

    def of(q: float) -> float:
        return (1 - LAPSE) * q + LAPSE / 2

    share = [(of(0.8) + 0.5 + 1) / 4, (of(0.2) + 0.5 + 1) / 4]
    first = of(0.8) / share[0] / (of(0.8) / share[0] + of(0.2) / share[1])
    second = 0.5 / share[0] / (0.5 / share[0] + 0.5 / share[1])
    assert p[:, 0].tolist() == pytest.approx([first, second])
    assert p.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("sure", [1.0, 4.0, 400.0])
def test_an_answer_that_everything_gets_says_little(sure: float) -> None:
    one_class = torch.tensor([[sure, 0.0, 0.0, 0.0]]).expand(4000, 4)[None]
    found = helping(one_class, one_class)
    assert found.source.value == pytest.approx(1 / 4, abs=0.02)  # chance, however sure and steady
    assert found.gain.value == 0
    assert "one answer to everything" in str(found)


def made(labels: Tensor, accuracy: float, views: int, seed: int, classes: int = 8) -> Tensor:
    """Return logits of a network that knows some images, and answers anew under each view of the others."""
    generator = torch.Generator().manual_seed(seed)
    knows = torch.rand(len(labels), generator=generator) < accuracy
    answers = torch.randint(classes, (views, len(labels)), generator=generator)
    answers = torch.where(knows, labels, answers)
    return 8 * torch.nn.functional.one_hot(answers, classes).float()


def true_accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits[0].argmax(1) == labels).float().mean())


@pytest.mark.parametrize(("before", "after", "judged"), [(0.3, 0.8, "helped"), (0.9, 0.3, "hurt"), (0.7, 0.7, "")])
def test_the_better_of_two_networks_is_found(before: float, after: float, judged: str) -> None:
    labels = torch.randint(8, (1000,), generator=torch.Generator().manual_seed(0))
    source, adapted = made(labels, before, 12, 1), made(labels, after, 12, 2)
    found = helping(source, adapted)
    truth = true_accuracy(adapted, labels) - true_accuracy(source, labels)
    assert abs(found.gain.value - truth) < 0.12
    assert found.judgement == (judged or "unclear")
    assert found.adapted.value - found.source.value == pytest.approx(found.gain.value)


def test_only_images_with_different_answers_decide() -> None:
    labels = torch.randint(8, (400,), generator=torch.Generator().manual_seed(0))
    source = made(labels, 0.8, 4, 1)
    adapted = source + 0.5 * torch.randn(source.shape, generator=torch.Generator().manual_seed(3))
    first, second = right(source, adapted)
    same = source[0].argmax(1) == adapted[0].argmax(1)
    assert same.any()
    assert torch.equal(first[same], second[same])


def test_the_scale_of_a_networks_logits_does_not_matter() -> None:
    labels = torch.randint(8, (400,), generator=torch.Generator().manual_seed(0))
    source, adapted = made(labels, 0.5, 4, 1), made(labels, 0.7, 4, 2)
    one, sharpened = helping(source, adapted), helping(source, 5 * adapted)
    assert sharpened.adapted.value == pytest.approx(one.adapted.value, abs=0.06)


def test_what_is_not_known_is_said() -> None:
    labels = torch.arange(60) % 2
    two = made(labels, 0.8, 1, 1, classes=2)
    text = str(helping(two, two))
    for doubt in ("60 images are few", "two classes", "confidence alone"):
        assert doubt in text
    thousand = made(torch.arange(200), 0.9, 4, 1, classes=1000)
    found = helping(thousand, thousand)
    assert "200 images are few for 1000 classes" in str(found)
    assert 0.5 < found.source.value < 1  # a class that is met once is not taken for certain


def test_no_change_has_no_minus_sign() -> None:
    found = helping(made(torch.arange(200) % 8, 0.4, 4, 1), made(torch.arange(200) % 8, 0.4, 4, 2))
    assert "helped (+0 ± 2 points)" in str(replace(found, gain=Estimate(-0.003, 0.02)))
    assert "hurt (-3 ± 2 points)" in str(replace(found, gain=Estimate(-0.03, 0.02))).lower()


def test_images_without_finite_answers_are_left_out() -> None:
    labels = torch.arange(40) % 8
    source, adapted = made(labels, 0.5, 2, 1), made(labels, 0.9, 2, 2)
    source[1, 3, 0] = torch.nan
    assert helping(source, adapted).images == 39
    none = helping(source * torch.nan, adapted)
    assert (none.images, none.judgement) == (0, "unclear")


def test_it_is_kept_as_plain_values() -> None:
    found = helping(made(torch.arange(200) % 8, 0.4, 4, 1), made(torch.arange(200) % 8, 0.9, 4, 2))
    plain = found.as_dict()
    assert Helping.from_dict(plain) == found
    assert plain["judgement"] == "helped"
    assert plain["sentence"].startswith("adaptation helped (+")
