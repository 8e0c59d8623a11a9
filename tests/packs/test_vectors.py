"""Norm state, biases and log-variances of a large network travel as small differences from the source."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import undrift
from support import same, snapshot
from undrift.packs.file_bytes import to_bytes
from undrift.packs.vectors import VectorShift


def network(width: int = 5000) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, width, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net = nn.Sequential(*layers, nn.Linear(width, 5))
    with torch.no_grad():
        net[1].weight.mul_(torch.rand(width) + 0.5)
        for seed in range(10):
            net.train()(images(seed))
    return net.eval()


def images(seed: int = 99) -> Tensor:
    return torch.rand(32, 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def adapted(net: nn.Module) -> undrift.Perturbed:
    model = undrift.adapt(net, images() / 10, epochs=1, least_agreement=0.0, progress=False).model
    assert model is not None
    return model


def test_a_large_networks_vectors_come_back_nearly(tmp_path: Path) -> None:
    net = network()
    source = snapshot(net)
    model = adapted(net)
    wanted, before = snapshot(model.net), undrift.predict(model, images(), generator=0).probs
    sizes = [undrift.save(model, tmp_path / "b.safetensors", mean=how) for how in ("auto", "exact")]
    assert sizes[0] < 0.45 * sizes[1]
    assert same(model.remove().state_dict(), source)
    again = undrift.load(net, tmp_path / "b.safetensors")
    found = snapshot(again.net)
    changed = [name for name in wanted if not torch.equal(wanted[name], source[name])]
    assert {"1.running_mean", "1.running_var"} <= set(changed)
    for name in wanted:
        size = wanted["1.running_var"].sqrt() if name == "1.running_mean" else wanted[name].abs()
        assert ((found[name] - wanted[name]).abs() <= 2**-12 * size + 1e-12).all(), name
    after = undrift.predict(again, images(), generator=0).probs
    assert (after - before).abs().max() < 2e-3
    assert same(again.remove().state_dict(), source)


def test_saving_again_changes_nothing_more(tmp_path: Path) -> None:
    net = network()
    undrift.save(adapted(net), tmp_path / "a.safetensors")
    undrift.remove(net)
    undrift.save(undrift.load(net, tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    one, other = (undrift.inspect(tmp_path / f"{name}.safetensors") for name in "ab")
    for name, shift in one.shifts.items():
        gap = (shift.dense() - other.shifts[name].dense()).abs()
        assert (gap <= 1e-6 * (1 + shift.dense().abs())).all(), name
    assert same(dict(one.tensors), dict(other.tensors))


def test_a_small_networks_vectors_stay_exact(tmp_path: Path) -> None:
    undrift.save(adapted(network(width=300)), tmp_path / "b.safetensors")
    assert not undrift.inspect(tmp_path / "b.safetensors").shifts


def test_packs_switch_with_joined_vectors(tmp_path: Path) -> None:
    net = network()
    source = snapshot(net)
    undrift.save(adapted(net), tmp_path / "b.safetensors")
    undrift.remove(net)
    alone = undrift.predict(undrift.load(net, tmp_path / "b.safetensors"), images(), generator=0, views=()).probs
    undrift.remove(net)
    packs = undrift.packs(net, tmp_path / "b.safetensors")
    for _ in range(2):
        with packs.using("b"):
            torch.testing.assert_close(packs.predict(images(), generator=0, views=()).probs, alone)
        assert same(net.state_dict(), source)


def test_images_find_their_pack_as_with_exact_ones(tmp_path: Path) -> None:
    net = network()
    for name, domain in {"dark": images() / 10, "bright": 1 - images() / 4}.items():
        model = undrift.adapt(net, domain, epochs=1, least_agreement=0.0, progress=False).model
        assert model is not None
        for how in ("auto", "exact"):
            (tmp_path / how).mkdir(exist_ok=True)
            undrift.save(model, tmp_path / how / f"{name}.safetensors", mean=how)
        model.remove()
    mixed = torch.cat([images(3) / 10, images(4), 1 - images(5) / 4])
    joined, exact = (undrift.packs(net, tmp_path / how).predict(mixed, generator=0) for how in ("auto", "exact"))
    assert torch.equal(joined.choice, exact.choice)
    assert torch.equal(joined.evidence.nan_to_num(), exact.evidence.nan_to_num())
    assert set(joined.pack) == {"source", "dark", "bright"}


@pytest.mark.parametrize("adapted_to", [0.0, 1e-6, 0.01, 1.0, 300.0])
def test_a_variance_stays_one(adapted_to: float) -> None:
    source, adapted = torch.tensor([1.0, 1e-5]), torch.full((2,), adapted_to)
    found = VectorShift.of(source, adapted, adapted).added_to(source)
    assert (found >= 0).all()
    # A step of a 2048th; and what float32 has where nearly all is taken away.
    assert ((found - adapted).abs() <= 2**-12 * adapted + 2**-23).all()


def test_damaged_vectors_are_refused(tmp_path: Path) -> None:
    net, path = network(), tmp_path / "b.safetensors"
    undrift.save(adapted(net), path)
    undrift.remove(net)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    header.pop("checksum")
    described = json.loads(header["vectors"])
    bad = tmp_path / "bad.safetensors"
    for change, why in (
        ({"vectors": tensors["vectors"][:-9]}, "joined vectors"),
        ({"vectors": tensors["vectors"].flip(0)}, "cannot be decoded"),
        ({"vectors": tensors["vectors"].float()}, "not described"),
        (described[:-1], "bytes instead of"),
        ([*described, described[0]], "not described"),
        ([], "not described"),
    ):
        parts = {**tensors, **change} if isinstance(change, dict) else tensors
        bad.write_bytes(
            to_bytes(parts, header if isinstance(change, dict) else {**header, "vectors": json.dumps(change)})
        )
        with pytest.raises(undrift.DataError, match=why):
            undrift.inspect(bad)


def test_negative_variances_are_refused(tmp_path: Path) -> None:
    net, path = network(), tmp_path / "b.safetensors"
    undrift.save(adapted(net), path)
    undrift.remove(net)
    with torch.no_grad():
        net[1].running_var /= 1e6
    with pytest.raises(undrift.PerturbationMismatch):
        undrift.load(net, path)  # another fingerprint
    source = snapshot(net)
    undrift.save(adapted(net), path)
    undrift.remove(net)
    file = undrift.inspect(path)
    shift = file.shifts["1.running_var"]
    assert isinstance(shift, VectorShift)
    shift.change.sub_(1e9)
    from undrift.packs.file import adapted_by

    with pytest.raises(undrift.DataError, match="negative"):
        adapted_by(net, file)
    assert same(net.state_dict(), source)
