"""Make the optimiser of an adapting network, and move what moves beside it: rates, climbs, the means of weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from undrift._errors import OptionError
from undrift.options import Optimiser
from undrift.posterior.kl_parts import trained_means
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import matching, plain_name
from undrift.posterior.state import fill_likelihood, keeping_step, likelihood_state, weights_moved


def make_optimiser(
    model: Perturbed,
    kind: Optimiser,
    lr: float,
    weight_decay: float = 0.0,
    own: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Return the optimiser over all learnables, in groups by kind (log-variance, affine, weights) and speed.

    Weight decay never applies to a log-variance: pulling it to 0 would pull σ to 1, far beyond any kernel.

    Args:
        own: parameters of the likelihood itself (a second head), trained along.
    """
    options = model.options
    affine = {id(p) for policy in model.norms for p in policy.parameters()}
    units = {id(p): unit for change in model.changes() for p, unit in change.units()}
    groups: dict[tuple[str, bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_log_var = name.endswith("log_var") and name.startswith("noise.")
            ours = is_log_var or id(parameter) in units  # named by slots, not by the network
            layer = name.partition(".")[2].replace("/", ".") if ours else name.removeprefix("net.")
            what = "log_var" if is_log_var else "affine" if id(parameter) in affine else "weights"
            fast = matching(plain_name(layer), options.fast) is not None
            rate = lr * options.log_var_lr_scale if what == "log_var" else lr
            if what == "weights" and options.weights_lr is not None:
                rate = options.weights_lr * _rounded(units.get(id(parameter)) or _deviation(parameter))
            groups.setdefault((what, fast, rate), []).append(parameter)
    if own := [p for p in own if p.requires_grad]:
        groups["own", False, lr] = own
    settings = [
        {
            "params": parameters,
            "name": what + (", fast" if fast else ""),
            "lr": rate * (options.fast_lr_scale if fast else 1),
            "weight_decay": 0.0 if what == "log_var" else weight_decay,
        }
        for (what, fast, rate), parameters in sorted(groups.items(), key=lambda group: group[0])
    ]
    # Where only statistics may change, this is an optimiser without parameters, whose steps do nothing.
    settings = settings or [{"params": [], "name": "nothing", "lr": lr, "weight_decay": 0.0}]
    fused = _fusible([p for parameters in groups.values() for p in parameters])
    if kind == "adam":
        _refuse_float16(name for name, p in model.named_parameters() if p.requires_grad and p.dtype is torch.float16)
        return torch.optim.Adam(settings, lr=lr, fused=fused)
    return torch.optim.SGD(settings, lr=lr, momentum=options.momentum, nesterov=options.nesterov, fused=fused)


def _refuse_float16(names: Iterator[str]) -> None:
    """Raise for parameters in float16: the squares of their gradients vanish there, and Adam divides by them."""
    if (name := next(names, None)) is not None:
        raise OptionError(
            f"{name.removeprefix('net.')} is in float16, in which Adam's averages of squared gradients vanish and its "
            "steps grow without bound; needed: weights in float32 or bfloat16. Give net.float(), under torch.autocast "
            "where it has to be fast, and convert back afterwards."
        )


def _deviation(weight: Tensor) -> float:
    """Return the standard deviation of a weight; 0 where it has none.

    Adam moves each number by about the rate, whatever its size: a step in units of the prior's deviation changes a
    network of small weights as much as one of large ones.
    """
    return float(weight.detach().float().std()) if weight.numel() > 1 else 0.0


def _rounded(unit: float) -> float:
    """Return the next power of two, 1 for 0, so that weights share few groups."""
    return 2.0 ** round(math.log2(unit)) if unit > 0 else 1.0


@contextmanager
def slowed(optimiser: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates for the length of a `with` block."""
    rates = [group["lr"] for group in optimiser.param_groups]
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate


def optimiser_over_epochs(model: Perturbed, likelihood: object) -> torch.optim.Optimizer:
    """Return the optimiser that the options of a network ask for over epochs."""
    options = model.options
    kind, lr, decay = options.adapt_optimiser, options.adapt_lr, options.weight_decay
    return make_optimiser(model, kind, lr, decay, own_parameters(likelihood))


def own_parameters(likelihood: object) -> list[nn.Parameter]:
    """Return the parameters of a likelihood itself."""
    return list(likelihood.parameters()) if isinstance(likelihood, nn.Module) else []


def _fusible(parameters: Sequence[nn.Parameter]) -> bool | None:
    """Return True if one fused kernel can move all of them, else None, which lets torch choose.

    Norm affine and log-variances are many small vectors. For 160 of them with 64 numbers each, Adam took 3.3 ms one by
    one and 0.6 ms fused (CPU, one thread). The fused kernel refuses gradients whose strides differ from their
    parameter's, as may happen with a dimension of one (a 1×1 convolution, channels-last); so torch chooses for weights
    of convolutions.
    """

    def plain(p: nn.Parameter) -> bool:
        small = p.ndim <= 2 and 1 not in p.shape and p.is_contiguous()
        return small and p.is_floating_point() and p.device.type in ("cpu", "cuda")

    return True if parameters and all(map(plain, parameters)) else None


def learnables(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return every parameter that the optimiser moves."""
    return [p for group in optimiser.param_groups for p in group["params"]]


class Schedule:
    """The learning rates over all steps of a run: constant, or falling as SHOT's do, lr · (1 + 10·p)^−0.75.

    p is the part of all steps that is done with this one.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, falling: bool, total: int) -> None:
        self.optimiser, self.falling, self.total = optimiser, falling, total
        self._rates = [group["lr"] for group in optimiser.param_groups]

    def set(self, number: int) -> float:
        """Set the rates of the number-th step, and return what they are multiplied by."""
        factor = (1 + 10 * number / self.total) ** -0.75 if self.falling else 1.0
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        return factor


@contextmanager
def climbed(parameters: Sequence[nn.Parameter], radius: float) -> Iterator[None]:
    """Move the parameters by `radius` along their joint gradient; at the end put them back, bit for bit."""
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        grads = [p.grad for p in parameters if p.grad is not None]
        scale = radius / (get_total_norm(grads) + 1e-12)
        for p in parameters:
            if p.grad is not None:
                p.add_(p.grad * scale)
    weights_moved()
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        weights_moved()


def turn_to_gradient(model: Perturbed, likelihood: object, gradient: Callable[..., Any]) -> None:
    """Turn each V to the singular vectors of the weights' first gradient, for the option `mean_start="gradient"`.

    This takes one more pass over the batch, without changing statistics, noise or the likelihood.

    Args:
        gradient: computes the gradient of the first batch.
    """
    changes = model.changes()
    if any(bool(change.left.any()) for change in changes):
        return  # a run that goes on, or a model that was loaded
    before = likelihood_state(likelihood)
    try:
        with keeping_step(model.key):
            for change in changes:
                change.probe()
            gradient(climbed=True)
    finally:
        for change in changes:
            change.start_from_probe()
        fill_likelihood(likelihood, before, model)


@torch.no_grad()
def pull(model: Perturbed, optimiser: torch.optim.Optimizer, size: int) -> None:
    """Move each trained mean to where the KL wants it after a step, for the option `kl_mean="closed"`.

    A step of rate η on the objective's λ (w − w_s)² / (2 prior_var n) alone, taken implicitly:

        w ← w_s + (w − w_s) / (1 + η λ / (prior_var n))

    Its gradient is stiff: a kernel that hardly varies has a prior variance near 0, and SGD diverges on it at any
    useful rate. The implicit step is stable for every rate. Momentum 0.9 makes ten steps of one, so η is the rate over
    (1 − momentum).

    A low-rank change U Vᵀ is drawn to 0 by U, whose rows are the kernels'.

    Args:
        size: n, the data size of the bound.
    """
    options = model.options
    if options.kl_mean != "closed" or options.kl_weight == 0:
        return
    rates = {
        id(p): group["lr"] / (1 - group.get("momentum", 0)) for group in optimiser.param_groups for p in group["params"]
    }
    means = list(trained_means(model))
    count = size if options.kl_reduction == "bound" else max(1, sum(noise.weights for noise in model.noises()))
    for _, prior_var, parameter, start in means:
        if (rate := rates.get(id(parameter), 0.0)) > 0:
            parameter.copy_(start + (parameter - start) / (1 + rate * options.kl_weight / (prior_var * count)))
