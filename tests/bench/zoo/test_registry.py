"""Networks are found by name; a checkpoint fits exactly or is refused with three facts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from undrift import DataError, OptionError
from undrift_bench import zoo


class Payload:
    """Runs when it is unpickled."""

    fired = False

    def __reduce__(self):
        return (setattr, (Payload, "fired", True))


@pytest.fixture
def network():
    return zoo.digits(4).eval()


@pytest.fixture
def images():
    return torch.rand(2, 1, 28, 28)


def test_surface_is_sorted_and_every_name_can_be_built():
    assert zoo.__all__ == sorted(zoo.__all__)
    assert all(hasattr(zoo, name) for name in zoo.__all__)
    with torch.device("meta"):
        for name in zoo.names():
            zoo.build(name, classes=3)
            assert zoo.preprocess(name).channels == (1 if name == "digits" else 3)


def test_misspelt_name_gets_a_suggestion():
    with pytest.raises(OptionError, match=r"no network 'WRN-40-2'; known: digits, .*Did you mean 'wrn40_2'\?"):
        zoo.build("WRN-40-2")
    with pytest.raises(OptionError, match="Choose one of these"):
        zoo.preprocess("zebra")


def test_shot_needs_the_number_of_classes():
    with pytest.raises(OptionError, match=r"classes=None; needed: the number of classes"):
        zoo.build("shot_resnet50")
    with pytest.raises(OptionError, match="classes=0"):
        zoo.build("digits", classes=0)


def test_half_precision_comes_back_as_float32_with_the_files_classes(tmp_path, network, images):
    half = {name: value.half() for name, value in network.state_dict().items() if "num_batches" not in name}
    save_file(half, tmp_path / "half.safetensors")
    loaded = zoo.load("digits", tmp_path / "half.safetensors")
    torch.testing.assert_close(loaded(images), network(images), rtol=0.02, atol=0.02)
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_pytorch_files_of_weights_load(tmp_path, network, images, wrap, prefix):
    state = {prefix + name: value for name, value in network.state_dict().items()}
    torch.save(wrap(state), tmp_path / "net.pt")
    assert torch.equal(zoo.load("digits", tmp_path / "net.pt")(images), network(images))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    torch.save({"state_dict": Payload()}, tmp_path / "net.pt")
    with pytest.raises(DataError, match=r"net\.pt is not a file of weights alone .* never runs code"):
        zoo.load("digits", tmp_path / "net.pt")
    assert not Payload.fired


def test_what_is_no_state_dict_is_refused(tmp_path):
    torch.save([torch.zeros(1)], tmp_path / "net.pt")
    with pytest.raises(DataError, match="holds a list that is no mapping"):
        zoo.load("digits", tmp_path / "net.pt")


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*none\.safetensors; needed: a checkpoint"):
        zoo.load("digits", tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(DataError, match=r"cut\.safetensors cannot be read .* copy it again"):
        zoo.load("digits", tmp_path / "cut.safetensors")


def test_another_networks_file_says_what_does_not_fit(tmp_path, network):
    save_file(network.state_dict(), tmp_path / "digits.safetensors")
    with pytest.raises(DataError, match=r"as wrn40_2 does not fit: \d+ missing \(.*\); \d+ unknown .* digits'"):
        zoo.load("wrn40_2", tmp_path / "digits.safetensors")
    with pytest.raises(DataError, match=r"fc\.weight \(4, 64\) instead of \(9, 64\)"):
        zoo.load("digits", tmp_path / "digits.safetensors", classes=9)


def test_one_tensor_short_is_refused(tmp_path, network):
    state = network.state_dict()
    del state["bn2.running_var"]
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(DataError, match=r"1 missing \(bn2\.running_var\)"):
        zoo.load("digits", tmp_path / "short.safetensors")


def test_transfer_keeps_the_trunk_and_starts_a_new_head(tmp_path, network):
    save_file(network.state_dict(), tmp_path / "digits.safetensors")
    started = zoo.transfer("digits", tmp_path / "digits.safetensors", classes=26)
    assert torch.equal(started.conv3.weight, network.conv3.weight)
    assert torch.equal(started.bn4.running_var, network.bn4.running_var)
    assert started.fc.weight.shape == (26, 64)


def test_shot_takes_its_backbone_from_imagenets_file_in_the_same_layout_only(tmp_path):
    source = zoo.resnet50(4, v1=True)
    state = {name: value for name, value in source.state_dict().items() if "num_batches" not in name}
    path = tmp_path / "resnet50.safetensors"
    save_file(state, path, {"layout": "v1: stride on the first 1x1, BatchNorm eps 1e-3"})
    network = zoo.transfer("shot_resnet50_v1", path, classes=7)
    assert torch.equal(network.backbone.layer4[2].conv3.weight, source.layer4[2].conv3.weight)
    assert network.classifier.weight.shape == (7, 256)
    for load in (lambda: zoo.load("resnet50", path), lambda: zoo.transfer("shot_resnet50", path, classes=7)):
        with pytest.raises(DataError, match=r"another layout \(v1: .*Use (shot_)?resnet50_v1"):
            load()


@pytest.mark.parametrize("junk", [b"junk", b"", b"\x80\x05K\x01.", b"PK\x03\x04", b"\x80\x04junk" * 9])
def test_junk_is_refused_with_three_facts(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "net.pt"
    path.write_bytes(junk)
    with pytest.raises(DataError, match="needed"):
        zoo.load("digits", path)


def test_a_file_of_the_usual_layout_is_refused_by_the_first_one(tmp_path):
    state = {name: value for name, value in zoo.resnet50(4).state_dict().items() if "num_batches" not in name}
    path = tmp_path / "resnet50.safetensors"
    save_file(state, path, {"network": "resnet50"})
    for load in (lambda: zoo.load("resnet50_v1", path), lambda: zoo.transfer("shot_resnet50_v1", path, classes=7)):
        with pytest.raises(DataError, match=r"another layout \(resnet50\); .*Use (shot_)?resnet50\."):
            load()
    for name, network in (("digits", "resnet50_v1"), ("wrn40_2", "resnet50_v1"), ("resnet50_v1", "shot_resnet50")):
        save_file({"other.weight": torch.ones(2)}, path, {"network": network})
        with pytest.raises(DataError) as refused:  # for its names, not its layout
            zoo.load(name, path)
        assert "layout" not in str(refused.value)
    save_file(state, path)  # nobody said which: either may be meant
    assert zoo.load("resnet50_v1", path).fc.out_features == 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: {**w, "fc.weight": torch.tensor(1.0)}, r"fc\.weight \(\) instead of \(10, 64\)"),
        (lambda w: {**w, "fc.weight": torch.empty(4 * 10**12, 0)}, r"fc\.weight \(4000000000000, 0\) instead of"),
        (lambda w: {**w, "fc.weight": torch.zeros(1).expand(10**12, 64)}, r"\(1000000000000, 64\) in \d+ bytes"),
        (lambda w: {name: value.to("meta") for name, value in w.items()}, r"without all its numbers \(meta"),
        (lambda w: {**w, "fc.weight": w["fc.weight"].to_sparse()}, r"\(torch.sparse_coo torch.float32"),
        (
            lambda w: {**w, "fc.weight": w["fc.weight"].to(torch.int8)},
            r"fc\.weight torch.int8 instead of",
        ),
        (lambda w: {**w, "fc.weight": w["fc.weight"].to(torch.complex64)}, "1 of another kind of number"),
        (lambda w: {**w, "module.fc.weight": torch.zeros(4, 64)}, r"1 unknown \(module\.fc\.weight\)"),
    ],
)
def test_tensors_that_are_no_weights_are_refused(tmp_path, network, spoil, message):
    path = tmp_path / "net.pt"
    torch.save(spoil(network.state_dict()), path)
    with pytest.raises(DataError, match=message):
        zoo.load("digits", path)


def test_a_count_of_batches_may_be_cast_with_the_rest(tmp_path, network, images):
    torch.save({name: value.double() for name, value in network.state_dict().items()}, tmp_path / "net.pt")
    assert torch.equal(zoo.load("digits", tmp_path / "net.pt")(images), network(images))
