"""A pack with a mean: trained weights travel as compressed shifts, everything else exactly."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import undrift
from file_support import packed
from support import same, snapshot
from undrift_bench import zoo

SCHEMES = ("exact", "signs", "ternary", "1-bit", "1.5-bit", "4-bit", "8-bit", "rank-8", "rank-64")
OLD = Path(__file__).parent / "data" / "format-1.safetensors"
SECOND = OLD.with_stem("format-2")


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 40), nn.Linear(40, 5)).eval()


def trained(net: nn.Module, spread: float = 0.1, **options: Any) -> undrift.Perturbed:
    """Return a network whose weights have moved by a part of their deviation."""
    generator = torch.Generator().manual_seed(1)
    model = undrift.perturb(net, train="*", generator=generator, norm_statistics="source", **options)
    with torch.no_grad():
        for name, parameter in model.net.named_parameters():
            part = spread * float(parameter.float().std()) if parameter.ndim > 1 else spread
            parameter += part * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            assert parameter.requires_grad, name
    return model


def images(count: int = 64) -> Tensor:
    return torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_save_load_predict_with_each_scheme(tmp_path: Path, scheme: str) -> None:
    net, path = network(), tmp_path / "b.safetensors"
    source = snapshot(net)
    model = trained(net)
    before, wanted = undrift.predict(model, images(), 0).probs, snapshot(model.net)
    size = undrift.save(model, path, mean=scheme)
    assert same(model.remove().state_dict(), source)
    file = undrift.inspect(path)
    assert set(file.shifts) == (set() if scheme == "exact" else {"3.weight", "7.weight"})  # of 4,096 values or more
    again = undrift.load(net, path)
    found = snapshot(again.net)
    for name, shift in file.shifts.items():
        assert torch.equal(found.pop(name), shift.added_to(source[name]))
        worst = {"signs": 0.62, "ternary": 0.48, "1-bit": 0.95, "1.5-bit": 0.6, "4-bit": 0.09, "rank-8": 0.9}
        moved = wanted[name] - source[name]
        assert (shift.dense() - moved).norm() <= worst.get(scheme, 0.02) * moved.norm()
        del wanted[name]
    assert same(found, wanted)
    after = undrift.predict(again, images(), 0).probs
    assert torch.equal(after, before) if scheme == "exact" else (after - before).abs().max() < 0.05
    if scheme in ("signs", "ternary"):
        exact = undrift.save(again, tmp_path / "exact.safetensors", mean="exact")
        assert size - 4 * 2500 < 0.13 * exact  # 2,500 exact numbers and the header
    assert same(again.remove().state_dict(), source)


def test_what_is_loaded_can_be_saved_again_and_hardly_changes(tmp_path: Path) -> None:
    net = network()
    undrift.save(trained(net), tmp_path / "a.safetensors")
    undrift.remove(net)
    again = undrift.load(net, tmp_path / "a.safetensors")
    undrift.save(again, tmp_path / "b.safetensors")
    one, other = (undrift.inspect(tmp_path / f"{name}.safetensors").shifts["3.weight"] for name in "ab")
    assert (one.dense() - other.dense()).norm() < 1e-3 * one.dense().norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_take_a_shift(tmp_path: Path, dtype: torch.dtype) -> None:
    net = network().to(dtype)
    source = snapshot(net)
    undrift.save(trained(net), tmp_path / "b.safetensors", mean="4-bit")
    undrift.remove(net)
    again = undrift.load(net, tmp_path / "b.safetensors")
    shift = undrift.inspect(tmp_path / "b.safetensors").shifts["7.weight"]
    assert torch.equal(again.net[7].weight.detach(), shift.added_to(source["7.weight"]))
    assert again.net[7].weight.dtype == dtype


def test_inside_off_the_adapted_weights_are_saved(tmp_path: Path) -> None:
    model = trained(network())
    undrift.save(model, tmp_path / "a.safetensors")
    with model.off():
        undrift.save(model, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("scheme", ["trinary", "rank-", "rank-0", "rank-x", 3, None])
def test_an_unknown_scheme_is_refused(tmp_path: Path, scheme: object) -> None:
    with pytest.raises(undrift.OptionError, match=r"no way to store trained weights; needed: one of auto, exact"):
        undrift.save(trained(network()), tmp_path / "b.safetensors", mean=scheme)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_variances_that_were_not_trained_are_stored_once_a_row(tmp_path: Path) -> None:
    path, net = tmp_path / "b.safetensors", network()
    model = undrift.perturb(net, layers="7")  # a linear layer has one variance per weight
    size = undrift.save(model, path)
    assert safetensors.torch.load_file(path)["7.log_var"].shape == (40,)
    assert torch.equal(undrift.inspect(path).tensors["7.log_var"], model.noises()[0].log_var)
    assert undrift.inspect(path).sigmas[0].variances == 40 * 128
    with torch.no_grad():
        model.noises()[0].log_var[0, 0] += 1
    assert undrift.save(model, path) > size + 4 * 39 * 128
    kept = model.noises()[0].log_var.detach().clone()
    model.remove()
    assert torch.equal(undrift.load(net, path).noises()[0].log_var, kept)


# What a pack says of itself -----------------------------------------------------------------------------------------


def test_facts_and_a_routers_tensors_travel(tmp_path: Path) -> None:
    net, path = network(), tmp_path / "clinic-b.safetensors"
    model = trained(net)
    model.facts = {"images": 120, "estimate": 0.875, "router": {"mean": 0.5, "deviation": 0.1}}
    model.router = {"1.input_mean": torch.arange(16.0), "1.input_var": torch.ones(16)}
    undrift.save(model, path)
    file = undrift.inspect(path)
    assert (file.name, file.images, file.estimate) == ("clinic-b", 120, 0.875)
    assert file.created is not None
    assert len(file.created) == len("2026-11-19")
    assert file.facts["router"] == {"mean": 0.5, "deviation": 0.1}
    assert same(dict(file.router), model.router)
    assert "1.input_mean" not in file.tensors
    model.remove()
    again = undrift.load(net, path)
    assert (again.facts, same(again.router, model.router)) == (dict(file.facts), True)
    undrift.save(again, tmp_path / "night.safetensors", name="at night")
    assert undrift.inspect(tmp_path / "night.safetensors").name == "at night"
    assert undrift.inspect(tmp_path / "night.safetensors").created == file.created  # the state is from then


def test_adaptation_says_on_how_many_images(tmp_path: Path) -> None:
    history = undrift.adapt(network(), images(20), epochs=1, method="shot", features="7")
    assert history.model is not None
    history.model.facts["created"] = "2020-02-20"
    history = undrift.adapt(history.model, images(24), epochs=1)
    assert history.model is not None
    undrift.save(history.model, tmp_path / "b.safetensors")
    file = undrift.inspect(tmp_path / "b.safetensors")
    assert (file.images, file.facts["verdict"]) == (24, str(history.verdict))
    assert file.created is not None
    assert file.created > "2026"  # this state was made today
    stream = undrift.stream(undrift.remove(history.model), images(12).split(6), method="tent")
    list(stream)
    assert stream.model.facts == {"images": 12}


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"images": -3}, None),
        ({"images": 1.5}, None),
        ({"estimate": math.nan}, None),
        ({"other": math.inf}, None),
        ({"other": torch.ones(2)}, None),
        ({"created": "yesterday"}, None),
        ({1: 2}, None),
        ({}, ""),
        ({}, 7),
        ({}, "half \udcff"),
    ],
)
def test_facts_that_no_file_can_hold_are_refused(tmp_path: Path, facts: Any, name: Any) -> None:
    model = trained(network())
    model.facts = facts
    with pytest.raises(undrift.OptionError, match=r"cannot be stored .*needed: .*Correct them"):
        undrift.save(model, tmp_path / "b.safetensors", name=name)
    model.facts, model.router = {}, {"1.input_mean": torch.tensor([math.nan])}
    with pytest.raises(undrift.DataError, match=r"router/1\.input_mean holds 1 of 1"):
        undrift.save(model, tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


# Versions and damage ------------------------------------------------------------------------------------------------


def old_source(*layers: nn.Module) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *(layers or (nn.Flatten(), nn.Linear(16, 2))))
    with torch.no_grad():
        for k, (_, p) in enumerate(sorted(net.named_parameters())):
            p.copy_((torch.arange(p.numel()).view(p.shape) + k) % 7 / 7 - 0.4)
    return net.eval()


def test_a_file_of_format_1_is_read(tmp_path: Path) -> None:
    """`data/format-1.safetensors` was written by undrift as it was before format 2, from `old_source`."""
    file = undrift.inspect(OLD)
    assert (file.name, file.created, file.images, file.classes) == ("format-1", None, None, ("cat", "dog"))
    assert "made            unknown when, on an unknown number of images" in str(file)
    model = undrift.load(old_source(), OLD)
    x = torch.arange(96.0).view(2, 3, 4, 4) / 96
    found = undrift.predict(model, x, 0).probs
    expected = torch.tensor([[0.5073174238204956, 0.49268263578414917], [0.5352502465248108, 0.4647497236728668]])
    torch.testing.assert_close(found, expected)
    undrift.save(model, tmp_path / "new.safetensors")
    with safetensors.safe_open(tmp_path / "new.safetensors", framework="pt") as new:
        assert new.metadata()["undrift_format"] == "3"  # older versions refuse any but "1"
    assert same(dict(undrift.inspect(tmp_path / "new.safetensors").tensors), dict(file.tensors))


def test_a_file_of_format_2_is_read() -> None:
    """`data/format-2.safetensors` was written by undrift as it was before format 3, with three levels per weight."""
    file = undrift.inspect(SECOND)
    assert (file.name, file.created, list(file.shifts)) == ("night", "2026-11-19", ["2.weight", "5.weight"])
    assert {shift.described()["levels"] for shift in file.shifts.values()} == {3}
    layers = nn.Conv2d(4, 120, 3), nn.Conv2d(120, 8, 1), nn.Flatten(), nn.Linear(32, 130)
    model = undrift.load(old_source(*layers), SECOND)
    found = undrift.predict(model, torch.arange(216.0).view(2, 3, 6, 6) / 216, 0).probs.topk(3)
    expected = torch.tensor([[0.0967, 0.0939, 0.0939], [0.1424, 0.1424, 0.0950]])
    torch.testing.assert_close(found.values, expected, atol=1e-4, rtol=0)
    assert found.indices.tolist()[1][2] == 68


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t, _: t.pop("3.weight.shift.step"), r"the shift of 3\.weight: holds digits instead of digits, step"),
        (lambda t, _: t["3.weight.shift.step"].fill_(math.nan), "step holds NaN"),
        (lambda t, _: t.update({"3.weight.shift.digits": torch.zeros(9).byte()}), "digits"),
        (lambda _, h: h.update(shifts="[1]"), "damaged"),
        (lambda _, h: h.update(shifts='{"3.weight":{}}'), "damaged"),
        (lambda _, h: h.pop("shifts"), r"7\.weight\.shift|3\.weight\.shift"),
        (lambda _, h: h.update(facts="[1]"), "facts are list"),
        (lambda _, h: h.update(facts='{"images":"many"}'), "images='many'"),
        (lambda _, h: h.update(facts='{"created":"soon"}'), "damaged"),
        (lambda _, h: h.update(rows='{"none":[2,2]}'), "damaged"),
        (lambda _, h: h.update(rows='{"8.log_var":[6,40]}'), "damaged"),
        (lambda t, _: t.update({"router/1.input_var": torch.tensor([math.inf])}), "input_var holds 1 of 1"),
    ],
)
def test_a_damaged_mean_is_refused_and_leaves_the_network_alone(
    tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object], match: str
) -> None:
    net, path = network(), tmp_path / "b.safetensors"
    undrift.save(trained(net), path)
    undrift.remove(net)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    change(tensors, header)
    path.write_bytes(packed(tensors, header))
    before = snapshot(net)
    with pytest.raises(undrift.DataError, match=rf"(?s)damaged or cut short.*{match}|{match}.*Copy it again"):
        undrift.load(net, path)
    assert same(net.state_dict(), before)
    assert undrift.remove(undrift.perturb(net)) is net  # nothing is left on it


def test_a_mean_of_another_shape_is_refused(tmp_path: Path) -> None:
    net, path = network(), tmp_path / "b.safetensors"
    undrift.save(trained(net), path)
    undrift.remove(net)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
    entries = json.loads(header["shifts"])
    entries["3.weight"]["shape"] = [32, 9, 16]
    path.write_bytes(packed(tensors, {**header, "shifts": json.dumps(entries)}))
    match = r"3\.weight \(32, 9, 16\) instead of \(32, 16, 3, 3\)"
    with pytest.raises(undrift.PerturbationMismatch, match=match):
        undrift.load(net, path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("resnet50", 97, 5.0), ("wrn28_10", 139, 7.0)])
def test_a_pack_with_a_mean_is_small_whatever_the_shift(tmp_path: Path, name: str, least: float, most: float) -> None:
    net = zoo.build(name).eval()
    model = trained(net)  # Gaussian shifts: no other distribution of the same variance has more to say
    size = undrift.save(model, tmp_path / "b.safetensors") / 2**20
    weights = sum(parameter.nbytes for parameter in net.parameters()) / 2**20
    print(f"{name}: {size:.2f} of {weights:.1f} MiB")
    assert weights >= least
    assert size <= most
