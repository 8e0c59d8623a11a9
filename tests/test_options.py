"""Every choice by name: presets, checks, suggestions, and which layers they pick."""

import dataclasses
import json
import pydoc

import pytest
import torch
from torch import nn

import undrift
from support import convnet
from undrift.options import GROUPS, PRESETS, Options, fields_by_group


def test_presets_carry_the_columns_of_the_comparison() -> None:
    paper, released = undrift.preset("paper"), undrift.preset("released")
    assert Options() == paper
    rows = {
        "norm_statistics": ("train", "batch"),
        "norm_affine": (True, True),
        "test_samples": (10, 1),
        "train_samples": (1, 1),
        "answer": ("samples", "before"),
        "energy": ("square", "offset"),
        "energy_offset": (1e-2, 1e-2),
        "kl_reduction": ("bound", "mean"),
        "kl_weight": (1.0, 1e-2),
        "init_fraction": (1e-2, 1e-6),
        "init_offset": (0.0, 1e-10),
        "prior_scale": (1.0, 1.0),
        "conv_sharing": ("kernel", "kernel"),
        "linear_sharing": ("weight", "weight"),
        "stream_lr": (5e-4, 7e-5),
    }
    assert {name: (getattr(paper, name), getattr(released, name)) for name in rows} == rows


def test_every_option_is_explained_in_its_group() -> None:
    text = pydoc.render_doc(undrift.Options, renderer=pydoc.plaintext)
    for group, fields in fields_by_group().items():
        assert f"{group.capitalize()} ({GROUPS[group]}):" in text
        assert all(f.metadata["help"] in text for f in fields)
    grouped = [f.name for fields in fields_by_group().values() for f in fields]
    assert grouped == [f.name for f in dataclasses.fields(Options)]  # all of them, in the order of the groups
    assert sum(f.metadata["main"] for f in dataclasses.fields(Options)) == 10


def test_options_print_their_differences_and_their_groups() -> None:
    assert repr(Options()) == "Options()"
    changed = Options(exclude="fc", estimator="drawn", kl_weight=0.5)
    assert repr(changed) == "Options(exclude=('fc',), estimator='drawn', kl_weight=0.5)"
    for options in (changed, *PRESETS.values()):
        assert eval(repr(options), {"Options": Options}) == options
    lines = str(changed).splitlines()
    assert [line.split()[0] for line in lines] == ["layers", "noise", "norm", "objective", "answer", "optimiser"]
    assert "estimator='drawn'" in lines[1]


def test_options_survive_json() -> None:
    for options in (*PRESETS.values(), Options(exclude=("fc", "layer4.*"), first=3)):
        assert Options(**json.loads(json.dumps(options.as_dict()))) == options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"estimator": "localy"}, "estimator='localy' is not one of local, drawn"),
        ({"estimater": "local"}, "did you mean 'estimator'"),
        ({"prior_scale": 0}, "prior_scale=0 is not above 0"),
        ({"prior_scale": float("nan")}, "not finite"),
        ({"init_fraction": "much"}, "init_fraction='much' is not a number"),
        ({"first": 1.5}, "first=1.5 is not a whole number"),
        ({"test_samples": -1}, "test_samples=-1 is below 0"),
        ({"norm_affine": 1}, "neither True nor False"),
        ({"types": "convolution"}, "types='convolution' is not one of"),
        ({"exclude": (1,)}, "not a string"),
        ({"exclude": None}, "not a string"),
        ({"norm_momentum": 2.0}, "norm_momentum=2.0 is above 1"),
        ({"exclude": "8x"}, "matches no module"),
        ({"frozen": "clasifier"}, "matches no module"),
    ],
)
def test_wrong_options_get_their_facts(change: dict[str, object], message: str) -> None:
    with pytest.raises(undrift.OptionError) as caught:
        undrift.perturb(convnet(), **change)
    assert message in str(caught.value)


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(undrift.OptionError, match=r"prior=.*estimator="):
        Options(prior="wide", estimator="none")


def test_wrong_presets_get_a_suggestion() -> None:
    with pytest.raises(undrift.OptionError, match="did you mean 'paper'"):
        undrift.perturb(convnet(), "papers")
    with pytest.raises(undrift.OptionError, match="options is a dict"):
        undrift.perturb(convnet(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "perturbed"),
    [
        ({}, ["0", "3", "8"]),
        ({"exclude": "8"}, ["0", "3"]),
        ({"layers": ("0", "8")}, ["0", "8"]),
        ({"types": ("linear",)}, ["8"]),
        ({"first": 1}, ["0"]),
        ({"last": 1}, ["8"]),
        ({"first": 1, "last": 1}, ["0", "8"]),
        ({"skip_first": 1}, ["3", "8"]),
        ({"skip_last": 2}, ["0"]),
        ({"frozen": "8"}, ["0", "3"]),
        ({"exclude": "[03]"}, ["8"]),
    ],
)
def test_which_layers(choice: dict[str, object], perturbed: list[str]) -> None:
    assert list(undrift.perturb(convnet(), **choice).noise) == perturbed


def test_a_pattern_for_a_parent_takes_its_children() -> None:
    net = nn.ModuleDict({"body": convnet(), "head": nn.Linear(5, 2)})
    assert list(undrift.perturb(net, frozen="body").noise) == ["head"]


def test_a_frozen_part_is_left_wholly_alone() -> None:
    model = undrift.perturb(convnet(), frozen=("1", "8"), norm_statistics="batch")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"noise.0.log_var", "noise.3.log_var", "net.4.weight", "net.4.bias"}
    assert model.norms[0].statistics == "source"
    assert "frozen (8)" in repr(model)


def test_sharing_prior_and_start() -> None:
    net = convnet()
    weight, head = net[0].weight.detach(), net[8].weight.detach()
    model = undrift.perturb(net, conv_sharing="weight", linear_sharing="kernel", prior_scale=2.0, init_fraction=0.25)
    variance = weight.flatten(1).var(1)
    conv, linear = model.noise["0"], model.noise["8"]
    assert conv.log_var.shape == weight.shape
    assert linear.log_var.shape == (5,)
    torch.testing.assert_close(conv.prior_var.flatten(), 2 * variance)
    torch.testing.assert_close(conv.log_var.exp(), (0.25 * variance).view(-1, 1, 1, 1).expand_as(weight))
    torch.testing.assert_close(linear.log_var.exp(), 0.25 * head.var(1))
    torch.testing.assert_close(linear.relative_std(), torch.full((5,), 0.5))
    model.remove()
    model = undrift.perturb(net, prior="isotropic", prior_scale=0.3, init="prior")
    for noise in model.noise.values():
        torch.testing.assert_close(noise.log_var.exp(), torch.full_like(noise.log_var, 0.3))
        assert (noise.prior_var == 0.3).all()


def test_first_layer_has_an_energy_of_its_own() -> None:
    model = undrift.perturb(convnet())
    assert [n.energy for n in model.noise.values()] == ["centred", "square", "square"]
    # Leaving the first layer out does not make the second one the first.
    assert [n.energy for n in undrift.perturb(convnet(), skip_first=1).noise.values()] == ["square", "square"]
    assert [n.energy for n in undrift.perturb(convnet(), "released").noise.values()] == ["offset"] * 3


def test_skipping_more_layers_than_there_are_leaves_nothing() -> None:
    with pytest.raises(undrift.CannotPerturb, match="nothing to perturb"):
        undrift.perturb(convnet(), skip_last=5)


def test_a_pattern_inside_an_attention_is_not_ignored() -> None:
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 2)})
    with pytest.raises(undrift.OptionError, match=r"matches no module.*needed: a name, or a pattern.*Name one of"):
        undrift.perturb(net, exclude="attention.out_proj")
    assert list(undrift.perturb(net, exclude="attention").noise) == ["head"]
