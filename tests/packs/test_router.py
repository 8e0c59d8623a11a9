"""The router tells domains apart by what differs between them, not by what varies within them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift
from packs_support import network, packs_in

SHARES = {"warm": 1.4, "cold": 0.7}


def of(domain: str, count: int, seed: int) -> Tensor:
    """Return images of very different contrast; domains differ in a tint."""
    generator = torch.Generator().manual_seed(seed)
    contrast = torch.exp(0.8 * torch.randn(count, 1, 1, 1, generator=generator))
    images = contrast * torch.rand(count, 3, 8, 8, generator=generator)
    images[:, 0] *= SHARES.get(domain, 1.0)
    return images


def packs_of(folder: Path, net: nn.Module, count: int = 200) -> list[Path]:
    places = []
    for name in SHARES:
        given = {"method": "undrift-light", "epochs": 1, "least_agreement": 0.0}  # the network has learned nothing
        model = undrift.adapt(net, of(name, count, 3), progress=False, **given).model
        assert model is not None
        places.append(folder / f"{name}.safetensors")
        undrift.save(model, places[-1])
        model.remove()
    return places


def without_sketch(net: nn.Module, place: Path) -> None:
    """Make a pack what earlier versions wrote."""
    model = undrift.load(net, place)
    model.router = {name: model.router[name] for name in ("mean", "var", "evidence")}
    model.facts["moments"].pop("sketch")
    undrift.save(model, place)
    model.remove()


def right(packs: undrift.Packs) -> float:
    """Return the least share of a domain's images that get its pack, among the packs."""
    shares = []
    for number, name in enumerate(SHARES):
        images = of(name, 200, 50 + number)
        shares.append(sum(pack == name for pack in packs.predict(images, samples=1).pack) / 200)
    return min(shares)


def test_what_all_images_vary_in_does_not_hide_what_domains_differ_in(tmp_path: Path) -> None:
    net = network(lambda: nn.GroupNorm(2, 8))  # no running statistics: packs among themselves
    places = packs_of(tmp_path, net)
    assert right(undrift.packs(net, *places, limit=100)) > 0.93
    for place in places:
        without_sketch(net, place)
    assert right(undrift.packs(net, *places, limit=100)) < 0.88


def test_a_pack_without_a_sketch_is_compared_by_evidence(tmp_path: Path) -> None:
    net = network()
    places = packs_of(tmp_path, net)
    without_sketch(net, places[0])
    packs = undrift.packs(net, *places)
    p = packs.predict(of("warm", 50, 8), samples=1)
    assert packs.names == ("source", "warm", "cold")
    two = p.evidence[:, 1:].argmin(1) + 1
    assert torch.equal(torch.where(p.nearest > 0, p.nearest, two), two)


def test_a_sketch_of_another_version_or_size_is_left_out(tmp_path: Path) -> None:
    net = network()
    (place,) = packs_in(tmp_path, net, "night")
    for version, count in ((99, None), (1, -1)):
        model = undrift.load(net, place)
        model.facts["moments"]["sketch"] = version
        model.router["sketch.mean"] = model.router["sketch.mean"][:count]
        undrift.save(model, place)
        model.remove()
        (pack,) = undrift.packs(net, place)
        assert pack.moments is not None
        assert pack.moments.sketch is None
        assert pack.moments.weights is not None
        assert float(pack.moments.weights.sum()) == pytest.approx(1)


def test_few_images_make_no_sketch(tmp_path: Path) -> None:
    net = network()
    packs = undrift.packs(net, *packs_of(tmp_path, net, 12))
    assert all(pack.moments is not None and pack.moments.sketch is None for pack in packs)
    assert packs.predict(of("warm", 4, 1), samples=1).evidence.isfinite().all()


def test_a_sketch_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    net = network()
    place = packs_of(tmp_path, net)[0]
    before = undrift.inspect(place).router
    model = undrift.load(net, place)
    undrift.save(model, tmp_path / "again.safetensors")
    again = undrift.inspect(tmp_path / "again.safetensors").router
    assert before.keys() == again.keys()
    assert before["sketch.correlation"].dtype == torch.int8
    assert all(torch.equal(tensor, again[name]) for name, tensor in before.items())


def test_autocast_rounds_nothing_that_images_are_told_apart_by(tmp_path: Path) -> None:
    net = network(lambda: nn.BatchNorm2d(8))
    packs, images = undrift.packs(net, *packs_of(tmp_path, net)), of("warm", 200, 50)
    exact = packs.predict(images, samples=1).pack
    with torch.autocast("cpu", torch.bfloat16):  # the network rounds, too
        rounded = packs.predict(images, samples=1).pack
    assert sum(a == b for a, b in zip(exact, rounded, strict=True)) >= 195
