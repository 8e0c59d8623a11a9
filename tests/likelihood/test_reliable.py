"""Reliable entropy: which images count, how much, and when the running mean moves."""

import math

import pytest
import torch
from torch import Tensor

import undrift
from support import convnet, images
from undrift import Step
from undrift.likelihood import ReliableEntropy

# Three classes: two sure images of different classes, one unsure, one in between.
PROBS = torch.tensor([[0.98, 0.01, 0.01], [0.01, 0.98, 0.01], [0.4, 0.3, 0.3], [0.96, 0.02, 0.02]])
MOST = 0.4 * math.log(3)


def logits() -> Tensor:
    return PROBS.log().requires_grad_()


def step(climbed: bool = False) -> Step:
    model = undrift.perturb(convnet())
    return Step(model, images(4), model, climbed=climbed)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


def asked(likelihood: ReliableEntropy, z: Tensor, climbed: bool = False) -> Tensor:
    loss = likelihood(z, step(climbed))
    assert loss is not None
    return loss


def test_the_first_batch_keeps_all_that_is_reliable() -> None:
    likelihood = ReliableEntropy()
    z = logits()
    loss = asked(likelihood, z)
    kept = PROBS[[0, 1, 3]]
    wanted = (entropy(kept) * (MOST - entropy(kept)).exp()).mean()
    torch.testing.assert_close(loss, wanted)
    assert likelihood.mean is None  # the step is not made yet
    likelihood.follow(step().model)
    torch.testing.assert_close(likelihood.mean, kept.mean(0))


def test_later_batches_keep_what_is_new_and_the_mean_follows_them() -> None:
    likelihood = ReliableEntropy(redundancy=0.4)
    likelihood.mean = mean = torch.tensor([0.8, 0.1, 0.1])
    loss = asked(likelihood, logits())
    # |cos| with m: 0.99 for the images of the first class, about 0.14 for that of the second.
    new = PROBS[1]
    torch.testing.assert_close(loss, entropy(new) * (MOST - entropy(new)).exp())
    likelihood.follow(step().model)
    torch.testing.assert_close(likelihood.mean, 0.9 * mean + 0.1 * new)
    likelihood.follow(step().model)  # nothing new to follow
    torch.testing.assert_close(likelihood.mean, 0.9 * mean + 0.1 * new)


def test_weights_carry_no_gradient() -> None:
    z, other = logits(), logits()
    asked(ReliableEntropy(), z).backward()
    log_p = other.log_softmax(1)
    rows = -(log_p.exp() * log_p).sum(1)[[0, 1, 3]]
    ((MOST - entropy(PROBS[[0, 1, 3]])).exp() * rows).mean().backward()
    torch.testing.assert_close(z.grad, other.grad)
    assert z.grad is not None
    assert (z.grad[2] == 0).all()


def test_nothing_kept_asks_nothing_and_leaves_the_mean() -> None:
    likelihood = ReliableEntropy()
    likelihood.mean = mean = torch.tensor([0.8, 0.1, 0.1])
    assert likelihood(PROBS[[2]].log(), step()) is None
    assert likelihood(PROBS[[0, 3]].log(), step()) is None  # reliable, and nothing new
    likelihood.follow(step().model)
    assert torch.equal(likelihood.mean, mean)
    loss = likelihood(PROBS.log() * float("nan"), step())
    assert loss is not None
    assert loss.isnan()  # the loop says why there is no step


def test_the_second_pass_of_a_climb_counts_what_the_first_kept() -> None:
    likelihood = ReliableEntropy(redundancy=None, weighted=False)
    torch.testing.assert_close(asked(likelihood, logits()), entropy(PROBS[[0, 1, 3]]).mean())
    # After the climb the first image is unsure, and the third, unsure before, is sure.
    climbed = PROBS[[2, 1, 0, 3]]
    torch.testing.assert_close(asked(likelihood, climbed.log(), climbed=True), entropy(PROBS[[1, 3]]).mean())
    assert likelihood(PROBS[[2, 2, 0, 2]].log(), step(climbed=True)) is None
    assert likelihood.mean is None


def test_settings_are_checked_and_shown() -> None:
    with pytest.raises(undrift.OptionError, match=r"margin=0.*EATA's are"):
        ReliableEntropy(margin=0)
    with pytest.raises(undrift.OptionError, match="redundancy=2"):
        ReliableEntropy(redundancy=2)
    assert "redundancy=0.1" in repr(ReliableEntropy(redundancy=0.1))
