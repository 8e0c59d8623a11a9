"""The objective of paper eq. 3: a likelihood of the unlabelled data, and the KL to the prior."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from undrift._errors import OptionError, UndriftError
from undrift.kernels import share
from undrift.likelihood.entropy import entropy
from undrift.posterior.layers import channels, is_standard, per_weight
from undrift.posterior.noise import Noise
from undrift.posterior.outputs import logits
from undrift.posterior.perturbed import Perturbed


def kl(model: Perturbed, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return KL[q(Δw) || p(Δw)] per perturbed weight (first term of paper eq. 3), in closed form.

    0.5 * (log prior_var - log_var - 1 + exp(log_var) / prior_var)

    Each weight counts, however many share a variance. "mean" divides by the number of perturbed weights, "sum" is the
    KL of the whole network; without noise there is none. Where the weights themselves are trained (option `train`),
    the mean of q moves away from the prior's, the source weight, and (w − w_s)² / (2 prior_var) is added.
    """
    _check(model)
    if reduction not in ("mean", "sum"):
        raise OptionError(
            f"reduction={reduction!r} is not one of mean, sum. Take mean for the KL of a weight, sum for the network's."
        )
    return _kl(model, reduction)


def _check(model: object) -> None:
    if not isinstance(model, Perturbed):
        raise UndriftError(
            f"got a {type(model).__name__}; a KL belongs to a perturbation. Give what undrift.perturb gave."
        )


def _kl(model: Perturbed, reduction: str, row: Tensor | None = None) -> Tensor:
    """Return the KL; `row` holds all log-variances, where a graph has made one."""
    noises = model.noises()
    log_vars = [*map(_log_var, noises)]
    row = _row(model, log_vars) if row is None else row
    if row is not None:
        parts = [_kl_there(noises, row), *_shifts(model)]
    else:
        places: dict[object, list[tuple[Noise, Tensor]]] = {}
        for noise, own in zip(noises, log_vars, strict=True):
            places.setdefault((own.device, own.dtype), []).append((noise, own))
        parts = [_kl_there([n for n, _ in there], _joined(v for _, v in there)) for there in places.values()]
        parts += _shifts(model)
    device = model.key.step.device
    total = parts[0].to(device) if parts else model.key.step.new_zeros((), dtype=torch.float32)
    for part in parts[1:]:
        total = total + part.to(device)
    return total / max(1, sum(n.weights for n in noises)) if reduction == "mean" else total


def _joined(log_vars: Iterable[Tensor]) -> Tensor:
    """Return all log-variances as one row: a network has a hundred, and on a GPU each operation on each is a launch."""
    return torch.cat([v if v.ndim == 1 else v.flatten() for v in log_vars])


def _row(model: Perturbed, log_vars: Sequence[Tensor]) -> Tensor | None:
    """Return the row that the last forward pass made of these, where that pass may still be differentiated.

    Its gradient is then added to the noise's for all layers at once.
    """
    if torch.compiler.is_compiling():
        return None
    last = None if model.key.last is None else model.key.last()
    return last.row.values if last is not None and last.row is not None and last.row.holds(log_vars) else None


def _kl_there(noises: Sequence[Noise], row: Tensor) -> Tensor:
    """Return the KL summed over all weights behind noises of one device and dtype, whose log-variances are a row."""
    log_prior, share = _priors(noises)
    if not torch.compiler.is_compiling() and not _transformed():
        total: Tensor = _Divergence.apply(row, log_prior, share)  # type: ignore[no-untyped-call]
        return total
    ratio = row - log_prior
    # A variance of exactly 0 (init_fraction=0) is no perturbation and has no KL.
    random = ratio > -torch.inf
    ratio = torch.where(random, ratio, 0)
    return (torch.where(random, ratio.exp() - 1 - ratio, 0) * share).sum()


def _log_var(noise: Noise) -> Tensor:
    own = noise._parameters.get("log_var")  # nn.Module looks elsewhere first, and a network has a hundred
    return noise.log_var if own is None else own


def _transformed() -> bool:
    # torch.func's transforms and forward-mode differentiation go through operators, not through a Function's backward.
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


class _Divergence(torch.autograd.Function):
    """Σ share·(eʳ − 1 − r) with r = row − log_prior, 0 where a variance is 0; its gradient is made on the way.

    Seven launches on a GPU and one backward, where autograd's own way takes twenty-five.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, log_prior: Tensor, share: Tensor) -> Tensor:
        ratio = _finite(row - log_prior)
        grown = torch.expm1(ratio)
        ctx.save_for_backward(row, log_prior, share, grown * share)
        return ((grown - ratio) * share).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        row, log_prior, share, pull = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants its gradient, too
            pull = torch.expm1(_finite(row - log_prior)) * share
        return grad * pull, None, None


def _finite(ratio: Tensor) -> Tensor:
    # A variance of exactly 0 (init_fraction=0) is no perturbation and has no KL: as if it were the prior's.
    return torch.nan_to_num(ratio, 0.0, torch.inf, 0.0)


_known: "WeakKeyDictionary[Noise, tuple[list[object], Tensor, Tensor]]" = WeakKeyDictionary()


def _priors(noises: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each variance's prior and half the weights behind it, as one row; made once."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # what a tracer makes is not kept
        return _row_of_priors(noises)
    # A network that moved to another device has new tensors: its buffers are other objects, or elsewhere in memory.
    first, last = noises[0].prior_var, noises[-1].prior_var
    marks: list[object] = [first.data_ptr(), last.data_ptr(), *[id(n._buffers["prior_var"]) for n in noises]]
    found = _known.get(noises[0])
    if found is None or found[0] != marks:
        with torch.inference_mode(False), torch.no_grad():  # to be used in training steps later
            found = _known[noises[0]] = (marks, *_row_of_priors(noises))
    return found[1], found[2]


def _row_of_priors(noises: Sequence[Noise]) -> tuple[Tensor, Tensor]:
    log_prior = torch.cat([n.prior_var.expand_as(n.log_var).flatten() for n in noises]).log()
    return log_prior, 0.5 * torch.cat([n.share.expand(n.log_var.numel()) for n in noises])


def _shifts(model: Perturbed) -> list[Tensor]:
    """Return Σ (w − w_s)² / (2 prior_var) of each weight that is both perturbed and trained."""
    held = {id(part.layer): part for part in model.trained}
    if not held:
        return []
    out = []
    for noise, layer, name in model.weights:
        part = held.get(id(layer))
        now, source = layer._parameters.get(name), None if part is None else part.away.get(name)
        if now is None or source is None:
            continue
        prior = noise.prior_var
        prior = per_weight(layer, prior, now) if noise.sharing == "kernel" else prior
        out.append(((now - source).square() / (2 * prior)).sum())
    return out


def step_loss(
    model: Perturbed,
    images: Tensor,
    size: int | Tensor | None = None,
    likelihood: Callable[[Tensor], Tensor] = entropy,
) -> Tensor:
    """Return the loss of a step on one batch (paper eq. 3): the likelihood of one noisy pass, and the KL.

    likelihood(model(images)) + kl_term(model, size)

    For CUDA, and with one variance a kernel everywhere (`linear_sharing="kernel"`), a compiled step is quicker by this
    function than written so: noise and KL give all log-variances one gradient, where each would have two to be added.

    Args:
        model: a perturbed network.
        images: a batch. An image that is not finite makes the loss so: `adapt` and `stream` skip such ones, a loop of
            one's own has to look.
        size: as `kl_term` has it.
        likelihood: what is asked, as a function of logits (float32 or better) that returns a number to make small. One
            that has to look at more of a step (`Shot`, `Consistency`) is for `adapt` and `stream`.

    Examples:
        >>> import undrift
        >>> model = undrift.perturb(torch.nn.Linear(3, 2), init_fraction=1)
        >>> images = torch.ones(4, 3)
        >>> bool(step_loss(model, images, size=4) > 0)
        True
    """
    _check(model)
    row = None
    if torch.compiler.is_compiling() and (shared := _shared(model)) is not None:
        row, model.key.offered = shared
    return likelihood(logits(model(images))) + _term(model, size, row)


def _shared(model: Perturbed) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return what noise and KL share in the graph being compiled, None where log-variances are not alike."""
    own = [*map(_log_var, model.noises())]
    if model.options.estimator != "local" or not model.key.noisy:
        return None  # nobody would ask for a handle
    if len({(v.device, v.dtype, v.requires_grad, v.ndim) for v in own}) != 1 or own[0].ndim != 1:
        return None
    groups, last = zip(*[_arrangement(layer) for _, layer, _ in model.weights], strict=True)
    return share(own, list(groups), list(last))


def _arrangement(layer: nn.Module) -> tuple[int, bool]:
    """Return the groups of a layer's channels, and whether these are likely to be neighbours in its output's memory."""
    if not is_standard(layer):
        return 0, False  # its weights are drawn, and leave nothing to be added up
    last, groups = channels(layer)
    weight = layer._parameters.get("weight")
    ordered = weight is not None and weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return groups, last or ordered


def kl_term(model: Perturbed, size: int | Tensor | None = None) -> Tensor:
    """Return the KL as the objective adds it to a loss that is a mean over samples.

    The paper's eq. 3 writes E[p(D|Δw)] for the expected likelihood; the bound needs its logarithm, E[log p(D|Δw)], and
    that is what we compute: the unsupervised loss stands for −log p, a mean over samples. Divided by the data size,

        loss + kl_weight · KL_sum / size        kl_reduction="bound", the true bound with kl_weight 1
        loss + kl_weight · KL_mean              kl_reduction="mean", as released (kl_weight 0.01)

    Args:
        model: a perturbed network; its options say which of the two.
        size: number of samples in the data set (in a stream: seen so far); needed for the bound. A tensor with this
            number is not looked at: to read it is a wait for a GPU.
    """
    _check(model)
    return _term(model, size)


def _term(model: Perturbed, size: int | Tensor | None, row: Tensor | None = None) -> Tensor:
    if model.options.kl_reduction == "mean":
        return model.options.kl_weight * _kl(model, "mean", row)
    if size is None or (not isinstance(size, Tensor) and size < 1):
        raise OptionError(f'size={size!r}: kl_reduction="bound" divides by the number of samples. Give it, at least 1.')
    total = _kl(model, "sum", row)  # times 1 would be another launch
    return (total if model.options.kl_weight == 1 else model.options.kl_weight * total) / size
