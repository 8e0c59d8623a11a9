"""The optimiser's groups: each learnable once, log-variances without weight decay."""

import undrift
from support import convnet, images, learnables
from undrift.loop.optimise import make_optimiser


def test_groups() -> None:
    model = undrift.perturb(convnet(), log_var_lr_scale=3.0, fast="8")
    optimiser = make_optimiser(model, "sgd", 0.1, weight_decay=0.01)
    groups = {g["name"]: (round(g["lr"], 9), g["weight_decay"], len(g["params"])) for g in optimiser.param_groups}
    assert groups == {"affine": (0.1, 0.01, 4), "log_var": (0.3, 0.0, 2), "log_var, fast": (3.0, 0.0, 1)}
    grouped = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in learnables(model).values())


def test_small_tensors_are_moved_by_one_kernel_and_weights_of_convolutions_are_not() -> None:
    """The kernel wants gradients with their parameter's strides, and those of a 1×1 convolution may have others."""
    small, large = ({}, {"layers": ()}), ({"train": "*"}, {"conv_sharing": "weight"})
    for options, fused in (*((o, True) for o in small), *((o, None) for o in large)):
        model = undrift.perturb(convnet(), **options)
        for kind in ("adam", "sgd"):
            optimiser = make_optimiser(model, kind, 0.1)
            assert {group["fused"] for group in optimiser.param_groups} == {fused}
            undrift.entropy(model(images())).backward()
            optimiser.step()
    model = undrift.perturb(convnet(), layers=(), norm_affine=False)
    make_optimiser(model, "adam", 0.1).step()  # of nothing
