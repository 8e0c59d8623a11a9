"""A perturbed network exported with its noise: a program that draws what the network draws, anew in each call."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import undrift
from support import convnet, images


def exported(model: undrift.Perturbed, example: Tensor, **options: Any) -> Any:
    """Return the program of a network, saved and loaded again."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (example,), strict=False, **options), file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize(
    ("estimator", "statistics"),
    [("local", "batch"), pytest.param("local", "moving", marks=pytest.mark.slow), ("drawn", "source")],
)
def test_a_program_draws_what_the_network_draws(estimator: str, statistics: str) -> None:
    model = undrift.perturb(convnet(), estimator=estimator, norm_statistics=statistics, init_fraction=0.1).eval()
    model.reseed(3)
    twin = copy.deepcopy(model)
    program = exported(model, images(4))
    assert int(model.key.step) == 0  # exporting is no step
    with torch.no_grad():
        got, want = ([call(images(4)) for _ in range(3)] for call in (program, twin))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for k in range(2):  # new noise in each call: far from the last, by more than rounding
        assert (got[k] - got[k + 1]).abs().max() > 1e-3


def test_a_program_for_any_batch_is_noisy_for_any_batch() -> None:
    model = undrift.perturb(convnet(), norm_statistics="source", init_fraction=0.1).eval()
    model.reseed(3)
    twin = copy.deepcopy(model)
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = exported(model, images(4), dynamic_shapes=(dynamic,))
    with torch.no_grad():
        for count in (2, 9, 33):
            torch.testing.assert_close(program(images(count)), twin(images(count)), rtol=1e-5, atol=1e-6)


def test_a_program_holds_one_operator_a_layer() -> None:
    """And one for the keys: what they do to memory is not in the graph, and not bound to the device it was made on."""
    model = undrift.perturb(convnet(), norm_statistics="source").eval()
    graph = torch.export.export(model, (images(4),), strict=False).graph
    called = [str(node.target) for node in graph.nodes if "undrift" in str(node.target)]
    layers = len([n for n in model.noises() if n.sharing == "kernel"])
    assert called.count("undrift.keys.default") == 1
    assert called.count("undrift.add_noise.default") == layers > 0
