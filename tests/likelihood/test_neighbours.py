"""NRC, AaD and G-SFDA's losses, banks and order of operations, by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift import Step
from undrift.likelihood import Aad, Gsfda, Nrc


class Plane(nn.Module):
    """The image is a point of the plane: its features, and after a fixed map its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bottleneck, self.fc = nn.Identity(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.bottleneck(x))
        return logits


def model() -> undrift.Perturbed:
    torch.manual_seed(1)
    return undrift.perturb(Plane(), layers=(), train="*", norm_affine=False)


def directions(*degrees: float) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([angles.cos(), angles.sin()], 1).float()


# Six points on the circle, longer than 1 so that they have to be normalised.
POINTS = 3 * directions(0, 10, 25, 90, 100, 115)


def ready(likelihood: Any, net: undrift.Perturbed, points: Tensor = POINTS) -> Any:
    likelihood.refresh(net, lambda: iter([(torch.arange(len(points)), points)]))
    return likelihood


def ask(likelihood: Any, net: undrift.Perturbed, places: list[int], points: Tensor, progress: float = 0.0) -> Tensor:
    with likelihood.watch(net):
        logits = net(points)
        loss: Tensor = likelihood(logits, Step(net, points, net, torch.tensor(places), progress))
    return loss


def order(features: Tensor, query: Tensor) -> list[int]:
    """Return who is nearest to a query, by plain arithmetic."""
    cosine = [float(query @ f) / float(query.norm() * f.norm()) for f in features]
    return sorted(range(len(features)), key=lambda i: -cosine[i])


def diversity(p: Tensor) -> float:
    return sum(float(m) * math.log(float(m) + 1e-5) for m in p.mean(0))


@pytest.mark.parametrize(("progress", "k", "m"), [(0.0, 2, 1), (0.5, 2, 1), (0.51, 3, 2)])
def test_nrc_by_hand(progress: float, k: int, m: int) -> None:
    net = model()
    nrc = ready(Nrc(neighbours=2, second_neighbours=1, late_neighbours=3, late_second_neighbours=2), net)
    moved = 2 * directions(80, 20)  # images 0 and 4 now look elsewhere
    bank = POINTS.clone()
    bank[[0, 4]] = moved
    s = net(bank).softmax(1).detach()
    p = net(moved).softmax(1).detach()
    total = 0.0
    for row, place in enumerate((0, 4)):
        near = order(bank, moved[row])
        assert near[0] == place  # the batch was written before the search: each is its own nearest
        for other in near[1 : k + 1]:
            second = order(bank, bank[other])[1 : m + 1]
            weight = 1.0 if place in second else 0.1
            total -= weight * float(p[row] @ s[other]) + sum(0.1 * float(p[row] @ s[far]) for far in second)
    loss = ask(nrc, net, [0, 4], moved, progress)
    assert loss.item() == pytest.approx(total / 2 + diversity(p), rel=1e-5)
    assert torch.allclose(nrc.banks.features[[0, 4]], moved / 2)
    assert torch.allclose(nrc.banks.probs[[0, 4]], p)


@pytest.mark.parametrize(("progress", "k"), [(0.0, 3), (0.6, 2)])
def test_aad_by_hand(progress: float, k: int) -> None:
    net = model()
    aad = ready(Aad(neighbours=3, late_neighbours=2, alpha=0.7, alpha_decay=2), net)
    moved = 2 * directions(80, 20, 30)
    bank = POINTS.clone()
    bank[[0, 4, 5]] = moved
    s, p = net(bank).softmax(1).detach(), net(moved).softmax(1).detach()
    attraction = -sum(float(p[row] @ s[o]) for row in range(3) for o in order(bank, moved[row])[1 : k + 1]) / 3
    dispersion = sum(float(p[i] @ p[j]) for i in range(3) for j in range(3) if i != j) / 3
    alpha = 0.7 * (1 + 10 * progress) ** -2
    assert ask(aad, net, [0, 4, 5], moved, progress).item() == pytest.approx(attraction + alpha * dispersion, rel=1e-5)


def test_aad_disperses_with_a_gradient_through_both_factors() -> None:
    net = model()
    aad = ready(Aad(neighbours=1, late_neighbours=None), net)
    z = torch.tensor([[1.0, 0.0], [0.3, 0.2]], requires_grad=True)
    with aad.watch(net):
        net(POINTS[:2])
        loss = aad(z, Step(net, POINTS[:2], net, torch.tensor([0, 1])))
    p = z.softmax(1)
    s = aad.banks.probs[[1, 0]]  # with K = 1 they are each other's nearest
    by_hand = -(p * s).sum(1).mean() + p[0] @ p[1]
    expected = torch.autograd.grad(by_hand, z)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0], expected)


def test_class_balance_has_the_gradient_of_its_formula() -> None:
    net, points = model(), directions(0, 10, 15, 100, 90, 85)  # the nearest of 0 is 1, whose nearest is 2
    one = {"neighbours": 1, "second_neighbours": 1, "late_neighbours": None, "late_second_neighbours": None}
    alone = Nrc(**one, one_sided=0.0, ring=0.0)  # type: ignore[arg-type]
    z = torch.tensor([[0.7, 0.3], [0.6, 0.4]]).log().requires_grad_()
    with ready(alone, net, points).watch(net):
        net(points[[0, 3]])
        loss = alone(z, Step(net, points[[0, 3]], net, torch.tensor([0, 3])))
    p, mean, e = z.softmax(1), torch.tensor([0.65, 0.35]), 1e-5
    by_hand = ((mean + e).log() + mean / (mean + e)) / 2  # each image is half of the mean
    torch.testing.assert_close(loss, (mean * (mean + e).log()).sum())
    expected = torch.autograd.grad(p, z, by_hand.expand(2, 2))[0]
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0], expected)


def test_gsfda_by_hand_searches_before_it_writes() -> None:
    net = model()
    gsfda = Gsfda(neighbours=2)
    with pytest.warns(undrift.UndriftWarning, match="no feature masks"):
        ready(gsfda, net)
    masks = gsfda.attached
    assert masks is not None
    with torch.no_grad():
        masks.embedding.copy_(torch.tensor([[0.01, 0.02], [0.0, 0.0]]))  # the target's: sigmoid(1), sigmoid(2)
    gsfda._network = None  # the masks were changed by hand: look again
    ready(gsfda, net)
    mask = torch.sigmoid(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(gsfda.banks.features, nn.functional.normalize(POINTS * mask, dim=1))
    moved = 2 * directions(80, 20)
    s, p = net.net.fc(POINTS * mask).softmax(1).detach(), net.net.fc(moved * mask).softmax(1).detach()
    total = 0.0
    for row in range(2):
        for other in order(POINTS * mask, moved[row] * mask)[:2]:  # among the old rows, and nobody is dropped
            total -= math.log(float(p[row] @ s[other]))
    assert ask(gsfda, net, [0, 4], moved).item() == pytest.approx(total / 2 + diversity(p), rel=1e-5)
    torch.testing.assert_close(gsfda.banks.probs[[0, 4]], p)


def test_a_step_that_is_not_made_leaves_no_trace_in_the_banks() -> None:
    net = model()
    nrc = ready(Nrc(late_neighbours=None, late_second_neighbours=None), net)
    before = {k: v.clone() for k, v in nrc.state_dict().items()}
    ask(nrc, net, [0, 4], directions(80, 20))
    assert not torch.equal(nrc.banks.features, before["features"])
    assert all(torch.equal(v, before[k]) for k, v in nrc.state_dict().items())
    ask(nrc, net, [0, 4], directions(80, 20))
    nrc.follow(net)
    assert not torch.equal(nrc.state_dict()["features"], before["features"])
    torch.testing.assert_close(nrc.banks.features[[0, 4]], directions(80, 20))


def test_banks_are_filled_once_for_each_network() -> None:
    net = model()
    aad = ready(Aad(), net)
    first = aad.banks.features.clone()
    ready(aad, net, POINTS.flip(0))
    assert torch.equal(aad.banks.features, first)
    ready(aad, model(), POINTS.flip(0))
    assert torch.equal(aad.banks.features, first.flip(0))


def test_images_that_were_not_seen_are_nobodys_neighbours_until_they_are() -> None:
    store = Nrc().banks
    points = directions(0, 5, 90)
    broken = torch.cat([points, torch.full((1, 2), torch.nan)])
    store.fill(torch.tensor([0, 1, 4, 2]), broken, torch.ones(4, 2) / 2, least=2)
    assert store.nearest(directions(80), 3)[0].tolist() == [4, 1, 0]
    assert store.nearest(directions(200), 3)[0].tolist() == [4, 0, 1]  # not even of one that all others lie opposite to
    store.write(torch.tensor([2, 6]), directions(60, 85), torch.ones(2, 2) / 2)  # 6 lies beyond all that was seen
    assert store.nearest(directions(80), 3)[0].tolist() == [6, 4, 2]
    assert store.nearest(directions(250), 3)[0].tolist() == [0, 1, 4]  # 5 has a place now, and is still unknown
    assert store.nearest(directions(80, 0), 2).tolist() == [[6, 4], [0, 1]]
    store.undo()
    assert store.nearest(directions(80), 3)[0].tolist() == [4, 1, 0]


def test_many_queries_find_what_each_alone_does() -> None:
    store = Nrc().banks
    points = torch.randn(5000, 8, generator=torch.Generator().manual_seed(0))  # 25 million similarities
    store.fill(torch.arange(5000), points, points, least=2)
    found = store.nearest(store.features, 2)
    assert all(torch.equal(found[i], store.nearest(store.features[i : i + 1], 2)[0]) for i in (0, 3000, 3500, 4999))
    assert torch.equal(found[:, 0], torch.arange(5000))


class Normed(Plane):
    """… with a norm layer between the image and its features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottleneck = nn.BatchNorm1d(2)


@pytest.mark.parametrize("first", [False, True])
def test_statistics_see_the_domain_before_the_banks_are_filled(first: bool) -> None:
    torch.manual_seed(1)
    net = undrift.perturb(Normed().eval(), layers=(), train="*", norm_momentum=0.5)
    batches = [(torch.arange(4), POINTS[:4]), (torch.arange(4, 6), POINTS[4:])]
    mean, var = torch.zeros(2), torch.ones(2)
    for _, points in batches if first else ():
        mean, var = (mean + points.mean(0)) / 2, (var + points.var(0)) / 2
    nrc = Nrc(statistics_first=first)
    nrc.refresh(net, lambda: iter(batches))
    expected = (POINTS - mean) / (var + 1e-5).sqrt()
    torch.testing.assert_close(nrc.banks.features, nn.functional.normalize(expected, dim=1))
    torch.testing.assert_close(nrc.banks.probs, net.net.fc(expected).softmax(1).detach())
    kept = net.net.bottleneck.running_mean.clone()
    torch.testing.assert_close(kept, mean)
    nrc.refresh(net, lambda: iter(batches))  # the second epoch: they have seen it
    assert torch.equal(net.net.bottleneck.running_mean, kept)
    resumed = Nrc(statistics_first=first)
    resumed.load_state_dict(nrc.state_dict(), net)
    resumed.refresh(net, lambda: iter(batches))
    assert torch.equal(net.net.bottleneck.running_mean, kept)


def test_misuse_is_named() -> None:
    net = model()
    with pytest.raises(undrift.OptionError, match=r"Nrc has no banks.*undrift\.adapt"):
        Nrc()(torch.zeros(2, 2), Step(net, POINTS, net, torch.tensor([0, 1])))
    with pytest.raises(undrift.DataError, match="the domain has 3 images with finite features; needed: 6"):
        ready(Nrc(), net, POINTS[:3])
    with pytest.raises(undrift.OptionError, match=r"second_neighbours=0.*at least one"):
        Nrc(second_neighbours=0)
    assert repr(Nrc(neighbours=4)) != repr(Nrc())


@pytest.mark.parametrize(("least", "learns"), [(0.0, True), (0.6, True), (0.7, False)])
def test_neighbours_that_disagree_are_not_learned_from(least: float, learns: bool) -> None:
    net = model()
    with torch.no_grad():  # class 0 below 20 degrees: two of the first three points, and none of the others
        edge = directions(20)[0]
        net.net.fc.weight.copy_(torch.stack([torch.stack([edge[1], -edge[0]]), torch.zeros(2)]))
        net.net.fc.bias.zero_()
    few = {"neighbours": 2, "second_neighbours": 2, "late_neighbours": None, "late_second_neighbours": None}
    nrc = ready(Nrc(**few, least_agreement=least), net)
    assert nrc.agreement == (None if least == 0 else pytest.approx(8 / 12))  # 1 + 1 + 0 + 2 + 2 + 2 of the neighbours
    assert (ask(nrc, net, [0, 4], directions(80, 20)) is not None) == learns
    assert ("67% of neighbouring images" in nrc.note) != learns
    again = Nrc(**few, least_agreement=least)
    again.load_state_dict(nrc.state_dict(), net)
    assert (again.agreement, again.note) == (nrc.agreement, nrc.note)


def test_a_small_network_whose_neighbours_disagree_adapts_its_norm_statistics_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()
    x = torch.rand(96, 3, 8, 8)
    with pytest.warns(undrift.UndriftWarning, match=r"of neighbouring images .* least_agreement=0 learns"):
        history = undrift.adapt(net, x, epochs=2)
    assert not history.steps
    assert history.idle_steps == 4
    assert "So no step was made" in str(history)
    assert history.model is not None
    weight, statistics = net[0].weight.clone(), net[1].running_mean.clone()
    history.model.remove()
    assert torch.equal(net[0].weight, weight)
    assert not torch.equal(net[1].running_mean, statistics)
    assert undrift.adapt(net, x, epochs=2, least_agreement=0.0).steps
