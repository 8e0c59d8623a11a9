"""Rivals over epochs, killed and resumed: they end bit for bit where they would have ended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import undrift
from offline_support import network
from support import images, same, snapshot
from undrift.keep import MaskedGradients
from undrift.likelihood import Gsfda

# Untrained networks on random images may well end up with one answer for all; that is not the matter here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning"),
    pytest.mark.filterwarnings("ignore:.*has no feature masks:undrift.UndriftWarning"),
]

METHODS = ("nrc", "aad", "gsfda", "hcl", "vmp-nrc")


class Killed(Exception):
    pass


def killed(net: nn.Module, at: int) -> nn.Module:
    """Return the network, such that a run dies in its at-th step."""
    steps = 0

    def count(_net: nn.Module, _args: object, _out: object) -> None:
        nonlocal steps
        steps += torch.is_grad_enabled()
        if steps == at and torch.is_grad_enabled():
            raise Killed

    net.register_forward_hook(count)
    return net


@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.parametrize("name", METHODS)
def test_a_killed_run_ends_bit_for_bit_where_it_would_have_ended(name: str, at: int, tmp_path: Path) -> None:
    x, path = images(24), tmp_path / "run.safetensors"
    settings: dict[str, Any] = {"method": name, "epochs": 3, "batch_size": 8}
    settings |= {"every": 2} if name == "hcl" else {}

    def run(seed: int, checkpoint: Path | None, dies: int = 0) -> undrift.History:
        net = killed(network(), dies)
        torch.manual_seed(seed)
        steps = {"checkpoint_steps": 1} if checkpoint else {}
        return undrift.adapt(net, x, checkpoint=checkpoint, **steps, **settings)

    expected = run(5, None)
    with pytest.raises(Killed):
        run(5, path, at)
    resumed = run(6, path)
    assert resumed == expected
    assert expected.model is not None
    assert resumed.model is not None
    assert same(snapshot(resumed.model), snapshot(expected.model))
    with resumed.model.mean(), expected.model.mean():
        assert torch.equal(resumed.model.eval()(x), expected.model.eval()(x))


def test_untrained_masks_come_back_with_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    embeddings = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = undrift.adapt(network(), images(24), method="gsfda", epochs=1, batch_size=12, checkpoint=path).model
        assert model is not None
        embeddings.append(model.masks.embedding)
    assert torch.equal(*embeddings)


def test_untrained_masks_travel_in_the_domain_file_and_follow_the_generator(tmp_path: Path) -> None:
    embeddings = []
    for seed, generator in ((1, 7), (2, 7), (2, 8)):
        torch.manual_seed(seed)
        fixed = torch.Generator().manual_seed(generator)
        model = undrift.adapt(network(), images(24), method="gsfda", epochs=1, batch_size=12, generator=fixed).model
        assert model is not None
        embeddings.append(model.masks.embedding.detach())
    assert torch.equal(embeddings[0], embeddings[1])
    assert not torch.equal(embeddings[1], embeddings[2])

    path, x = tmp_path / "target.safetensors", images(6)
    answers = undrift.predict(model, x).probs
    undrift.save(model, path)
    assert "bottleneck.masks.embedding" in undrift.inspect(path).tensors
    net = model.remove()
    plain = undrift.predict(net, x).probs
    loaded = undrift.load(net, path)
    assert torch.equal(undrift.predict(loaded, x).probs, answers)
    assert torch.equal(loaded.masks.embedding, embeddings[2])
    assert not any(p is loaded.masks.embedding for p in loaded.parameters() if p.requires_grad)
    undrift.save(loaded, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    with loaded.off():
        assert torch.equal(undrift.predict(net, x).probs, plain)
    undrift.adapt(loaded, images(24), Gsfda(), 1, batch_size=12, keepers=(MaskedGradients(),))  # no second masks
    assert torch.equal(loaded.masks.embedding, embeddings[2])
    assert torch.equal(undrift.predict(loaded.remove(), x).probs, plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
