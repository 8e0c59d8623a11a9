"""SAR: a step by hand with its climb, what stays still, and the recovery from a collapse."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import undrift
from online_support import batches, close, entropies, network, trained, twin
from support import images, same, snapshot
from undrift import methods
from undrift.keep import Recovery, Still

MOST = 0.4 * math.log(5)


def by_hand(seen: list[Tensor]) -> tuple[list[Tensor], nn.Module]:
    """SAM with SGD, momentum 0.9, over reliable images; the second pass over those still reliable."""
    net = twin()
    optimiser, answers = torch.optim.SGD(trained(net), lr=1e-3, momentum=0.9), []
    for x in seen:
        logits = net(x)
        answers.append(logits.detach().softmax(1))
        first = entropies(logits).detach() < MOST
        optimiser.zero_grad()
        entropies(logits)[first].mean().backward()
        norm = torch.stack([p.grad.norm() for p in trained(net)]).norm()  # type: ignore[union-attr]
        up = [0.05 * p.grad / norm for p in trained(net)]  # type: ignore[operator]
        with torch.no_grad():
            for p, d in zip(trained(net), up, strict=True):
                p += d
        second = entropies(net(x))
        optimiser.zero_grad()
        second[first & (second.detach() < MOST)].mean().backward()
        with torch.no_grad():
            for p, d in zip(trained(net), up, strict=True):
                p -= d
        optimiser.step()
    return answers, net


def test_sar_is_three_steps_by_hand_and_answers_with_the_first_logits() -> None:
    answers, net = by_hand(batches())
    going = undrift.stream(network(), batches(), method="sar")
    for got, wanted in zip(going, answers, strict=True):
        torch.testing.assert_close(got.probs, wanted)
    assert (going.report.steps, going.report.resets) == (3, 0)
    close(going.model, net)


class Staged(nn.Module):
    """A network with stages that have a ResNet's names, the last of them behind a wrapper."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        torch.manual_seed(0)
        of = (lambda: nn.GroupNorm(2, 4)) if norm is nn.GroupNorm else (lambda: norm(4))
        self.layer1 = nn.Sequential(nn.Conv2d(3, 4, 3), of(), nn.ReLU())
        self.layer4 = nn.Sequential(nn.Conv2d(4, 4, 3), of(), nn.ReLU())
        self.fc = nn.Linear(4, 3)
        with torch.no_grad():
            self.fc.weight *= 20

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer4(self.layer1(x)).mean((2, 3)))


def test_the_last_stage_keeps_its_affine_and_still_sees_batch_statistics() -> None:
    net = Staged()
    going = undrift.stream(net, [images(16)] * 2, method="sar", margin=10.0, stream_lr=0.1)
    inner = going.model.net
    before = {n: p.detach().clone() for n, p in inner.named_parameters()}
    list(going)
    changed = {n for n, p in inner.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"layer1.1.weight", "layer1.1.bias"}
    # Its statistics are the batch's all the same: another shift of the input leaves the answer alone.
    shifted = net.layer4[1]
    assert next(p for p in going.model.norms if p.layer is shifted).statistics == "batch"
    everything = undrift.stream(Staged(), [images(16)], method="sar", margin=10.0, still=(), stream_lr=0.1)
    twin_before = everything.model.net.layer4[1].weight.detach().clone()  # type: ignore[union-attr, index]
    list(everything)
    assert not torch.equal(everything.model.net.layer4[1].weight, twin_before)  # type: ignore[union-attr, index]


class Blocks(nn.Module):
    """A network with a transformer's names: blocks with two norm layers each, and one more before the classifier."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        norms = (OrderedDict((name, nn.LayerNorm(4)) for name in ("norm1", "norm2")) for _ in range(count))
        self.blocks = nn.Sequential(*map(nn.Sequential, norms))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x.mean((2, 3))))))


@pytest.mark.filterwarnings("ignore:.*no norm layer that has them:undrift.UndriftWarning")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_transformers_last_blocks_and_its_own_norm_layer_stay_still(wrapped: bool) -> None:
    net = nn.Sequential(nn.Identity(), Blocks(13)) if wrapped else Blocks(13)
    going = undrift.stream(net, [images(16)], method="sar", margin=10.0)
    moving = {n for n, p in going.model.net.named_parameters() if p.requires_grad}
    before = "1." if wrapped else ""
    # As its authors' code: 9, 10 and 11 of however many, and `norm` where that is the whole name.
    expected = {f"{before}blocks.{n}.norm{k}" for n in (*range(9), 12) for k in (1, 2)}
    expected |= {"1.norm"} if wrapped else set()
    assert {name.rpartition(".")[0] for name in moving} == expected


def test_a_network_of_which_all_stays_still_is_told() -> None:
    """The authors' "norm" is a ViT's last layer; a network may call its only one so."""
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "pool": nn.AdaptiveAvgPool2d(1)}
    net = nn.Sequential(OrderedDict(parts | {"flat": nn.Flatten(), "fc": nn.Linear(4, 3)}))
    with pytest.warns(undrift.UndriftWarning, match=r"all that would be trained \(2 tensors\).*still=\(\)"):
        undrift.stream(net.eval(), [images(8)], method="sar")


def test_what_stays_still_takes_no_part_in_the_climb() -> None:
    steps = []
    for keepers in ([Still("layer4")], []):
        model = undrift.perturb(Staged(), layers=(), norm_statistics="batch", climb=0.05, stream_optimiser="sgd")
        list(undrift.stream(model, [images(16)], answer="before", lr=0.1, keepers=keepers))
        steps.append(model.net.layer1[1].weight.detach())  # type: ignore[union-attr, index]
    assert not torch.equal(*steps)  # one norm over all that climbs
    model = undrift.perturb(Staged(), layers=(), norm_statistics="batch")
    with pytest.warns(undrift.UndriftWarning, match="names all that would be trained"):
        s = undrift.stream(model, [images(16)], answer="before", keepers=[Still("*")])
    list(s)
    assert s.report.steps == 0


@pytest.mark.filterwarnings("ignore:.*no norm layer that has them:undrift.UndriftWarning")
@pytest.mark.parametrize("norm", [nn.GroupNorm, nn.InstanceNorm2d])
def test_other_norm_layers(norm: type[nn.Module]) -> None:
    going = undrift.stream(Staged(norm), [images(16), images(1)], method="sar", margin=10.0)
    assert [len(p) for p in going] == [16, 1]
    assert going.report.steps == (2 if norm is nn.GroupNorm else 0)  # that one has no affine


def test_recovery_by_hand_clears_its_mean_and_keeps_the_momentum() -> None:
    net = network()
    source = [net[n].weight.detach().clone() for n in (1, 4)]  # type: ignore[index]
    losses: list[float] = []
    going = undrift.stream(net, batches() * 2, method="sar", stream_lr=0.05)
    recovery = next(k for k in going.online.keepers if isinstance(k, Recovery))
    mean: float | None = None
    resets = 0
    for _ in going:
        losses.append(going.latest["likelihood"])
        mean = losses[-1] if mean is None else 0.9 * mean + 0.1 * losses[-1]
        at_source = all(torch.equal(going.model.net[n].weight, s) for n, s in zip((1, 4), source, strict=True))  # type: ignore[index]
        assert at_source == (mean < 0.2)
        if mean < 0.2:
            mean, resets = None, resets + 1
        assert recovery.mean == (None if mean is None else pytest.approx(mean))
    assert 0 < resets < 6
    assert going.report.resets == resets
    assert "recovered, mean loss below 0.2" in str(going.report)
    assert going.online.optimiser.state  # momentum goes on


def test_a_reset_forgets_the_mean_loss_and_the_momentum() -> None:
    net = network()
    source = snapshot(net)
    going = undrift.stream(net, batches(), method="sar", recover_below=0.0)
    recovery = next(k for k in going.online.keepers if isinstance(k, Recovery))
    list(going)
    assert recovery.mean is not None
    assert going.online.optimiser.state
    assert not same(snapshot(net), source)
    going.online.reset()
    assert recovery.mean is None
    assert not going.online.optimiser.state
    assert same(snapshot(net), source)


def test_nothing_reliable_makes_no_step() -> None:
    going = undrift.stream(network(), batches(), method="sar", margin=1e-6)
    list(going)
    assert (going.report.steps, going.report.missed) == (0, 3)


def test_the_authors_values() -> None:
    options = methods.get("sar").build({}).options
    assert (options.stream_optimiser, options.stream_lr, options.momentum, options.nesterov) == (
        "sgd",
        1e-3,
        0.9,
        False,
    )
    assert options.climb == 0.05
    imagenet = methods.get("sar:imagenet")
    assert (imagenet.options.stream_lr, imagenet.stream_batch) == (2.5e-4, 64)
    with pytest.raises(undrift.OptionError, match="recovery_rate=1"):
        Recovery(recovery_rate=1)
