"""SHOT's pseudo-labels and loss, computed by hand."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, same, snapshot
from undrift import Step
from undrift.likelihood import Consistency, Information, Nrc, Shot


def domain(count: int = 12, batch: int = 5) -> list[tuple[Tensor, Tensor]]:
    x = images(count)
    return [(torch.arange(count)[i : i + batch], x[i : i + batch]) for i in range(0, count, batch)]


class Given(nn.Module):
    """A network whose features and probabilities are given; an image is its number."""

    def __init__(self, features: Tensor, probs: Tensor) -> None:
        super().__init__()
        self.features, self.logits, self.bottleneck = features, probs.log(), nn.Identity()
        self.place = nn.Parameter(torch.ones(()))  # says on which device the network is

    def forward(self, x: Tensor) -> Tensor:
        self.bottleneck(self.features[x.long().flatten()])
        return self.logits[x.long().flatten()]


def pseudo_labels(features: Tensor, probs: Tensor, **settings: int) -> Tensor:
    """Return the labels that SHOT takes from such features."""
    model, shot = undrift.perturb(Given(features, probs), layers=()), Shot(**settings)  # type: ignore[arg-type]
    places = torch.arange(len(features))
    shot.refresh(model, lambda: iter([(places, places[:, None].float())]))
    assert shot.labels is not None
    return shot.labels


def test_pseudo_labels_by_hand() -> None:
    """Four points on a line; the third is called 0 by the network, and lies with the class-1 points."""
    features = torch.tensor([[-4.0], [-3.0], [3.0], [4.0]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.1, 0.9]])
    # By hand, first round: f = (x, 1) / ‖(x, 1)‖, μ_c = Σ_i w_ic f_i / Σ_i w_ic, the largest cosine.
    f = [(x / math.hypot(x, 1), 1 / math.hypot(x, 1)) for x in (-4, -3, 3, 4)]
    mu = []
    for c in (0, 1):
        total = float(probs[:, c].sum())
        mu.append([sum(float(w) * fi[d] for w, fi in zip(probs[:, c], f, strict=True)) / total for d in (0, 1)])

    def cosine(a: tuple[float, float], b: list[float]) -> float:
        return (a[0] * b[0] + a[1] * b[1]) / math.hypot(*a) / math.hypot(*b)

    by_hand = [max((0, 1), key=lambda c: cosine(fi, mu[c])) for fi in f]
    assert by_hand == [0, 0, 1, 1]
    assert pseudo_labels(features, probs, rounds=1).tolist() == by_hand
    assert pseudo_labels(features, probs, rounds=2).tolist() == by_hand


def test_the_appended_one_tells_features_of_one_direction_apart() -> None:
    features = torch.tensor([[0.1], [0.2], [5.0], [6.0]])  # without it all four are the same unit vector
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.2, 0.8], [0.1, 0.9]])
    assert pseudo_labels(features, probs).tolist() == [0, 0, 1, 1]


def test_the_second_round_uses_hard_labels() -> None:
    torch.manual_seed(3)
    features, probs = torch.randn(40, 3), torch.randn(40, 4).softmax(1)
    first = pseudo_labels(features, probs, rounds=1)
    hard = nn.functional.one_hot(first, 4).float()
    # Round two is round one from one-hot weights, among the classes the network itself predicts.
    part = probs.argmax(1).bincount(minlength=4) > 0
    assert part.all()
    assert (hard.sum(0) > 0).all()
    assert torch.equal(pseudo_labels(features, probs, rounds=2), pseudo_labels(features, hard, rounds=1))
    assert not torch.equal(pseudo_labels(features, probs, rounds=2), first)


def test_classes_never_predicted_get_no_centroid() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    # Class 2 has mass, but is nobody's first choice; class 3 has none at all.
    probs = torch.tensor([[0.6, 0.0, 0.4, 0.0], [0.6, 0.0, 0.4, 0.0], [0.0, 0.6, 0.4, 0.0]])
    assert pseudo_labels(features, probs, rounds=5).tolist() == [0, 0, 1]
    # The threshold leaves out class 1, predicted once; one that nobody passes is no threshold.
    assert pseudo_labels(features, probs, least_count=1).tolist() == [0, 0, 0]
    assert pseudo_labels(features, probs, least_count=9).tolist() == [0, 0, 1]


def test_a_class_that_loses_its_images_does_not_come_back_as_nan() -> None:
    features = torch.tensor([[1.0], [1.0], [1.0], [-1.0]])
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.49, 0.51, 0.0], [0.0, 0.0, 1.0]])
    assert pseudo_labels(features, probs, rounds=4).tolist() == [0, 0, 0, 2]


def test_unsound_features_get_no_label() -> None:
    features = torch.tensor([[1.0], [float("nan")], [-1.0]])
    probs = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.1, 0.9]])
    assert pseudo_labels(features, probs).tolist() == [0, -1, 1]
    assert pseudo_labels(features[1:2], probs[1:2]).tolist() == [-1]


def test_the_loss_by_hand() -> None:
    model = undrift.perturb(convnet())
    z = torch.tensor([[math.log(3), 0.0], [0.0, 0.0], [1.0, 2.0]])
    shot = Shot(beta=0.3)
    shot.labels = torch.tensor([-1, 1, -1, 0])
    step = Step(model, images(3), model, indices=torch.tensor([3, 1, 2]))
    cross_entropy = (-math.log(0.75) - math.log(0.5)) / 2  # image 2 has no label
    torch.testing.assert_close(shot(z, step), Information()(z) + 0.3 * cross_entropy)
    nobody = Step(model, images(3), model, indices=torch.tensor([2, 2, 0]))
    torch.testing.assert_close(shot(z, nobody), Information()(z))


def test_refresh_labels_every_image_under_the_mean_network_and_changes_nothing() -> None:
    model = undrift.perturb(convnet().train(), exclude="8")
    before = snapshot(model.net)
    flags = [m.training for m in model.modules()]
    shot = Shot(features="7")
    shot.refresh(model, lambda: iter(domain()))
    assert same(model.net.state_dict(), before)
    assert [m.training for m in model.modules()] == flags
    assert not model.net[7]._forward_hooks
    assert shot.changed is None
    # Flatten's output is the input of the last linear layer, and the order of batches does not matter.
    other = Shot()
    other.refresh(model, lambda: iter(domain(batch=4)[::-1]))
    assert torch.equal(shot.labels, other.labels)
    with model.mean(), torch.no_grad():
        model.eval()
        features, probs = model.net[:8](images(12)), model(images(12)).softmax(1)
    assert torch.equal(shot.labels, pseudo_labels(features, probs))
    shot.labels = shot.labels.clone()
    shot.labels[:3] = (shot.labels[:3] + 1) % 5
    shot.refresh(model, lambda: iter(domain()))
    assert shot.changed == pytest.approx(3 / 12)


def looks(model: undrift.Perturbed) -> int:
    """Return how often a refresh passes over the domain."""
    calls: list[int] = []
    hook = model.net[0].register_forward_hook(lambda *_: calls.append(1))
    Shot().refresh(model, lambda: iter(domain()))
    hook.remove()
    return len(calls) // len(domain())


def test_after_noisy_steps_the_mean_network_has_statistics_of_its_own() -> None:
    net = convnet().eval()
    plain = copy.deepcopy(net)
    model = undrift.perturb(net, exclude="8", init_fraction=0.3)
    calls: list[bool] = []
    model.net[0].register_forward_hook(lambda *_: calls.append(model.key.noisy))
    shot = Shot()
    shot.refresh(model, lambda: iter(domain()))
    assert len(calls) == len(domain())  # they are the source's: one look
    going, step = undrift.stream(model, []), int(model.key.step)
    state = going.state_dict()
    model(images(12))
    kept, policy = snapshot(model.net), model.norms[0]
    calls.clear()
    shot.refresh(model, lambda: iter(domain()))
    assert calls == [False] * 2 * len(domain())
    assert same(model.net.state_dict(), kept)
    assert policy.statistics == "train"
    assert int(model.key.step) == step + 1  # the noise of the steps to come is what it would have been
    # By hand: the labels of the source's layers, whose only norm layer has the average of the batches' statistics.
    with torch.no_grad():
        found = [torch.var_mean(plain[0](x), dim=(0, 2, 3)) for _, x in domain()]
        plain[1].running_var, plain[1].running_mean = (torch.stack(of).mean(0) for of in zip(*found, strict=True))
        features, probs = plain[:8](images(12)), plain(images(12)).softmax(1)
    assert torch.equal(shot.labels, pseudo_labels(features, probs))  # type: ignore[arg-type]
    # Nobody sees what a compiled step does to statistics: it is looked up, each time until it is so.
    compiled = undrift.perturb(convnet().eval(), exclude="8")
    assert looks(compiled) == 1
    compiled.compile(backend="eager")
    compiled(images(12))
    assert looks(compiled) == 2
    # A state that is filled in tells by itself what its statistics are of; so does a network with nothing to draw.
    going.load_state_dict(state)
    assert looks(model) == 1
    nothing = undrift.perturb(convnet(), layers=())
    nothing(images(12))
    assert looks(nothing) == 1


def test_noise_too_small_to_matter_costs_no_second_look() -> None:
    model = undrift.perturb(convnet().eval(), init_fraction=1e-6)
    calls: list[bool] = []
    model(images(12))
    model.net[0].register_forward_hook(lambda *_: calls.append(model.key.noisy))
    Shot().refresh(model, lambda: iter(domain()))
    assert calls == [False] * len(domain())


def test_statistics_first_moves_them_once() -> None:
    model = undrift.perturb(convnet(), layers=())
    shot = Shot(statistics_first=True)
    shot.refresh(model, lambda: iter(domain()))
    # By hand: the norm layer's first input is the convolution of raw images.
    with torch.no_grad(), model.off():
        expected = torch.zeros(8)
        for _, x in domain():
            expected = torch.lerp(expected, model.net[0](x).mean((0, 2, 3)), 0.1)
    torch.testing.assert_close(model.net[1].running_mean, expected)
    kept = snapshot(model.net)
    shot.refresh(model, lambda: iter(domain()))
    assert same(model.net.state_dict(), kept)
    # A resumed run does not do it again; another network does.
    resumed = Shot(statistics_first=True)
    resumed.load_state_dict(shot.state_dict(), model)
    resumed.refresh(model, lambda: iter(domain()))
    assert same(model.net.state_dict(), kept)
    assert resumed.changed == 0
    other = undrift.perturb(convnet())
    resumed.refresh(other, lambda: iter(domain()))
    assert not torch.equal(other.net[1].running_mean, torch.zeros(8))


def test_statistics_that_cannot_move() -> None:
    with pytest.raises(undrift.OptionError, match=r'norm_statistics="source".*moving'):
        Shot(statistics_first=True).refresh(
            undrift.perturb(convnet(), norm_statistics="source"), lambda: iter(domain())
        )
    Shot(statistics_first=True).refresh(undrift.perturb(convnet(), norm_statistics="batch"), lambda: iter(domain()))


def test_features_are_stated_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bottleneck, self.idle = nn.Flatten(), nn.Linear(12, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.bottleneck(self.body(x))

    net, x = Net(), torch.rand(2, 3, 2, 2)
    for name, expected in ((None, net(x)), ("bottleneck", net(x)), ("body", x.flatten(1))):
        nrc = Nrc(neighbours=1, second_neighbours=1, late_neighbours=1, late_second_neighbours=1, features=name)
        nrc.refresh(undrift.perturb(copy.deepcopy(net), layers=()), lambda: iter([(torch.arange(2), x)]))
        torch.testing.assert_close(nrc.banks.features, nn.functional.normalize(expected, dim=1))
    with pytest.raises(undrift.OptionError, match=r"'bottelneck' names no submodule \(did you mean 'bottleneck'\?\)"):
        Shot(features="bottelneck").refresh(undrift.perturb(Net()), lambda: iter([(torch.arange(2), x)]))
    with pytest.raises(undrift.OptionError, match="never called"):
        Shot(features="idle").refresh(undrift.perturb(Net()), lambda: iter([(torch.arange(2), x)]))
    nameless = undrift.perturb(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), layers=())
    with pytest.raises(undrift.OptionError, match=r"neither.*Name one"):
        Shot().refresh(nameless, lambda: iter([(torch.arange(2), x)]))


def test_consistency_carries_the_state_of_its_base() -> None:
    model = undrift.perturb(convnet())
    both = Consistency(1.0, Shot(statistics_first=True))
    both.refresh(model, lambda: iter(domain()))
    resumed = Consistency(1.0, Shot(statistics_first=True))
    resumed.load_state_dict(both.state_dict(), model)
    assert torch.equal(resumed.base.labels, both.base.labels)
    assert repr(resumed) == repr(both)
    assert repr(Shot(rounds=3)) != repr(Shot())
    assert Consistency().state_dict() == {}
    Consistency().load_state_dict({}, model)


def test_misuse_is_named() -> None:
    model = undrift.perturb(convnet())
    with pytest.raises(undrift.OptionError, match=r"undrift\.adapt.*Information"):
        Shot()(torch.zeros(2, 5), Step(model, images(2), model))
    with pytest.raises(undrift.DataError, match="no batch"):
        Shot().refresh(model, lambda: iter(()))
    with pytest.raises(undrift.OptionError, match="beta=-1"):
        Shot(beta=-1)
