"""The table that a perturbed network prints, and its exact counts."""

import torch

import undrift
from support import convnet
from undrift_bench import zoo


def test_wide_resnet_counts() -> None:
    with torch.device("meta"):
        net = zoo.wrn28_10()
    # Memory as it comes may hold statistics that are not finite; with the batch's nobody looks at them.
    text = str(undrift.perturb(net.to_empty(device="cpu"), norm_statistics="batch"))
    assert "34,448 learnables = 16,496 log-variances + 17,952 norm affine (36,479,184 with " in text


def test_resnet50_with_a_bottleneck_counts() -> None:
    with torch.device("meta"):
        net = zoo.shot_resnet50(65)
    model = undrift.perturb(net.to_empty(device="cpu"), frozen="classifier", norm_statistics="batch")
    assert "604,480 learnables" in str(model)
    assert "(24,032,832 with " in str(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 604_480


def test_the_table_names_every_layer_and_adds_up() -> None:
    model = undrift.perturb(convnet(), exclude="8", init_fraction=0.04)
    text = str(model)
    lines = [line for line in text.splitlines() if line[:1].isdigit()]
    assert [line.split()[:2] for line in lines[:5]] == [
        ["0", "Conv2d"],
        ["1", "BatchNorm2d"],
        ["3", "Conv2d"],
        ["4", "GroupNorm"],
        ["8", "Linear"],
    ]
    assert "no: excluded (8)" in text
    assert "0.2" in lines[0]  # σ is a fifth of the kernel's standard deviation
    assert sum(int(line.split()[-1]) for line in lines[:4]) == 48
    assert "2 of 3 layers perturbed: 48 learnables = 16 log-variances + 32 norm affine" in text
    assert "0.2 kB beside a network of" in text
