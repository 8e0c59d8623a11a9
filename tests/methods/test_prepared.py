"""BACS and TTT: what changes, what stays bit for bit, their losses by hand, and their order of operations."""

import copy
import io
import math
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from support import images, same, snapshot
from undrift import methods, zoo
from undrift._types import Step
from undrift.data import TensorDomain
from undrift.keep import Moments, Posterior
from undrift.likelihood import Rotation
from undrift.likelihood.rotation import crops, rotated
from undrift.likelihood.second_head import After, find_split, rotation_head
from undrift.prediction import Prediction
from undrift.together import mean_prediction, together
from undrift.train import TrainOptions, collect_moments, train_rotation
from undrift.train._rotation import WithRotation
from undrift.train._schedule import factor

UNTRAINED = "untrained"


class Small(nn.Module):
    """A shared part of two modules, and a classifier behind functional operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.layer2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.layer2(x))).mean((2, 3)))

    def shared(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.norm1(self.conv1(x))))


SHARED = ("conv1", "norm1", "layer2")


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def trained_head(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return rotation_head(net)


# BACS: the posterior ---------------------------------------------------------------------------------------------


def test_moments_are_mean_and_variance_of_the_iterates(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    moments = Moments(net)
    seen = []
    for seed in range(4):
        torch.manual_seed(seed)
        net.reset_parameters()
        moments.add(net)
        seen.append(net.weight.detach().double())
    every = torch.stack(seen)
    torch.testing.assert_close(moments.mean["weight"], every.mean(0))
    torch.testing.assert_close(moments.variance()["weight"], every.square().mean(0) - every.mean(0).square())
    moments.save(tmp_path / "posterior.safetensors")
    model = undrift.perturb(net, methods.get("bacs").options)
    Posterior(str(tmp_path / "posterior.safetensors")).start(model)
    torch.testing.assert_close(model.net.weight.double(), every.mean(0), atol=1e-6, rtol=1e-6)


def test_one_iterate_has_no_variance_and_another_network_no_place() -> None:
    moments = Moments(nn.Linear(3, 2))
    moments.add(nn.Linear(3, 2))
    with pytest.raises(undrift.OptionError, match="1 iterates; a variance needs at least two"):
        moments.variance()
    with pytest.raises(undrift.PerturbationMismatch, match="differs in weight"):
        moments.add(nn.Linear(4, 2))
    with pytest.raises(undrift.OptionError, match="posterior is a int"):
        Posterior(3)
    with pytest.raises(undrift.DataError, match="cannot be read"):
        Posterior("nowhere.safetensors")


def test_the_penalty_by_hand() -> None:
    net = nn.Linear(2, 2)
    mean = {"weight": torch.full((2, 2), 0.5), "bias": torch.full((2,), 0.5)}
    var = {name: torch.full_like(value, 0.25) for name, value in mean.items()}
    keeper = Posterior({"mean": mean, "var": var}, posterior_weight=2.0, floor=0.25)
    model = undrift.perturb(net, methods.get("bacs").options)
    keeper.start(model)
    assert keeper.penalty(model) == 0  # it starts at the mean
    with torch.no_grad():
        for parameter in (model.net.weight, model.net.bias):
            parameter += 1
    assert float(keeper.penalty(model).detach()) == pytest.approx(2 * 0.5 * 6 / (0.25 + 0.25))


def test_two_steps_of_bacs_by_hand() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    mean = {"1.weight": torch.randn(3, 12) * 0.1, "1.bias": torch.zeros(3)}
    var = {name: torch.full_like(value, 0.5) for name, value in mean.items()}
    batches = [torch.rand(4, 3, 2, 2), torch.rand(4, 3, 2, 2)]
    settings = {
        "stream_optimiser": "sgd",
        "momentum": 0.0,
        "stream_lr": 0.1,
        "alpha": 2.0,
        "posterior_weight": 3.0,
        "floor": 0.1,
    }
    going = undrift.stream(net, batches, method="bacs", posterior={"mean": mean, "var": var}, **settings)
    answers = list(going)
    weight, bias = (value.clone().requires_grad_() for value in mean.values())
    for batch, answer in zip(batches, answers, strict=True):
        logits = batch.flatten(1) @ weight.T + bias
        torch.testing.assert_close(answer.probs, logits.softmax(1))  # from before the step, from μ on
        loss = 2.0 * undrift.entropy(logits)
        for value, centre in zip((weight, bias), mean.values(), strict=True):
            loss = loss + 3.0 * 0.5 * ((value - centre) ** 2 / (0.5 + 0.1)).sum()
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for value, gradient in zip((weight, bias), gradients, strict=True):
                value -= 0.1 * gradient
    torch.testing.assert_close(going.model.net[1].weight, weight, check_stride=False)


def test_bacs_changes_all_weights_and_says_that_its_posterior_is_untrained() -> None:
    net = small()
    before = snapshot(net)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, [images(4)], method="bacs")
    assert same(before, snapshot(net))  # its mean is the source
    list(going)
    after = snapshot(going.model.net)
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert still == []
    assert same(before, snapshot(going.remove()))
    row = methods.get("bacs")
    assert (row.source_free, row.ensemble, row.uncertainty) == (False, True, True)
    assert "posterior" in row.needs


def test_an_untrained_posterior_has_a_fraction_of_each_kernels_variance() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6 * 49, 2))
    model = undrift.perturb(net, methods.get("bacs").options)
    keeper = Posterior(fraction=0.5, posterior_weight=2.0)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        keeper.start(model)
    with torch.no_grad():
        model.net[0].weight[1] += 0.1
    with model.off() as source:
        wanted = 27 * 0.1**2 / (0.5 * source[0].weight[1].var(correction=0) + 1e-6)
    torch.testing.assert_close(keeper.penalty(model).detach(), wanted, rtol=1e-4, atol=1e-6)


def test_bacs_starts_at_its_mean_and_resets_to_it() -> None:
    net = small()
    mean = {name: value + 0.1 for name, value in net.named_parameters()}
    posterior = {"mean": mean, "var": {name: torch.ones_like(value) for name, value in mean.items()}}
    going = undrift.stream(net, [images(4)], method="bacs", posterior=posterior)
    list(going)
    assert not torch.equal(going.model.net.fc.weight, mean["fc.weight"])
    going.online.reset()
    assert torch.equal(going.model.net.fc.weight, mean["fc.weight"])


def test_moments_of_further_source_epochs() -> None:
    images_, labels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8), torch.arange(12) % 5
    domain = TensorDomain("source", images_, labels)
    net = small()
    before = snapshot(net)
    options = TrainOptions(epochs=3, batch_size=4, lr=0.01, schedule="constant", held_out=0)
    moments = collect_moments(net, domain, options, device="cpu")
    assert moments.count == 2
    assert same(before, snapshot(net))
    assert all(float(var.max()) > 0 for name, var in moments.variance().items() if name.endswith("weight"))
    list(undrift.stream(net, [images(4)], method="bacs", posterior=moments))  # fits, and no warning


def test_members_answer_together() -> None:
    one, two = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    both = mean_prediction([Prediction.of(one), Prediction.of(two)])
    torch.testing.assert_close(both.probs, torch.full((2, 2), 0.5))
    inner = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    torch.testing.assert_close(both.mutual_info, torch.tensor([math.log(2) - inner, 0.0]), atol=1e-6, rtol=0)
    half = mean_prediction([Prediction.of(one), Prediction.unknown(2, two)])
    torch.testing.assert_close(half.probs, one)
    none = mean_prediction([Prediction.unknown(2, one), Prediction.unknown(2, two)])
    assert none.label.tolist() == [-1, -1]
    batches = list(images(4).split(2))
    streams = [undrift.stream(small(seed), batches, method="source") for seed in (0, 1)]
    answers = list(together(streams))
    wanted = (small(0)(images(4)).softmax(1) + small(1)(images(4)).softmax(1)) / 2
    torch.testing.assert_close(torch.cat([p.probs for p in answers]), wanted)


# TTT: views, head, steps ------------------------------------------------------------------------------------------


def test_views_are_turned_and_cut_as_said() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    turned = rotated(image.repeat(4, 1, 1, 1), torch.arange(4))[:, 0].flatten(1)
    assert turned.tolist() == [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(crops(image, 0, False, torch.zeros(1, 1, 1, 1), generator), image)
    cut = crops(image.repeat(200, 1, 1, 1), 1, True, torch.full((1, 1, 1, 1), -1.0), generator)
    padded = F.pad(image, (1,) * 4, value=-1.0)
    windows = {tuple(padded[0, 0, y : y + 2, x : x + 2].flatten().tolist()) for y in range(3) for x in range(3)}
    mirrored = {(b, a, d, c) for a, b, c, d in windows}
    assert {tuple(view.flatten().tolist()) for view in cut} == windows | mirrored


def test_what_comes_after_the_split_is_the_networks_own() -> None:
    net = small()
    x = images()
    assert torch.equal(After(net, "layer2")(net.shared(x)), net(x))
    assert {n.split(".")[1] for n, _ in After(net, "layer2").named_parameters()} == {"norm2", "fc"}
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(144, 3))
    assert torch.equal(After(nested, "0.0")(nested[0][0](x)), nested(x))
    assert find_split(nested, None) == "0"
    with pytest.raises(undrift.OptionError, match=r"split='layer3' names no submodule \(did you mean 'layer2'"):
        find_split(net, "layer3")
    with pytest.raises(undrift.OptionError, match="leaves no linear layer"):
        rotation_head(net, "fc")


def test_ttts_network_shares_two_stages_of_three() -> None:
    net = zoo.resnet26_gn()
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == 26
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {8}
    head = rotation_head(net)
    assert {name.split(".")[1] for name, _ in head.named_parameters()} == {"layer3", "norm", "fc"}
    assert head(torch.rand(2, 32, 16, 16)).shape == (2, 4)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(After(net, "layer2")(net.layer2(net.layer1(net.conv1(x)))), net(x))


class Fixed(nn.Module):
    """A head that says the same of every view."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, features: Tensor) -> Tensor:
        return self.logits + 0 * features.flatten(1).sum(1, keepdim=True)


def test_the_loss_by_hand() -> None:
    model = undrift.perturb(small(), methods.get("ttt").options)
    for logits, of_zero, of_other in (((0.0,) * 4, math.log(4), math.log(4)), ((50.0, 0, 0, 0), 0.0, 50.0)):
        asked = Rotation(head=Fixed(*logits), views=16)
        step = Step(model, images(1), lambda x: model(x))
        with asked.watch(model):
            loss = asked(torch.zeros(1, 5), step)
        generator = torch.Generator().manual_seed(0)
        crops(images(1).repeat(16, 1, 1, 1), 4, True, torch.zeros(1, 3, 1, 1), generator)
        turns = torch.randint(4, (16,), generator=generator)
        upright = int((turns == 0).sum())
        assert 0 < upright < 16
        assert float(loss.detach()) == pytest.approx((upright * of_zero + (16 - upright) * of_other) / 16, rel=1e-5)
    with pytest.raises(undrift.DataError, match="needs square"):
        Rotation()(torch.zeros(1, 5), Step(model, torch.rand(1, 3, 8, 6), lambda x: model(x)))


def by_hand(net: Small, head: nn.Module, image: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Make TTT's steps on one image in place, and return the answer to the image as it is."""
    parameters = [p for name in SHARED for p in getattr(net, name).parameters()] + list(head.parameters())
    for _ in range(steps):
        views = crops(image.repeat(8, 1, 1, 1), 4, True, torch.zeros(1, 3, 1, 1), generator)
        turns = torch.randint(4, (8,), generator=generator)
        loss = F.cross_entropy(head(net.shared(rotated(views, turns))), turns)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.05 * gradient
    return net(image).softmax(1).detach()


def test_online_ttt_is_one_step_an_image_and_then_the_answer() -> None:
    net, x = small(), images(4)
    head = trained_head(net)
    mine, my_head = copy.deepcopy(net), copy.deepcopy(head)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.cat([by_hand(mine, my_head, image[None], 1, generator) for image in x])
    going = undrift.stream(net, x.split(2), method="ttt", head=head, views=8, stream_lr=0.05)
    found = torch.cat([p.probs for p in going])
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, small()(x).softmax(1), atol=1e-4)  # the steps did something
    assert going.report.steps == 4
    for name, value in my_head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value)


def test_standard_ttt_reloads_and_makes_ten_steps_for_each_image() -> None:
    net, x = small(), images(3)
    head = trained_head(net)
    wanted = []
    for image in x:
        mine, my_head = copy.deepcopy(net), copy.deepcopy(head)
        wanted.append(by_hand(mine, my_head, image[None], 10, torch.Generator().manual_seed(0)))
    going = undrift.stream(net, [x], method="ttt:standard", head=head, views=8, stream_lr=0.05)
    torch.testing.assert_close(next(going).probs, torch.cat(wanted))
    assert going.report.steps == 30


def test_ttt_leaves_all_that_is_not_shared_bit_for_bit() -> None:
    net = small()
    before = snapshot(net)
    going = undrift.stream(net, [images(4)], method="ttt", head=trained_head(net), views=4, stream_lr=0.1)
    list(going)
    after = snapshot(going.model.net)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == set(SHARED)
    assert same(before, snapshot(going.remove()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_an_untrained_head_is_attached_with_a_warning_and_trained_along() -> None:
    net = small()
    torch.manual_seed(0)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, [images(2), images(2, 1)], method="ttt:standard", views=4, stream_lr=0.1)
    head = going.online.likelihood.head
    start = snapshot(head)
    assert start["rest.fc.weight"].shape == (4, 8)
    next(going)
    assert not torch.equal(snapshot(head)["rest.fc.weight"], start["rest.fc.weight"])
    going.online.reset()
    assert same(start, snapshot(head))


@pytest.mark.parametrize("variant", ["ttt", "ttt:standard"])
def test_an_interrupted_stream_goes_on_with_its_head_and_its_views(variant: str) -> None:
    def start(batches: list[Tensor]) -> undrift.Stream:
        return undrift.stream(small(), batches, method=variant, head=trained_head(small()), views=4, stream_lr=0.1)

    batches = list(images(6).split(2))
    whole = [p.probs for p in start(batches)]
    first = start(batches[:2])
    assert all(torch.equal(p.probs, wanted) for p, wanted in zip(first, whole, strict=False))
    content = io.BytesIO()
    torch.save(first.state_dict(), content)
    content.seek(0)
    second = start(batches[2:])
    second.load_state_dict(torch.load(content, weights_only=True))
    assert torch.equal(next(second).probs, whole[2])


def test_source_training_with_the_rotation_loss(tmp_path: Path) -> None:
    assert [factor("steps", p) for p in (0.49, 0.5, 0.9)] == pytest.approx([1, 0.1, 0.01])
    both = WithRotation(small())
    both.head = Fixed(9.0, 0, 0, 0)
    wanted = (math.log(math.exp(9) + 3) * 4 - 9) / 4  # one of the four rotations is the one it says
    assert float(both.more_loss(images(2)).detach()) == pytest.approx(wanted, rel=1e-5)

    pixels, labels = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 2
    domain = TensorDomain("source", pixels, labels, ("a", "b"))
    options = TrainOptions(network="resnet26_gn", epochs=1, batch_size=4, held_out=0, schedule="steps", lr=0.1)
    out = tmp_path / "ttt.safetensors"
    trained = train_rotation(domain, out, options, device="cpu", progress=False)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["ttt.head.safetensors", "ttt.safetensors"]
    net, header = undrift.train.load_source(out)
    assert (header.network, header.class_names) == ("resnet26_gn", ("a", "b"))
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(net(x), trained.network(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the head is trained, and nobody warns
        going = undrift.stream(net, [x], method="ttt", head=tmp_path / "ttt.head.safetensors", views=2)
        next(going)
    with pytest.raises(undrift.OptionError, match="is there already"):
        train_rotation(domain, out, options)


class Wrapped(nn.Module):
    """A network that says its logits in some other way than as a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, inner = how, small()
        self.conv1, self.norm1, self.layer2 = inner.conv1, inner.norm1, inner.layer2
        self.norm2, self.fc = inner.norm2, inner.fc

    def forward(self, x: Tensor) -> Any:
        logits = Small.forward(self, x)  # type: ignore[arg-type]
        if self.how == "dict":
            return {"features": x, "logits": logits}
        return (logits, x) if self.how == "tuple" else SimpleNamespace(logits=logits)


def after_ttt(net: nn.Module, **settings: Any) -> Tensor:
    torch.manual_seed(3)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, images(4).split(2), method="ttt", views=4, stream_lr=0.05, **settings)
    return torch.cat([p.probs for p in going])


@pytest.mark.parametrize("how", ["dict", "tuple", "object"])
def test_ttt_takes_logits_however_the_network_says_them(how: str) -> None:
    assert torch.equal(after_ttt(Wrapped(how)), after_ttt(small()))
    both = WithRotation(Wrapped(how))
    assert both.more_loss(images(2)).isfinite()


@pytest.mark.parametrize("part", ["all", "stem"])
def test_ttt_looks_through_torch_compile(part: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        rest = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
        return nn.Sequential(OrderedDict(stem=first, middle=nn.Conv2d(4, 4, 3), rest=rest)).eval()

    for split in (None, "stem.0"):
        other = net()
        if part == "all":
            other = torch.compile(other, backend="eager")
        else:
            other.stem = torch.compile(other.stem, backend="eager")
        assert find_split(other, None) == find_split(net(), None) == "middle"
        assert torch.equal(after_ttt(other, split=split), after_ttt(net(), split=split))
        torch._dynamo.reset()


class Normalising(Small):
    """A network that normalises its images by itself, in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - torch.full((3, 1, 1), 0.5)) / 0.25)


class Tokens(Small):
    """A network that asks for more dimensions than its shared features have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * x.sum(3, keepdim=True))


def test_what_cannot_run_behind_the_split_by_itself_is_said() -> None:
    with pytest.raises(
        undrift.OptionError, match=r"'layer2' cannot be run by itself \(RuntimeError.*nn\.Module.*head="
    ):
        after_ttt(Normalising().eval())
    with pytest.raises(undrift.OptionError, match=r"cannot be run by itself \(IndexError.*needed: .*shape \(2, 8\)"):
        After(Tokens(), "layer2")(torch.rand(2, 8))
    net = Normalising().eval()
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 4))
    list(undrift.stream(net, [images(2)], method="ttt", head=head, views=2))  # a head of one's own will do
