"""The noise of an image is a function of its seed and its place, whatever else is in its batch or follows."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import undrift
from drawn_networks import networks, options, pictures


def noisy(model: undrift.Perturbed, x: Tensor, seed: int) -> Tensor:
    model.reseed(seed)
    with torch.no_grad(), model.rest():
        return model(x)


@settings(max_examples=30)
@given(net=networks(), chosen=options(), seed=st.integers(0, 2**31), cut=st.integers(1, 8))
def test_a_batch_cut_short_keeps_the_noise_of_its_images(
    net: nn.Module, chosen: dict[str, Any], seed: int, cut: int
) -> None:
    model = undrift.perturb(net, **(chosen | {"init_fraction": 0.3}))
    x = pictures(9, seed)
    whole = noisy(model, x, seed)
    torch.testing.assert_close(noisy(model, x[:cut], seed), whole[:cut])
    others = torch.cat([x[:cut], pictures(9 - cut, seed + 1)])
    torch.testing.assert_close(noisy(model, others, seed)[:cut], whole[:cut])
    assert not torch.allclose(noisy(model, x, seed + 1), whole)


@settings(max_examples=15)
@given(net=networks(), chosen=options(), seed=st.integers(0, 2**31), cut=st.integers(1, 8))
def test_weights_that_are_drawn_are_the_same_for_every_part_of_a_batch(
    net: nn.Module, chosen: dict[str, Any], seed: int, cut: int
) -> None:
    model = undrift.perturb(net, **(chosen | {"init_fraction": 0.3, "estimator": "drawn"}))
    x = pictures(9, seed)
    parts = torch.cat([noisy(model, part, seed) for part in (x[:cut], x[cut:])])
    torch.testing.assert_close(parts, noisy(model, x, seed))


@settings(max_examples=15)
@given(net=networks(), chosen=options(), seed=st.integers(0, 2**31), size=st.integers(1, 8))
def test_the_first_batch_is_answered_alike_however_many_follow(
    net: nn.Module, chosen: dict[str, Any], seed: int, size: int
) -> None:
    model = undrift.perturb(net, **(chosen | {"init_fraction": 0.3}))
    x = pictures(9, seed)
    alone = undrift.predict(model, x[:size], 3, generator=seed, fold_limit=0)
    batches = undrift.predict(model, x.split(size), 3, generator=seed, fold_limit=0)
    joined = undrift.predict(model, x, 3, generator=seed, fold_limit=0)
    for answers in (batches, joined):
        torch.testing.assert_close(answers.probs[:size], alone.probs)
        torch.testing.assert_close(answers.entropy[:size], alone.entropy)
