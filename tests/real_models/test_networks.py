"""Every verb, on networks as their libraries make them."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import Tensor

import undrift

from .conftest import Packs, Real

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")  # the networks are untrained


def logits(output: Any) -> Tensor:
    """Return the logits of a network of timm or MONAI, of transformers, or of torchvision's segmentation."""
    if isinstance(output, Tensor):
        return output
    found: Tensor = output["logits" if "logits" in output else "out"]
    return found


def test_perturb_is_exact_when_off(real: Real) -> None:
    with torch.no_grad():
        source = logits(real.net(real.images))
        model = undrift.perturb(real.net, init_fraction=0.1)
        assert not torch.equal(logits(model(real.images)), source)
        with model.off():
            assert torch.equal(logits(real.net(real.images)), source)
        model.remove()
        assert torch.equal(logits(real.net(real.images)), source)


def test_what_is_adapted_is_saved_and_loaded(real: Real, packs: Packs) -> None:
    told = packs.answered
    assert told.probs.shape == (8, *real.probs)
    assert told.mutual_info is not None
    assert bool((told.mutual_info > 0).any())
    for file, apart in ((packs.folder / "night.safetensors", 0.02), (packs.exact, 0)):
        model = undrift.load(real.net, file)
        found = undrift.predict(model, packs.night, samples=2, generator=3)
        torch.testing.assert_close(found.probs, told.probs, rtol=0, atol=apart)
        model.remove()


@pytest.mark.parametrize("method", [None, "tent", "cotta", "vmp", "roid"])
def test_a_stream_answers(real: Real, method: str | None) -> None:
    if real.pixels and method == "roid":
        with pytest.raises(undrift.UndriftError, match="one class per image"):
            next(undrift.stream(real.net, [real.images], method=method))
        return
    settings: dict[str, Any] = {} if method is None else {"method": method}
    stream = undrift.stream(real.net, real.images.split(4), **settings)
    answers = list(stream)
    assert [tuple(p.probs.shape) for p in answers] == [(4, *real.probs)] * 2
    assert all(torch.isfinite(p.probs).all() for p in answers)
    assert stream.report.skipped == 0
    stream.remove()


def test_packs_answer_the_images_they_know(real: Real, packs: Packs) -> None:
    images = torch.cat([packs.night[:2], packs.snow[:2], real.images[:1] + 3])
    p = undrift.packs(real.net, packs.folder).predict(images)
    assert p.pack == ("night", "night", "snow", "snow", "source")
    assert p.probs.shape == (5, *real.probs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporters' own
def test_export_computes_what_the_mean_network_does(real: Real, packs: Packs, tmp_path: Path) -> None:
    model = undrift.load(real.net, packs.exact)
    undrift.export(model, tmp_path / "net.safetensors", images=real.images)
    undrift.export(model, tmp_path / "net.pt2", "torch.export", example=real.images[:2], images=real.images)
    undrift.export(model, tmp_path / "net.onnx", "onnx", example=real.images[:2], images=real.images)
    model.remove()
    before = real.net.state_dict()
    kept = {name: value.clone() for name, value in before.items()}
    with torch.no_grad():
        real.net.load_state_dict(safetensors.torch.load_file(tmp_path / "net.safetensors"))
        plain = logits(real.net(real.images))
        real.net.load_state_dict(kept)
        program = logits(torch.export.load(tmp_path / "net.pt2").module()(real.images))
    torch.testing.assert_close(program, plain, rtol=1e-3, atol=1e-3)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    answered = session.run(None, {given.name: real.images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(answered), plain, rtol=1e-3, atol=1e-3)
