"""Save, load, predict: whatever the network and its options, the answers are those from before, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import undrift
from drawn_networks import networks, options, pictures


@pytest.mark.filterwarnings("ignore:norm statistics were kept from passes with noise")
@settings(max_examples=25)
@given(net=networks(), chosen=options(), seed=st.integers(0, 2**31), samples=st.sampled_from([0, 1, 3]))
def test_a_loaded_domain_answers_as_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, net: nn.Module, chosen: dict[str, Any], seed: int, samples: int
) -> None:
    path: Path = tmp_path_factory.mktemp("packs") / "clinic-b.safetensors"
    untouched, x = copy.deepcopy(net), pictures(5, seed)
    model = undrift.perturb(net, **chosen)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(())], lr=0.5)
    for _ in range(2):
        optimiser.zero_grad()
        undrift.step_loss(model, x, 50).backward()
        optimiser.step()
    before = undrift.predict(model, x, samples, generator=seed)
    assert undrift.save(model, path) == path.stat().st_size
    again = undrift.load(untouched, path)
    after = undrift.predict(again, x, samples, generator=seed)
    assert again.options == model.options
    assert torch.equal(after.probs, before.probs)
    assert torch.equal(after.label, before.label)
    with model.off() as source, again.off() as other:
        assert torch.equal(source(x), other(x))
