"""A file that does not fit or is damaged is refused, and never leaves a network half changed."""

import copy
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import undrift
from file_support import packed, saved_file
from support import convnet, same, snapshot
from undrift import inspect, load, save
from undrift.images import IMAGENET, Preprocess


def traces(net: nn.Module) -> list[object]:
    tables = ("_forward_hooks", "_forward_pre_hooks")
    flags: list[object] = [(p.requires_grad, id(p)) for p in net.parameters()]
    return flags + [(dict(getattr(m, t)), m.training) for m in net.modules() for t in tables]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    return saved_file(tmp_path)


def refused(net: nn.Module, path: Path, error: type[Exception], match: str) -> None:
    state, marks = snapshot(net), traces(net)
    with pytest.raises(error, match=match):
        load(net, path)
    assert same(net.state_dict(), state)
    assert traces(net) == marks


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])["__metadata__"]
    tensors = safetensors.torch.load(content)
    change(tensors, header)
    path.write_bytes(packed(tensors, header))


def test_another_network_is_refused_by_name(saved: tuple[nn.Module, Path]) -> None:
    _, path = saved
    match = r"(?s)different source model \(fingerprint .{8}…, this model is .{8}….*convnet-clinic-A.*undrift adapt"
    refused(convnet(), path, undrift.PerturbationMismatch, match)
    refused(nn.Linear(3, 4), path, undrift.PerturbationMismatch, match)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_in_another_precision_is_told_when_to_cast(
    saved: tuple[nn.Module, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    net, path = saved
    assert load(net, path).remove() is net
    half = copy.deepcopy(net).to(dtype)
    match = rf"different source model.*convnet-clinic-A.*weights are in {dtype};.*load first, cast after"
    refused(half, path, undrift.PerturbationMismatch, match)
    save(undrift.perturb(half), tmp_path / "half.safetensors")
    match = rf"different source model.*fits this network in {dtype}: cast first, net\.to\({dtype}\), and load after"
    refused(net, tmp_path / "half.safetensors", undrift.PerturbationMismatch, match)
    load(copy.deepcopy(net).to(dtype), tmp_path / "half.safetensors")


@pytest.mark.parametrize("path", [5, None, b"b.safetensors"])
def test_a_path_that_is_none_gets_three_facts(path: object) -> None:
    for ask in (lambda: save(undrift.perturb(convnet()), path), lambda: load(convnet(), path)):  # type: ignore[arg-type]
        with pytest.raises(undrift.OptionError, match=r"the path of the domain file is .*needed: text.*Give its name"):
            ask()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t, _: t.pop("1.bias"), undrift.PerturbationMismatch, r"1 missing \(1\.bias\)"),
        (lambda t, _: t.pop("num_batches_tracked"), undrift.PerturbationMismatch, "1 missing"),
        (lambda t, _: t.update(new=torch.ones(2)), undrift.PerturbationMismatch, r"1 unknown \(new\)"),
        (
            lambda t, _: t.update({"0.log_var": torch.ones(7)}),
            undrift.PerturbationMismatch,
            r"\(7,\) instead of \(8,\)",
        ),
        (lambda t, _: t.pop("0.log_var"), undrift.DataError, r"different layers: \['0'\]"),
        (lambda t, _: t["0.log_var"].fill_(float("nan")), undrift.DataError, "0.log_var holds 8 of 8 .*NaN"),
        (lambda t, _: t["0.log_var"].fill_(float("inf")), undrift.DataError, "NaN or infinite"),
        (lambda t, _: t["1.running_mean"][0].fill_(float("nan")), undrift.DataError, "1 of 8 .*NaN"),
        (lambda t, _: t["1.running_var"].neg_(), undrift.DataError, "negative variances"),
        (lambda t, _: t.update({"1.bias": torch.ones(8).long()}), undrift.DataError, "not float32"),
        (lambda t, _: t.update({"1.bias": torch.ones(0)}), undrift.DataError, "empty"),
        (lambda t, _: t.update(num_batches_tracked=torch.ones(1)), undrift.DataError, "int64"),
        (
            lambda _, h: h.update(undrift_format="4", undrift="9.1"),
            undrift.DataError,
            r"format 4.*9\.1.*Update undrift",
        ),
        (lambda _, h: h.pop("undrift_format"), undrift.DataError, r"no domain file.*undrift\.save"),
        (lambda _, h: h.pop("options"), undrift.DataError, "no 'options'"),
        (lambda _, h: h.update(options="[1]"), undrift.DataError, "damaged"),
        (lambda _, h: h.update(preprocess="[1]"), undrift.DataError, "damaged"),
        (lambda _, h: h.update(classes="{"), undrift.DataError, "damaged"),
        (lambda _, h: h.update(relative_std='{"0":[1,2],"3":[1,1,1],"8":[1,1,1]}'), undrift.DataError, "damaged"),
    ],
)
def test_changed_files_are_refused(
    saved: tuple[nn.Module, Path], change: Callable[..., object], error: type[Exception], match: str
) -> None:
    net, path = saved
    rewrite(path, change)
    refused(net, path, error, match)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"options": '{"tempo": 3, "haste": 1}'}, "no option is called haste, tempo"),
        ({"options": '{"estimator": "best"}'}, "estimator='best' is not one of local, drawn"),
        ({"preprocess": '{"mean": [0.5], "gamma": 2}'}, "no preprocessing is called gamma"),
    ],
)
def test_a_file_of_a_newer_undrift_is_not_called_damaged(
    saved: tuple[nn.Module, Path], text: dict[str, str], why: str
) -> None:
    net, path = saved
    rewrite(path, lambda _, h: h.update(text, undrift="9.1"))
    match = rf"was written by undrift 9\.1 with what this undrift .* does not know \({why}.*; needed: .*Update undrift"
    refused(net, path, undrift.DataError, match)
    with pytest.raises(undrift.DataError) as caught:
        inspect(path)
    assert "damaged" not in str(caught.value)
    assert "Copy it" not in str(caught.value)


def test_options_that_do_not_fit_the_network_leave_it_alone(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    options = undrift.Options(linear_sharing="kernel").as_dict()
    rewrite(path, lambda _, h: h.update(options=json.dumps(options)))
    refused(net, path, undrift.PerturbationMismatch, r"8\.log_var \(5, 8\) instead of \(5,\)")


def test_a_file_cut_short_anywhere_is_refused(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    net, path = saved
    content = path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in (*range(0, len(content), 100), len(content) - 1):
        cut.write_bytes(content[:length])
        refused(net, cut, undrift.DataError, "damaged or cut short.*Copy it again")
    cut.write_bytes(content + b"more")
    refused(net, cut, undrift.DataError, "damaged")


def test_a_changed_byte_anywhere_is_noticed(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    content = path.read_bytes()
    for at in range(0, len(content), 61):
        broken = bytearray(content)
        broken[at] ^= 1 << at % 8
        path.write_bytes(broken)
        refused(net, path, undrift.DataError, str(path))


def test_what_is_no_domain_file_is_refused(saved: tuple[nn.Module, Path], tmp_path: Path) -> None:
    net, path = saved
    refused(net, tmp_path / "nowhere.safetensors", undrift.DataError, r"there is no file.*Check the path")
    refused(net, tmp_path, undrift.DataError, "is a folder")
    for name, content in (
        ("a", pickle.dumps({"a": 1})),
        ("b", b"hello"),
        ("c", b""),
        ("d", b"\x02" + bytes(7) + b"[]"),
        ("g", bytes(8) + b"{}"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(net, tmp_path / name, undrift.DataError, "unpickles nothing" if name == "a" else "damaged")
    torch.save(net.state_dict(), tmp_path / "e")
    refused(net, tmp_path / "e", undrift.DataError, "unpickles nothing")
    safetensors.torch.save_file(net.state_dict(), tmp_path / "f")
    refused(net, tmp_path / "f", undrift.DataError, r"no domain file.*into `net` first")
    with pytest.raises(undrift.UndriftError, match=r"needs a torch\.nn\.Module"):
        load("net", path)  # type: ignore[arg-type]
    with pytest.raises(undrift.UndriftError, match="needs a perturbed network"):
        save(net, path)  # type: ignore[arg-type]


def test_a_perturbed_network_is_refused(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    model = undrift.perturb(net)
    refused(net, path, undrift.CannotPerturb, "perturbed already")
    refused(model, path, undrift.CannotPerturb, "perturbed already")


def test_other_preprocessing_is_said_loudly(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    marks = traces(net)
    with pytest.raises(undrift.UndriftWarning, match=r"mean: \(0.0, 0.0, 0.0\) against \(0.485"):
        load(net, path, preprocess=IMAGENET)  # warnings are errors here: the network must not stay half perturbed
    assert traces(net) == marks
    with pytest.warns(undrift.UndriftWarning, match=r"resize: None against 256.*model\.preprocess"):
        model = load(net, path, preprocess=IMAGENET)
    assert model.preprocess == Preprocess()
    model.remove()
    assert load(net, path, preprocess=Preprocess()).preprocess == Preprocess()
