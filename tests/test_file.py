"""A domain file is whole, small, belongs to one network, and never leaves another one half changed."""

import errno
import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, learnables, same, snapshot
from undrift import _atomic, zoo
from undrift._packing import pack
from undrift.data.preprocess import IMAGENET, RAW
from undrift.file import inspect, load, save
from undrift.fingerprint import fingerprint
from undrift.predict import predict


def adapted(net: nn.Module, **options: Any) -> undrift.Perturbed:
    """Return a perturbed network whose every learnable and statistic has moved."""
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(1), **options)
    with torch.no_grad():
        model(images(seed=3).to(next(net.parameters()).dtype))
        for parameter in learnables(model).values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def traces(net: nn.Module) -> list[object]:
    tables = ("_forward_hooks", "_forward_pre_hooks")
    flags: list[object] = [(p.requires_grad, id(p)) for p in net.parameters()]
    return flags + [(dict(getattr(m, t)), m.training) for m in net.modules() for t in tables]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_statistics": "batch"},
        {"norm_statistics": "source", "norm_affine": False},
        {"estimator": "drawn", "linear_sharing": "kernel"},
        {"frozen": "8", "init_fraction": 0.0},
        {"options": "released"},
    ],
)
def test_save_load_predict_is_equal_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    net = convnet()
    source = snapshot(net)
    model = adapted(net, preprocess=IMAGENET, classes=list("abcde"), **options)
    expected = [predict(model, images(), s, generator=7).probs for s in (0, 4)]
    size = save(model, tmp_path / "b.safetensors")
    assert size == (tmp_path / "b.safetensors").stat().st_size
    other = convnet()
    other.load_state_dict(source)
    again = load(other, tmp_path / "b.safetensors")
    assert (again.options, again.preprocess, again.classes) == (model.options, IMAGENET, tuple("abcde"))
    for samples, probs in zip((0, 4), expected, strict=True):
        assert torch.equal(predict(again, images(), samples, generator=7).probs, probs)
    assert same(again.net.state_dict(), model.net.state_dict())
    assert learnables(again).keys() == learnables(model).keys()
    assert same(again.remove().state_dict(), source)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_come_back_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    net = convnet().to(dtype)
    model = adapted(net)
    save(model, tmp_path / "b.safetensors")
    state = snapshot(model)
    again = load(model.remove(), tmp_path / "b.safetensors")
    assert same(
        {k: v for k, v in again.state_dict().items() if "key" not in k},
        {k: v for k, v in state.items() if "key" not in k},
    )


def test_inside_off_the_adapted_state_is_saved(tmp_path: Path) -> None:
    model = adapted(convnet())
    save(model, tmp_path / "a.safetensors")
    with model.off():
        save(model, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    model.remove()
    with pytest.raises(undrift.UndriftError, match="removed"):
        save(model, tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()


def test_attention_tied_and_root_layers_round_trip(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.norm(self.attention(x, x, x)[0])))

    for net, x in ((Tied(), torch.randn(2, 3, 8)), (nn.Linear(4, 3), torch.randn(2, 4))):
        model = undrift.perturb(net)
        with torch.no_grad():
            for parameter in learnables(model).values():
                parameter += 0.3 * torch.randn_like(parameter)
        model.reseed(1)
        expected = model(x)
        save(model, tmp_path / "t.safetensors")
        again = load(model.remove(), tmp_path / "t.safetensors")
        again.reseed(1)
        assert torch.equal(again(x), expected)
        again.remove()


def test_compiled_networks_have_the_names_of_plain_ones(tmp_path: Path) -> None:
    net = convnet()
    wrapped = torch.compile(net, backend="eager")
    model = undrift.perturb(wrapped)
    save(model, tmp_path / "b.safetensors")
    model.remove()
    assert fingerprint(net) == fingerprint(wrapped)
    assert len(inspect(tmp_path / "b.safetensors").sigmas) == 3
    load(net, tmp_path / "b.safetensors")


# Fingerprint --------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_source_weights_and_nothing_else() -> None:
    net = convnet()
    own = fingerprint(net)
    assert len(own) == 64
    assert fingerprint(net.to(memory_format=torch.channels_last).eval()) == own
    assert fingerprint(net.double()) == own
    net.float()
    net[1].num_batches_tracked += 3
    model = adapted(net)
    assert fingerprint(model) == own
    with model.off():
        assert fingerprint(model) == own
    model.remove()
    assert fingerprint(net) == own
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] += 1e-6
    assert fingerprint(net) != own


def test_the_fingerprint_knows_names_shapes_and_statistics() -> None:
    a, b = nn.Sequential(nn.Linear(2, 3)), nn.ModuleDict({"fc": nn.Linear(2, 3)})
    b["fc"].load_state_dict(a[0].state_dict())
    assert fingerprint(a) != fingerprint(b)
    net = convnet()
    own = fingerprint(net)
    net[1].running_mean += 1
    assert fingerprint(net) != own
    with pytest.raises(undrift.DataError, match=r"meta device.*Load its checkpoint"):
        fingerprint(nn.Linear(2, 2, device="meta"))


def test_a_spectral_norm_in_train_mode_keeps_its_fingerprint() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    own = fingerprint(net)
    net.train()(torch.randn(2, 4))
    assert fingerprint(net) == own


# Size ---------------------------------------------------------------------------------------------------------------


def test_a_wide_resnet_28_10_file_is_small_and_its_fingerprint_quick(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = zoo.build("wrn28_10")
    net = net.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(1)
    classes = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    start = time.perf_counter()
    fingerprint(net)
    seconds = time.perf_counter() - start
    model = undrift.perturb(net, preprocess=RAW, classes=classes)
    size = save(model, tmp_path / "w.safetensors", source="WRN-28-10, CIFAR-10")
    print(f"WRN-28-10: {size:,} bytes, fingerprint {seconds:.2f} s")
    assert size <= 230_000
    assert seconds < 5  # 0.2 s alone; the machine is shared


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def test_a_vit_s_file_with_a_variance_a_row_is_below_a_megabyte(tmp_path: Path) -> None:
    with torch.device("meta"):
        blocks = nn.Sequential(*(Block(384) for _ in range(12)))
        parts = {"patch": nn.Conv2d(3, 384, 16, 16), "blocks": blocks, "norm": nn.LayerNorm(384)}
        net: nn.Module = nn.ModuleDict({**parts, "head": nn.Linear(384, 1000)})
    net = net.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.fill_(1)
    model = undrift.perturb(net, linear_sharing="kernel")
    size = save(model, tmp_path / "v.safetensors")
    print(f"ViT-S: {size:,} bytes")
    assert size < 1_000_000


# What cannot be loaded ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    net = convnet()
    model = adapted(net, preprocess=RAW)
    save(model, tmp_path / "clinic-b.safetensors", source="convnet-clinic-A")
    return model.remove(), tmp_path / "clinic-b.safetensors"


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
    header.pop("checksum")
    path.write_bytes(pack(tensors, header))


def test_another_network_is_refused_by_name(saved: tuple[nn.Module, Path]) -> None:
    _, path = saved
    match = r"(?s)different source model \(fingerprint .{8}…, this model is .{8}….*convnet-clinic-A.*undrift adapt"
    refused(convnet(), path, undrift.PerturbationMismatch, match)
    refused(nn.Linear(3, 4), path, undrift.PerturbationMismatch, match)


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
            lambda _, h: h.update(undrift_format="2", undrift="9.1"),
            undrift.DataError,
            r"format 2.*9\.1.*Update undrift",
        ),
        (lambda _, h: h.pop("undrift_format"), undrift.DataError, r"no domain file.*undrift\.save"),
        (lambda _, h: h.pop("options"), undrift.DataError, "no 'options'"),
        (lambda _, h: h.update(options='{"estimater": "local"}'), undrift.DataError, "did you mean 'estimator'"),
        (lambda _, h: h.update(options='{"estimator": "best"}'), undrift.DataError, "not one of local, drawn"),
        (lambda _, h: h.update(options="[1]"), undrift.DataError, "damaged"),
        (lambda _, h: h.update(preprocess='{"means": [1]}'), undrift.DataError, "means"),
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


def test_the_same_state_is_the_same_file(tmp_path: Path) -> None:
    model = adapted(convnet())
    contents = {save(model, tmp_path / "a") and (tmp_path / "a").read_bytes() for _ in range(3)}
    assert len(contents) == 1
    assert set(safetensors.torch.load_file(tmp_path / "a")) >= {"0.log_var", "1.running_mean", "num_batches_tracked"}


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
    assert model.preprocess == RAW
    model.remove()
    assert load(net, path, preprocess=RAW).preprocess == RAW


def test_a_file_without_preprocessing_takes_the_callers(tmp_path: Path) -> None:
    net = convnet()
    model = undrift.perturb(net)
    save(model, tmp_path / "b.safetensors")
    assert load(model.remove(), tmp_path / "b.safetensors", preprocess=IMAGENET).preprocess == IMAGENET


def test_inspect_needs_no_network(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    file = inspect(path)
    model = load(net, path)
    assert [s.layer for s in file.sigmas] == ["0", "3", "8"]
    for sigma, noise in zip(file.sigmas, model.noises(), strict=True):
        expected = noise.log_var.detach().mul(0.5).exp()
        assert sigma.variances == expected.numel()
        assert sigma.l1 == pytest.approx(float(expected.sum()), rel=1e-5)
        assert sigma.mean == pytest.approx(float(expected.mean()), rel=1e-5)
        assert (sigma.least, sigma.most) == pytest.approx((float(expected.min()), float(expected.max())), rel=1e-5)
        assert sigma.relative[0] == pytest.approx(float(noise.relative_std().mean()), rel=1e-3)
    text = str(file)
    for word in ("clinic-b.safetensors", "convnet-clinic-A", "the defaults", "σ/std", file.fingerprint[:8]):
        assert word in text
    assert "estimator='drawn'" in str(inspect(resaved(model.remove(), path, estimator="drawn")))


def resaved(net: nn.Module, path: Path, **options: Any) -> Path:
    model = undrift.perturb(net, **options)
    save(model, path)
    model.remove()
    return path


def test_zero_noise_is_kept(tmp_path: Path) -> None:
    net = convnet()
    resaved(net, tmp_path / "z.safetensors", init_fraction=0.0)
    assert all(s.l1 == 0 and s.relative == (0, 0, 0) for s in inspect(tmp_path / "z.safetensors").sigmas)
    assert torch.isneginf(load(net, tmp_path / "z.safetensors").noises()[0].log_var).all()


# Writing ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_what_was_there(saved: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    net, path = saved
    before = path.read_bytes()
    model = undrift.perturb(net)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_atomic.os, "fsync", full)
    with pytest.raises(undrift.DataError, match=r"clinic-b.*disk is full.*untouched.*Free some space"):
        save(model, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert torch.isfinite(model(images())).all()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_device_that_is_always_full() -> None:
    with pytest.raises(OSError, match="No space") as caught, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")
    assert "disk is full" in _atomic._facts("x", caught.value)


def test_ctrl_c_and_errors_leave_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    _atomic.write_text(place, "old")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), _atomic.writing(place) as file:  # noqa: PT012
            file.write(b"new, half")
            raise error
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(undrift.DataError, match=r"is a folder.*file name"):
        _atomic.write_bytes(tmp_path, b"")
    with pytest.raises(undrift.DataError, match=r"no folder.*mkdir -p"):
        _atomic.write_bytes(tmp_path / "no" / "a.txt", b"")
    for number, words in ((errno.EACCES, "may not be written"), (errno.EIO, "Input/output error")):
        assert words in _atomic._facts("a", OSError(number, os.strerror(number)))


def test_links_and_permissions_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    _atomic.write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
    (tmp_path / "plain.txt").write_text("")
    modes = {(tmp_path / n).stat().st_mode for n in ("real.txt", "plain.txt")}
    assert len(modes) == 1


def test_a_diverged_state_is_not_saved(tmp_path: Path) -> None:
    model = undrift.perturb(convnet())
    with torch.no_grad():
        model.noises()[1].log_var[0] = float("nan")
    with pytest.raises(undrift.DataError, match=r"3\.log_var holds 1 of 8.*lower the learning rate"):
        save(model, tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())
