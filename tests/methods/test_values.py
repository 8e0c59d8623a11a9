"""Every value that its authors give a method, and that no example by hand would miss."""

from typing import Any

import pytest

from undrift import methods

SGD: dict[str, Any] = {"adapt_optimiser": "sgd", "momentum": 0.9, "nesterov": True, "fast_lr_scale": 10}
# Liang et al. 2020, and their code: 15 epochs of 64, lr 1e-2, the backbone's a tenth of it, (1 + 10p)^−0.75, weight
# decay 1e-3; 0.3 times the cross-entropy to pseudo-labels of two rounds, ε 1e-5.
SHOT = {**SGD, "adapt_lr": 1e-3, "adapt_schedule": "shot", "weight_decay": 1e-3, "epochs": 15, "batch_size": 64}
SHOT |= {"beta": 0.3, "rounds": 2, "information.epsilon": 1e-5}
# Yang et al. 2021 (NeurIPS), the code's Office-Home: lr 1e-3, the backbone's 1e-4, constant; weight decay 5e-4.
NEIGHBOURS = {**SGD, "adapt_lr": 1e-4, "adapt_schedule": "constant", "weight_decay": 5e-4, "epochs": 40}

VALUES: dict[str, dict[str, Any]] = {
    # Wang et al. 2021: Adam 1e-3 on batches of 200, and the answer is from before the step; over epochs the same.
    "tent": {
        "stream_optimiser": "adam",
        "stream_lr": 1e-3,
        "stream_batch": 200,
        "stream_steps": 1,
        "answer": "before",
        "adapt_optimiser": "adam",
        "adapt_lr": 1e-3,
        "adapt_schedule": "constant",
        "batch_size": 200,
    },
    # Jing et al. 2022 give no rate: 1e-5 is what a search on other corruptions found (benchmarks/rates.py).
    "tent-ft": {
        "stream_optimiser": "adam",
        "stream_lr": 1e-5,
        "stream_batch": 200,
        "answer": "before",
        "adapt_optimiser": "adam",
        "adapt_lr": 1e-5,
        "adapt_schedule": "constant",
    },
    "shot": SHOT,
    "shot-bn": SHOT,
    # Three neighbours and two of each, five and four after half of the epochs.
    "nrc": {
        **NEIGHBOURS,
        "neighbours": 3,
        "second_neighbours": 2,
        "late_neighbours": 5,
        "late_second_neighbours": 4,
    },
    # Yang et al. 2022, the code's Office-Home: three neighbours, two after half of the epochs, α = 1 all along.
    "aad": {**NEIGHBOURS, "neighbours": 3, "late_neighbours": 2, "alpha": 1, "alpha_decay": 0},
    # Yang et al. 2021 (ICCV), the code's Office-Home: lr 1e-2 and the backbone's norm layers 1e-3, (1 + 10p)^−0.75,
    # weight decay 1e-3, two neighbours, ε 1e-5, masks that stay; on VisDA ten neighbours, a tenth of the rates, masks
    # that learn.
    "gsfda": {
        **SGD,
        "adapt_lr": 1e-3,
        "adapt_schedule": "shot",
        "weight_decay": 1e-3,
        "epochs": 32,
        "batch_size": 64,
        "neighbours": 2,
        "epsilon": 1e-5,
        "train_masks": False,
    },
    "gsfda:visda": {"adapt_lr": 1e-4, "epochs": 15, "neighbours": 10, "train_masks": True},
    # Huang et al. 2021, the code for Cityscapes: momentum network 0.996, a history every 300 steps, τ 0.07, half of
    # HCID; lr 1e-4, heads ten times that, weight decay 5e-4.
    "hcl": {
        **SGD,
        "adapt_lr": 1e-4,
        "weight_decay": 5e-4,
        "stay": 0.996,
        "every": 300,
        "temperature": 0.07,
        "instance_weight": 0.5,
    },
    # Sun et al. 2020: plain SGD 1e-3, image by image, 32 crops of the image padded by 4, mirrored or not, in eval mode;
    # online one step and no reload, standard ten and a reload for each image.
    "ttt": {
        "stream_optimiser": "sgd",
        "stream_lr": 1e-3,
        "momentum": 0,
        "weight_decay": 0,
        "stream_split": 1,
        "stream_steps": 1,
        "episodic": False,
        "norm_statistics": "source",
        "answer": "after",
        "views": 32,
        "pad": 4,
        "flip": True,
    },
    "ttt:standard": {"stream_steps": 10, "episodic": True, "stream_lr": 1e-3, "views": 32},
}


def value(name: str, what: str) -> object:
    """Return what a method runs with: of its likelihood, its keepers, its options or its row, whichever has it."""
    method = methods.get(name)
    parts = method.build({})
    first, *rest = what.split(".")
    for holder in (parts.likelihood, *parts.keepers, parts.options, method):
        if hasattr(holder, first):
            found = getattr(holder, first)
            for attribute in rest:
                found = getattr(found, attribute)
            return found
    raise AssertionError(f"{name} has no {what}")


@pytest.mark.parametrize("name", VALUES)
def test_a_method_has_its_authors_values(name: str) -> None:
    assert {what: value(name, what) for what in VALUES[name]} == VALUES[name]
