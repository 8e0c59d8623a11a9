"""The adapted mean network, for programs that know nothing of undrift."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, learnables, same, snapshot
from undrift import export, predict
from undrift.images import IMAGENET


def adapted(net: nn.Module, **options: Any) -> undrift.Perturbed:
    model = undrift.perturb(net, **options)
    with torch.no_grad():
        model(images(seed=3))
        for parameter in learnables(model).values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def mean_logits(model: undrift.Perturbed, x: Tensor) -> Tensor:
    model.eval()
    with model.mean(), torch.no_grad():
        return model(x)


OF_NOISE = "ignore:norm statistics were kept from passes with noise"


@pytest.mark.filterwarnings(OF_NOISE)
@pytest.mark.parametrize("options", [{}, {"norm_statistics": "source"}, {"frozen": "8"}, {"estimator": "drawn"}])
def test_a_state_dict_loads_strictly_and_is_the_mean_network(tmp_path: Path, options: dict[str, Any]) -> None:
    model = adapted(convnet(), preprocess=IMAGENET, classes=list("abcde"), **options)
    before = snapshot(model.net)
    size = export(model, tmp_path / "net.safetensors")
    assert size == (tmp_path / "net.safetensors").stat().st_size
    own = convnet()
    own.load_state_dict(safetensors.torch.load_file(tmp_path / "net.safetensors"), strict=True)
    own.eval()
    with torch.no_grad():
        assert torch.equal(own(images()), mean_logits(model, images()))
        assert torch.equal(own(images()).softmax(1), predict(model, images(), samples=0).probs)
    assert same(model.net.state_dict(), before)
    with safetensors.safe_open(tmp_path / "net.safetensors", framework="pt") as file:
        texts = file.metadata()
    assert json.loads(texts["classes"]) == list("abcde")
    assert json.loads(texts["preprocess"]) == IMAGENET.to_dict()


def test_batch_statistics_do_not_fit_into_a_state_dict(tmp_path: Path) -> None:
    model = adapted(convnet(), norm_statistics="batch")
    with pytest.raises(undrift.OptionError, match=r'norm_statistics="batch": 1 use.*state_dict holds kept.*moving'):
        export(model, tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings(OF_NOISE)
@pytest.mark.parametrize("statistics", ["moving", "source", "batch"])
def test_a_program_is_the_mean_network_for_any_batch(tmp_path: Path, statistics: str) -> None:
    model = adapted(convnet(), norm_statistics=statistics, classes=list("abcde"))
    export(model, tmp_path / "net.pt2", "torch.export", example=images(1 if statistics == "moving" else 4))
    extra = {"undrift.json": ""}
    program = torch.export.load(io.BytesIO((tmp_path / "net.pt2").read_bytes()), extra_files=extra).module()
    assert json.loads(json.loads(extra["undrift.json"])["classes"]) == list("abcde")
    for count in (2, 6, 9):
        assert torch.equal(program(images(count)), mean_logits(model, images(count)))


@pytest.mark.parametrize("statistics", ["source", "batch"])
def test_an_onnx_model_is_the_mean_network_for_any_batch(tmp_path: Path, statistics: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = adapted(convnet(), norm_statistics=statistics, classes=list("abcde"))
    export(model, tmp_path / "net.onnx", "onnx", example=images(1))
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    (given,) = session.get_inputs()
    for count in (2, 9):
        (found,) = session.run(None, {given.name: images(count).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), mean_logits(model, images(count)), rtol=0, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list("abcde")


def test_the_mean_network_takes_statistics_of_its_own_from_images(tmp_path: Path) -> None:
    model, seen = adapted(convnet()), images(12, seed=5)
    with pytest.warns(
        undrift.UndriftWarning, match=r"passes with noise \(σ up to 0\.1.*own.*export\(model, path, images="
    ):
        export(model, tmp_path / "noisy.safetensors")
    before = snapshot(model.net)
    export(model, tmp_path / "own.safetensors", images=seen.split(6))
    own, noisy = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("own", "noisy"))
    assert same(model.net.state_dict(), before)
    with model.off() as net, torch.no_grad():
        expected = torch.stack([net[0](part).mean((0, 2, 3)) for part in seen.split(6)]).mean(0)
    torch.testing.assert_close(own["1.running_mean"], expected)
    assert not torch.allclose(own["1.running_var"], noisy["1.running_var"])
    assert torch.equal(own["1.weight"], noisy["1.weight"])
    # Statistics that no noise has touched, and noise that touches nothing: nothing to say.
    export(undrift.perturb(convnet()), tmp_path / "source.safetensors")
    export(adapted(convnet(), init_fraction=1e-6), tmp_path / "inert.safetensors")


def exported(model: undrift.Perturbed, path: Path, seen: Tensor) -> dict[str, Tensor]:
    export(model, path, images=seen)
    return safetensors.torch.load_file(path)


def test_statistics_need_sound_images(tmp_path: Path) -> None:
    model, path = adapted(convnet()), tmp_path / "net.safetensors"
    for nothing in ([], images(4)[:0], images(1), torch.full((3, 3, 8, 8), torch.nan)):
        with pytest.raises(undrift.DataError, match=r"no batch of two finite images.*needed.*Give"):
            export(model, path, images=nothing)
    assert not path.exists()
    spoilt = torch.cat([images(6), torch.full_like(images(1), torch.nan)])
    assert same(exported(model, path, spoilt), exported(model, path, images(6)))
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(144, 2)
    )
    assert not torch.equal(exported(adapted(net), path, images(6))["1.running_mean"], torch.zeros(4))


def changed(model: undrift.Perturbed) -> dict[str, Tensor]:
    return {f"{p.name}.{n}": t for p in model.norms for n, t in p.away.items() if t is not None}


def test_tied_weights_compiled_networks_and_shared_layers(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
            self.b.weight = self.a.weight
            self.again = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.b(self.norm(self.a(x))))

    model = undrift.perturb(torch.compile(Tied(), backend="eager"))
    with torch.no_grad():
        for parameter in learnables(model).values():
            parameter += 0.3
    export(model, tmp_path / "t.safetensors")
    own = Tied()
    own.load_state_dict(safetensors.torch.load_file(tmp_path / "t.safetensors"), strict=True)
    x = torch.randn(3, 4)
    assert torch.equal(own(x), mean_logits(model, x))


def test_the_path_says_the_format(tmp_path: Path) -> None:
    model = undrift.perturb(convnet())
    for ending, format_ in ((".pt2", r"torch\.export"), (".onnx", "onnx")):
        with pytest.raises(undrift.OptionError, match=f"no example.*{format_} needs a batch"):
            export(model, tmp_path / f"net{ending}")
    export(model, tmp_path / "net.weights")
    assert safetensors.torch.load_file(tmp_path / "net.weights").keys() == convnet().state_dict().keys()


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    model = undrift.perturb(convnet())
    for format_, example, match in (
        ("onx", None, r"did you mean 'onnx'.*not one of state_dict, torch\.export, onnx\. Take state_dict"),
        ("onnx", None, r"no example.*onnx needs a batch.*example=images"),
        ("torch.export", None, r"no example.*example=images"),
        ("torch.export", "images", "an example that is str"),
    ):
        with pytest.raises(undrift.OptionError, match=match):
            export(model, tmp_path / "x", format_, example)  # type: ignore[arg-type]
    with pytest.raises(undrift.OptionError, match="format=a Tensor is not one of"):
        export(model, tmp_path / "x", images())  # type: ignore[arg-type]
    with pytest.raises(undrift.UndriftError, match="needs a perturbed network"):
        export(convnet(), tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(undrift.DataError, match="no folder"):
        export(model, tmp_path / "no" / "x")
    model.remove()
    with pytest.raises(undrift.UndriftError, match=r"removed.*Export before"):
        export(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_extra_state_is_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(undrift.DataError, match=r"_extra_state.*no tensor"):
        export(undrift.perturb(nn.Sequential(Extra(2, 2))), tmp_path / "x")
