"""A domain file gives back what was saved, bit for bit, and belongs to one network by its fingerprint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from file_support import adapted, saved_file
from support import convnet, images, learnables, same, snapshot
from undrift import fingerprint, inspect, load, predict, save
from undrift.images import IMAGENET


@pytest.mark.filterwarnings("ignore:norm statistics were kept from passes with noise")
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


# What it holds ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    return saved_file(tmp_path)


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


def test_class_names_with_a_comma_are_quoted(tmp_path: Path) -> None:
    save(undrift.perturb(convnet(), classes=("cat, the", "dog", "ö", " x")), tmp_path / "b.safetensors")
    assert "classes         'cat, the', dog, ö, ' x'\n" in str(inspect(tmp_path / "b.safetensors"))
