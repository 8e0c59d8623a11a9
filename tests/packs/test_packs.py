"""Many packs on one network: each image gets the answer of the pack that knows it, and the network stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import undrift
from packs_support import mixed, network, of, packs_in
from support import same, snapshot
from undrift.images import IMAGENET, Preprocess

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


@pytest.mark.parametrize(
    ("method", "settings"), [("undrift-light", {}), ("undrift", {}), ("norm-stats", {}), ("norm-stats:domain", {})]
)
def test_each_image_is_answered_as_its_own_pack_alone_would(tmp_path: Path, method: str, settings: Any) -> None:
    net = network()
    before = snapshot(net)
    places = packs_in(tmp_path, net, "night", "snow", method=method, **settings)
    packs = undrift.packs(net, *places)
    images = mixed(4, "home", "night", "snow")
    p = packs.predict(images, samples=3, generator=5)
    assert p.pack == ("source",) * 4 + ("night",) * 4 + ("snow",) * 4
    assert torch.equal(p.probs[:4], net(images[:4]).softmax(1))
    for name, rows in (("night", slice(4, 8)), ("snow", slice(8, 12))):
        with packs.using(name) as model:
            alone = undrift.predict(model, images[rows], 3, generator=5)
        torch.testing.assert_close(p.probs[rows], alone.probs)
    if method.startswith("norm-stats"):  # without noise, an answer does not hang on the other images of its batch
        torch.testing.assert_close(packs.predict(images[5:6]).probs, p.probs[5:6])
    assert same(snapshot(net), before)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in net.modules())


def test_a_pack_answers_as_undrift_load_does(tmp_path: Path) -> None:
    net = network()
    (place,) = packs_in(tmp_path, net, "night", method="undrift")
    packs = undrift.packs(net, place)
    images = of("night", 5, 3)
    found = packs.predict(images, 4, generator=3)
    model = undrift.load(net_of(packs, net), place)
    assert torch.equal(found.probs, undrift.predict(model, images, 4, generator=3).probs)


def net_of(packs: undrift.Packs, net: nn.Module) -> nn.Module:
    """Return the plain network: nothing of the packs is on it between two calls."""
    assert packs.net is net
    return net


def test_using_forces_one_pack(tmp_path: Path) -> None:
    net = network()
    packs = undrift.packs(net, *packs_in(tmp_path, net, "night", "snow"))
    home = of("home", 3)
    source = net(home)
    with packs.using("night"):
        p = packs.predict(home)
        assert p.pack == ("night",) * 3
        assert p.evidence.isnan().all()
        assert not torch.equal(net(home), source)
        with packs.using("source"):
            assert torch.equal(net(home), source)
            assert packs.predict(home).pack == ("source",) * 3
        assert packs.predict(home).pack == ("night",) * 3
        with pytest.raises(undrift.OptionError, match="in use"):
            packs.remove("night")
    assert torch.equal(net(home), source)
    with pytest.raises(undrift.OptionError, match=r"no pack 'nigth' \(did you mean 'night'"), packs.using("nigth"):
        pass


def test_networks_without_batch_norm_route_among_packs(tmp_path: Path) -> None:
    for norm in (lambda: nn.GroupNorm(2, 8), lambda: nn.LayerNorm([8, 6, 6])):
        net = network() if norm is None else _with_norms(norm)
        folder = tmp_path / type(norm()).__name__
        folder.mkdir()
        packs = undrift.packs(net, *packs_in(folder, net, "night", "snow"))
        p = packs.predict(mixed(3, "night", "snow", "home"))
        assert p.pack == ("night",) * 3 + ("snow",) * 3 + ("source",) * 3  # no pack knows what is from home
        assert p.known.tolist() == [True] * 6 + [False] * 3
        assert p.why(8).startswith("nothing here fits: nearest ")
        assert packs.unknown == 3
        assert "3 images fit neither a pack nor the source" in str(packs)


def _with_norms(norm: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval()


def test_images_without_an_answer_belong_to_no_pack(tmp_path: Path) -> None:
    net = network()
    packs = undrift.packs(net, *packs_in(tmp_path, net, "night"))
    images = mixed(2, "night", "home")
    images[1, 0, 0, 0] = torch.nan
    p = packs.predict(images)
    assert p.label[1] == -1
    assert p.pack == ("night", "source", "source", "source")
    assert p.evidence[1].isnan().all()
    assert (packs.predict(images[1:2]).label == -1).all()


def test_batches_of_a_loader_are_joined(tmp_path: Path) -> None:
    net = network()
    packs = undrift.packs(net, *packs_in(tmp_path, net, "night"))
    images = mixed(4, "night", "home")
    whole, parts = packs.predict(images), packs.predict(iter(images.split(3)), generator=4)
    torch.testing.assert_close(whole.probs[4:], parts.probs[4:])
    assert whole.pack == parts.pack
    assert parts.cpu().evidence.shape == (8, 2)


def test_packs_are_added_removed_and_listed(tmp_path: Path) -> None:
    net = network()
    night, snow = packs_in(tmp_path, net, "night", "snow")
    packs = undrift.packs(net, night)
    assert packs.add(snow, name="winter") == "winter"
    assert packs.names == ("source", "night", "winter")
    assert packs.predict(of("snow", 2)).pack == ("winter", "winter")
    packs.remove("winter")
    assert packs.names == ("source", "night")
    assert packs.predict(of("snow", 2)).pack == ("source", "source")
    with pytest.raises(undrift.OptionError, match="source is the source network"):
        packs.remove("source")
    assert "night" in str(packs)
    assert "winter" not in str(packs)
    assert undrift.packs(net, tmp_path).names == ("source", "night", "snow")


def test_the_network_is_not_shared_with_another_perturbation(tmp_path: Path) -> None:
    net = network()
    packs = undrift.packs(net, *packs_in(tmp_path, net, "night"))
    model = undrift.perturb(net)
    with pytest.raises(undrift.UndriftError, match="perturbed by something else"):
        packs.predict(of("night", 2))
    model.remove()
    assert packs.predict(of("night", 2)).pack == ("night", "night")


def test_compressed_weights_take_no_memory_while_their_pack_is_off(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 64), nn.Linear(64, 5))
    (place,) = packs_in(tmp_path, net.eval(), "night", method="undrift")
    packs = undrift.packs(net, place)
    assert packs.nbytes < 0.75 * sum(p.nbytes for p in net.parameters()) + sum(
        n.log_var.nbytes for n in next(iter(packs)).model.noises()
    )
    trained = [p for held in next(iter(packs)).model.trained for p in held.away.values() if p is not None]
    assert sum(p.numel() for p in trained) < 20_000
    with packs.using("night") as model:
        assert undrift.predict(model, of("night", 2)).probs.shape == (2, 5)


# What is refused ------------------------------------------------------------------------------------------------


def test_a_bad_file_among_good_ones_is_left_out(tmp_path: Path) -> None:
    net = network()
    (good,) = packs_in(tmp_path, net, "night")
    damaged = tmp_path / "broken.safetensors"
    damaged.write_bytes(good.read_bytes()[:-5])
    with pytest.warns(undrift.UndriftWarning, match=r"broken.safetensors is damaged .* The other packs are used."):
        packs = undrift.packs(net, tmp_path)
    assert packs.names == ("source", "night")
    assert isinstance(packs.refused[str(damaged)], undrift.DataError)
    with pytest.raises(undrift.DataError, match="damaged"):
        packs.add(damaged)
    with pytest.raises(undrift.DataError, match="damaged"):
        undrift.packs(net, damaged)
    assert packs.predict(of("night", 2)).pack == ("night", "night")


def test_packs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    net = network()
    (night,) = packs_in(tmp_path, net, "night", preprocess=IMAGENET, classes=list("abcde"))
    packs = undrift.packs(net, night)

    def saved(name: str, other: nn.Module, **settings: Any) -> Path:
        (tmp_path / name).mkdir()
        return packs_in(tmp_path / name, other, "snow", **settings)[0]

    other = network()
    with torch.no_grad():
        other[0].weight.mul_(2)
    for place, error, match in (
        (saved("network", other), undrift.PerturbationMismatch, "a different source model"),
        (saved("classes", net, classes=list("vwxyz")), undrift.PerturbationMismatch, "other classes"),
        (saved("raw", net, preprocess=Preprocess()), undrift.PerturbationMismatch, "other preprocessing"),
        (night, undrift.OptionError, "called 'night', as is another"),
    ):
        with pytest.raises(error, match=match):
            packs.add(place)
    assert packs.names == ("source", "night")
    assert packs.predict(of("night", 2)).pack == ("night", "night")


def test_nothing_to_choose_from_is_refused(tmp_path: Path) -> None:
    net = network()
    with pytest.raises(undrift.OptionError, match="no pack was given"):
        undrift.packs(net)
    with pytest.raises(undrift.OptionError, match=r"a list was given; needed: .* one by one"):
        undrift.packs(net, [])
    with pytest.raises(undrift.DataError, match="holds no pack"):
        undrift.packs(net, tmp_path)
    undrift.save(model := undrift.perturb(net), tmp_path / "blind.safetensors")
    model.remove()
    packs = undrift.packs(net, tmp_path)
    with pytest.raises(undrift.DataError, match=r"no pack holds moments of its domain \(blind\)"):
        packs.predict(of("night", 2))
    with packs.using("blind"):
        assert packs.predict(of("night", 2)).pack == ("blind", "blind")
    undrift.save(model := undrift.perturb(net, norm_statistics="batch"), tmp_path / "blind.safetensors")
    model.remove()
    with pytest.raises(undrift.OptionError, match="holds no statistics of its domain"):
        undrift.packs(net, tmp_path)
