"""The optimiser and its learning rate as a pure function of progress, so that no state needs saving."""

from __future__ import annotations

import math

import torch
from torch import nn

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.posterior.select import matching
from undrift_bench.train.options import Schedule, TrainOptions


def factor(schedule: Schedule, progress: float, warmup: float = 0.25) -> float:
    """Return what the highest learning rate is multiplied by at `progress` p from 0 to 1.

    one_cycle: p/w up to p = w, then ½(1 + cos π(p − w)/(1 − w)); cosine: ½(1 + cos πp); inverse: (1 + 10p)^-0.75;
    steps: a tenth from p = 1/2 and a hundredth from p = 5/6 on.

    Examples:
        >>> factor("inverse", 0.0), round(factor("inverse", 1.0), 3), factor("one_cycle", 0.25)
        (1.0, 0.166, 1.0)
    """
    if schedule == "one_cycle":
        if progress < warmup:
            return progress / warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "steps":
        return 0.1 ** ((progress >= 1 / 2) + (progress >= 5 / 6))
    return (1 + 10 * progress) ** -0.75 if schedule == "inverse" else 1.0


def make_optimiser(network: nn.Module, options: TrainOptions, fused: bool) -> torch.optim.SGD:
    """Return SGD with Nesterov momentum in one or two groups, each with its `lr_scale`.

    Args:
        fused: one kernel for all parameters, on a GPU.
    """
    named = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    for pattern in options.slow:
        if not any(matching(name, [pattern]) for name, _ in named):
            children = [name for name, _ in network.named_children()]
            raise OptionError(
                f"slow={pattern!r} matches no parameter{_suggest(pattern, children)}; needed: a name or pattern of "
                f"this network's layers ({', '.join(children)}). Correct it, or leave it empty: slow=()."
            )
    slow = [parameter for name, parameter in named if matching(name, options.slow)]
    usual = [parameter for name, parameter in named if not matching(name, options.slow)]
    groups = [{"params": usual, "lr_scale": 1.0}, {"params": slow, "lr_scale": options.slow_lr_scale}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=True,
        fused=fused,
    )


def set_rate(optimiser: torch.optim.Optimizer, options: TrainOptions, step: int, steps: int) -> float:
    """Set every group's learning rate for a step and return the usual group's.

    Progress is taken in the middle of the step, so no step of a one-cycle run has the rate 0.
    """
    rate = options.lr * factor(options.schedule, (step + 0.5) / steps, options.warmup)
    for group in optimiser.param_groups:
        group["lr"] = rate * group["lr_scale"]
    return rate
