"""ETA and EATA: a step by hand, the Fisher term by hand, and source images that have to be given."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import undrift
from online_support import batches, close, entropies, network, trained, twin
from support import convnet, images
from undrift import methods
from undrift.images import TensorDomain
from undrift.keep import Fisher

CLEAN = images(20, 9).double()
FREE = [torch.zeros(())] * 4  # no Fisher term
NEW = 0.7  # with less, nothing of the third batch is new


def eta_loss(logits: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss, and the running mean after it."""
    most, probs = 0.4 * math.log(5), logits.detach().softmax(1)
    kept = entropies(logits) < most
    if mean is not None:
        kept &= F.cosine_similarity(probs, mean[None]).abs() < NEW
    entropy = entropies(logits)[kept]
    fresh = probs[kept].mean(0)
    return (entropy * (most - entropy.detach()).exp()).mean(), fresh if mean is None else 0.9 * mean + 0.1 * fresh


def by_hand(seen: list[Tensor], importance: Sequence[Tensor], beta: float = 0.0) -> tuple[list[Tensor], nn.Module]:
    net = twin()
    source = [p.detach().clone() for p in trained(net)]
    optimiser, mean, answers = torch.optim.Adam(trained(net), lr=1e-3), None, []
    for x in seen:
        logits = net(x)
        answers.append(logits.detach().softmax(1))
        loss, mean = eta_loss(logits, mean)
        for f, p, s in zip(importance, trained(net), source, strict=True):
            loss = loss + beta * (f * (p - s).square()).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return answers, net


def fisher_by_hand(seen: list[Tensor]) -> list[Tensor]:
    net = twin()
    found = []
    for x in seen:
        logits = net(x)
        gradients = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), trained(net))
        found.append([g.square() for g in gradients])
    return [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]


def test_eta_is_three_steps_by_hand_and_answers_before_each() -> None:
    answers, net = by_hand(batches(), FREE)
    going = undrift.stream(network(), batches(), method="eta", redundancy=NEW)
    for got, wanted in zip(going, answers, strict=True):
        torch.testing.assert_close(got.probs, wanted)
    assert going.report.steps == 3
    close(going.model, net)


def test_eata_adds_the_fisher_term() -> None:
    importance = fisher_by_hand([CLEAN[:8], CLEAN[8:16], CLEAN[16:]])
    answers, net = by_hand(batches(), importance, beta=500.0)
    going = undrift.stream(
        network(), batches(), method="eata", source=CLEAN, fisher_batch=8, beta=500.0, redundancy=NEW
    )
    (keeper,) = going.online.keepers
    assert isinstance(keeper, Fisher)
    for got, wanted in zip(keeper.importance.values(), importance, strict=True):
        torch.testing.assert_close(got, wanted)
    for got, wanted in zip(going, answers, strict=True):
        torch.testing.assert_close(got.probs, wanted)
    close(going.model, net)
    free = by_hand(batches(), FREE)[1]
    assert not all(torch.equal(a, b) for a, b in zip(trained(net), trained(free), strict=True))


def test_a_batch_without_a_reliable_image_makes_no_step() -> None:
    unsure = convnet().double()
    going = undrift.stream(unsure, batches(), method="eta", redundancy=NEW)
    before = [p.detach().clone() for p in trained(going.model)]
    assert [len(p) for p in going] == [12, 12, 12]
    assert (going.report.steps, going.report.missed) == (0, 3)
    assert all(torch.equal(p, b) for p, b in zip(trained(going.model), before, strict=True))
    assert going.online.likelihood.mean is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    [
        CLEAN,
        [CLEAN[:8], CLEAN[8:16], CLEAN[16:], CLEAN],
        DataLoader(TensorDataset(CLEAN, torch.zeros(20)), batch_size=8),
        TensorDomain("clean", CLEAN.clone(), None, None),
    ],
)
def test_source_images_come_in_any_form_and_no_more_are_taken_than_asked_for(source: object) -> None:
    keeper = Fisher(source, fisher_images=20, fisher_batch=8)
    model = undrift.perturb(network(), layers=(), norm_statistics="batch").train()
    with torch.no_grad():
        keeper.start(model)
    for got, wanted in zip(
        keeper.importance.values(), fisher_by_hand([CLEAN[:8], CLEAN[8:16], CLEAN[16:]]), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-3)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_source_images_have_to_be_given() -> None:
    with pytest.raises(undrift.OptionError, match=r"no source images.*source=….*--set source=FOLDER.*eta"):
        undrift.stream(network(), batches(), method="eata")
    with pytest.raises(undrift.DataError, match="source is a str"):
        undrift.stream(network(), batches(), method="eata", source="photos")
    with pytest.raises(undrift.DataError, match="no batch"):
        undrift.stream(network(), batches(), method="eata", source=[])
    with pytest.raises(undrift.OptionError, match="beta=-1"):
        undrift.stream(network(), batches(), method="eata", source=CLEAN, beta=-1)
    assert not methods.get("eata").source_free
    assert "Fisher" in methods.get("eata").needs
    assert methods.get("eta").source_free


def test_the_authors_values() -> None:
    assert methods.get("eta").build({}).likelihood.redundancy == 0.4
    assert methods.get("eta:cifar100").build({}).likelihood.redundancy == 0.1
    parts = methods.get("eata:imagenet").build({"source": CLEAN})
    assert parts.likelihood.redundancy == 0.05
    assert parts.keepers[0].beta == 2000  # type: ignore[attr-defined]
    options = parts.options
    assert (options.stream_optimiser, options.stream_lr, options.momentum) == ("sgd", 2.5e-4, 0.9)
    assert not options.nesterov
    assert methods.get("eata:imagenet").stream_batch == 64


def test_a_source_image_that_is_not_finite_is_skipped_and_counted() -> None:
    spoilt = CLEAN.clone()
    spoilt[3, 0, 0, 0], spoilt[17, 1] = float("nan"), float("inf")
    going = undrift.stream(network(), batches(), method="eata", source=spoilt, fisher_batch=8, redundancy=NEW)
    (keeper,) = going.online.keepers
    assert isinstance(keeper, Fisher)
    left = [torch.cat([CLEAN[:3], CLEAN[4:8]]), CLEAN[8:16], torch.cat([CLEAN[16:17], CLEAN[18:]])]
    for got, wanted in zip(keeper.importance.values(), fisher_by_hand(left), strict=True):
        torch.testing.assert_close(got, wanted)
    assert keeper.skipped == 2
    list(going)
    assert going.report.steps == 3
    # As many as are asked for, of those that count.
    first = Fisher([spoilt[:8], spoilt[8:]], fisher_images=8)
    first.start(undrift.perturb(network(), layers=(), norm_statistics="batch"))
    for got, wanted in zip(first.importance.values(), fisher_by_hand([left[0], CLEAN[8:9]]), strict=True):
        torch.testing.assert_close(got, wanted)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def test_a_source_without_a_finite_image_or_gradient_is_said() -> None:
    with pytest.raises(undrift.DataError, match=r"no finite image \(20 with NaN.*needs at least one.*Check"):
        undrift.stream(network(), batches(), method="eata", source=CLEAN * float("nan"))
    with pytest.raises(undrift.DataError, match=r"not finite in net.*needs finite ones.*Check"):
        undrift.stream(nn.Sequential(Root(), *network()), batches(), method="eata", source=-CLEAN)
