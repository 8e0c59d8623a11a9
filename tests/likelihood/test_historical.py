"""HCL's two losses and its three networks, by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift import Step
from undrift.likelihood import Hcl


def plain() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential()
    net.bottleneck, net.fc = nn.Linear(4, 3), nn.Linear(3, 2)
    with torch.no_grad():
        net.fc.weight *= 8  # sure of some images, so that reliabilities differ
    return net


def model() -> undrift.Perturbed:
    return undrift.perturb(plain(), layers=(), train="*")


IMAGES = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))


def ready(hcl: Hcl, net: undrift.Perturbed) -> Hcl:
    hcl.refresh(net, lambda: iter([(torch.arange(5), IMAGES)]))
    return hcl


def ask(hcl: Hcl, net: undrift.Perturbed, places: list[int]) -> Any:
    x = IMAGES[places]
    with hcl.watch(net):
        return hcl(net(x), Step(net, x, net, torch.tensor(places)))


def shift(net: undrift.Perturbed, by: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(by)


def reliability(p: Tensor) -> float:
    entropy = -sum(float(v) * math.log(float(v)) for v in p) / math.log(2)
    return min(1.1, max(0.9, 1.1 - entropy))


def by_hand(current: nn.Module, average: nn.Module, past: nn.Module, x: Tensor, y: list[int], w: list[float]) -> float:
    """Return HCCD + 0.5 HCID with loops over images."""
    p, m, h = (net(x).softmax(1).double().detach() for net in (current, average, past))
    q, k = (net.bottleneck(x).double().detach() for net in (current, average))
    n, category, instance = len(y), 0.0, 0.0
    r, of_past = ([reliability(row) for row in rows] for rows in (m, h))
    assert len({*r}) > 1
    assert 0.9 in r  # where it is clipped
    assert r != of_past
    for i in range(n):
        kl = sum(float(h[i, c]) * math.log(float(h[i, c]) / float(m[i, c])) for c in range(2))
        category -= w[y[i]] * math.exp(-kl) * math.log(float(p[i, y[i]])) / n
        score = [r[j] * math.exp(float(q[i] @ k[j] / q[i].norm() / k[j].norm()) / 0.07) for j in range(n)]
        whole = sum(score[j] for j in range(n) if j != i)
        instance -= sum(math.log(score[j] / whole) for j in range(n) if j != i and y[j] == y[i]) / n / n
    return category + 0.5 * instance


def test_labels_once_from_the_source_and_its_mirror_image() -> None:
    net = model()
    with torch.no_grad():
        expected = (plain()(IMAGES).softmax(1) + plain()(IMAGES.flip(-1)).softmax(1)).argmax(1)
    shift(net, 0.5)  # the source is asked, not the network as it is
    hcl = ready(Hcl(), net)
    assert torch.equal(hcl.labels, expected)
    counts = [int((expected == c).sum()) for c in range(2)]
    even = [5 / 2 / max(1, count) for count in counts]
    assert hcl.weights.tolist() == pytest.approx([min(7.0, weight) for weight in even])
    assert max(even) > 1  # so a cap of 1 cuts
    assert ready(Hcl(most_weight=1.0), net).weights.tolist() == pytest.approx([min(1.0, weight) for weight in even])
    shift(net, 3.0)
    before = hcl.labels.clone()
    ready(hcl, net)
    assert torch.equal(hcl.labels, before)


def test_the_loss_by_hand_with_the_average_moved_before_the_step() -> None:
    net, source = model(), plain()
    hcl = ready(Hcl(stay=0.25), net)
    hcl.labels, hcl.weights = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([1.5, 0.5])
    shift(net, 1.0)  # far enough that KL(G_h‖G_m) is not KL(G_m‖G_h)
    current, average = plain(), plain()
    with torch.no_grad():
        for c, a in zip(current.parameters(), average.parameters(), strict=True):
            c.add_(1.0)
            a.add_(0.75)  # 0.25 · source + 0.75 · (source + 1)
    places = [0, 3, 2, 4]
    expected = by_hand(current, average, source, IMAGES[places], [0, 1, 0, 1], [1.5, 0.5])
    assert ask(hcl, net, places).item() == pytest.approx(expected, rel=1e-4)
    # Another draw of the same step does not move it again; a step that was made does.
    assert ask(hcl, net, places).item() == pytest.approx(expected, rel=1e-4)
    hcl.follow(net)
    assert ask(hcl, net, places).item() != pytest.approx(expected, rel=1e-4)


def test_queries_have_a_gradient_and_the_other_networks_none() -> None:
    net = model()
    hcl = ready(Hcl(), net)
    hcl.labels = torch.zeros(5, dtype=torch.long)
    hcl.weights = torch.zeros(2)  # the category part is off
    loss = ask(hcl, net, [0, 1, 2])
    loss.backward()
    assert net.net.bottleneck.weight.grad.abs().sum() > 0
    assert net.net.fc.weight.grad is None or not net.net.fc.weight.grad.any()
    assert not any(t.requires_grad for t in (*hcl.average.values(), *hcl.past.values()))


def test_after_every_so_many_steps_both_are_the_network() -> None:
    net = model()
    hcl = ready(Hcl(every=2), net)
    start = {k: v.clone() for k, v in hcl.past.items()}
    for number in (1, 2, 3):
        ask(hcl, net, [0, 1, 2])
        shift(net, 0.1)  # the step
        hcl.follow(net)
        now = dict(net.named_parameters())
        if number == 1:
            assert all(torch.equal(hcl.past[n], start[n]) for n in start)
            assert not torch.equal(hcl.average["net.fc.weight"], now["net.fc.weight"])
        if number == 2:
            assert all(torch.equal(hcl.past[n], now[n]) and torch.equal(hcl.average[n], now[n]) for n in start)
            second = {n: p.clone() for n, p in now.items()}
    assert all(torch.equal(hcl.past[n], second[n]) for n in start)


def test_norm_statistics_of_the_average_are_the_networks() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = undrift.perturb(net, layers=(), train="*")
    hcl = ready(Hcl(), model)
    model.train()
    ask(hcl, model, [0, 1, 2, 3])
    assert torch.equal(hcl.average["net.1.running_mean"], net[1].running_mean)
    assert not torch.equal(hcl.past["net.1.running_mean"], net[1].running_mean)
    moved = net[1].running_mean.clone()
    with model.rest():
        ask(hcl, model, [0, 1, 2, 3])
    assert torch.equal(net[1].running_mean, moved)  # the other networks' forward passes move nothing


def test_a_label_of_ones_own_has_no_positive() -> None:
    net = model()
    hcl = ready(Hcl(), net)
    hcl.labels, hcl.weights = torch.arange(5), torch.zeros(2)  # the category part is off
    assert ask(hcl, net, [0, 1]).item() == 0


def test_images_without_a_label_are_left_out_and_misuse_is_named() -> None:
    net = model()
    hcl = ready(Hcl(), net)
    hcl.labels = torch.tensor([-1, -1, 0, 1, 0])
    assert ask(hcl, net, [0, 1]) is None
    known, all_of_them = ask(hcl, net, [2, 3]), ask(hcl, net, [2, 3, 0])
    torch.testing.assert_close(known, all_of_them)
    with pytest.raises(undrift.OptionError, match=r"no pseudo-labels.*undrift\.adapt"):
        Hcl()(torch.zeros(2, 2), Step(net, IMAGES, net))
    with pytest.raises(undrift.OptionError, match=r"stay=1\.5"):
        Hcl(stay=1.5)
