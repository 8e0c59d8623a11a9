"""The optimiser's groups: each learnable once, log-variances without weight decay."""

import undrift
from support import convnet, learnables
from undrift.optimise import make_optimiser


def test_groups() -> None:
    model = undrift.perturb(convnet(), log_var_lr_scale=3.0, fast="8")
    optimiser = make_optimiser(model, "sgd", 0.1, weight_decay=0.01)
    groups = {g["name"]: (round(g["lr"], 9), g["weight_decay"], len(g["params"])) for g in optimiser.param_groups}
    assert groups == {"affine": (0.1, 0.01, 4), "log_var": (0.3, 0.0, 2), "log_var, fast": (3.0, 0.0, 1)}
    grouped = [id(p) for g in optimiser.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in learnables(model).values())
