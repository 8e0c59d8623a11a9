"""The optimiser of a perturbed network: log-variances and norm affine, each with its rate."""

import torch
from torch import nn

from undrift.options import Optimiser
from undrift.perturb import Perturbed
from undrift.select import matching, plain_name


def make_optimiser(model: Perturbed, kind: Optimiser, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Return the optimiser over all learnables, in four groups: log-variances or norm affine, fast or not.

    Weight decay never touches a log-variance: pulling it to 0 pulls σ to 1, far beyond any kernel.
    """
    options = model.options
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_log_var = name.endswith("log_var")
            layer = name.removeprefix("noise.").replace("/", ".") if is_log_var else name.removeprefix("net.")
            fast = matching(plain_name(layer), options.fast) is not None
            groups.setdefault((is_log_var, fast), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "name": ("log_var" if is_log_var else "affine") + (", fast" if fast else ""),
            "lr": lr * (options.log_var_lr_scale if is_log_var else 1) * (options.fast_lr_scale if fast else 1),
            "weight_decay": 0.0 if is_log_var else weight_decay,
        }
        for (is_log_var, fast), parameters in sorted(groups.items())
    ]
    if kind == "adam":
        return torch.optim.Adam(settings)
    return torch.optim.SGD(settings, lr=lr, momentum=options.momentum)
