"""Measure per layer how far two domains lie apart (A-distance), and how large the learned noise is.

    undrift.shift.a_distance(net, source_images, target_images)     # {"conv1": 1.96, "layer1.0.conv1": 1.88, …}
    undrift.shift.sigma(model)                                      # per layer: Σσ, its start, σ over std(kernel)

The paper compares the two: a larger shift should come with a larger σ.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift.answer.forward import finite_batches
from undrift.images import FileDomain, TensorDomain
from undrift.judge.activations import activations, chosen_layers
from undrift.packs.domain_file import Sigma, sigmas
from undrift.posterior.kept_statistics import fitting_mean, noise_kept
from undrift.posterior.layers import evaluating
from undrift.posterior.model_lock import turn
from undrift.posterior.noise import initial_log_var
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import a_type, instead_of
from undrift.system.warning import warn

__all__ = ["LayerSigma", "a_distance", "domain_error", "sigma"]

LEAST = 8  # images of each domain: fewer say nothing about a held-out error
FEW = 40  # with so few, chance alone gives a quarter of the scale one time in twenty
NEWTON_STEPS = 20
PENALTY = 1e-2


@dataclass(frozen=True)
class LayerSigma(Sigma):
    """The noise of one layer, and where it started.

    Attributes:
        start_l1: Σσ before the first step.
        start_relative: mean of σ over the standard deviation of its kernel, before the first step.
    """

    start_l1: float = 0.0
    start_relative: float = 0.0


def sigma(model: Perturbed) -> tuple[LayerSigma, ...]:
    """Return how large the noise of each layer is, and where it started, in the network's order.

    The paper's measure of a layer's uncertainty is ‖σ‖₁ = Σσ over the layer's variances (`l1`). It grows with the
    number and the size of the kernels, so it rises with depth before anything is learned; `relative`, σ over the
    standard deviation of its kernel, does not.

    Examples:
        >>> import undrift
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> model = undrift.perturb(net, init_fraction=0.04)
        >>> [(row.layer, row.l1 == row.start_l1, round(row.start_relative, 6)) for row in sigma(model)]
        [('0', True, 0.2), ('2', True, 0.2)]
    """
    if not isinstance(model, Perturbed):
        raise UndriftError(
            f"got {a_type(model)}; shift.sigma needs a perturbed network. "
            + instead_of(model, "Make one: undrift.perturb(net).")
        )
    rows = []
    for row, noise in zip(sigmas(model), model.noises(), strict=True):
        start = initial_log_var(noise.kernel_var, model.options).expand_as(noise.log_var)
        relative = (0.5 * (start - noise.kernel_var.log())).double().exp()
        l1 = (0.5 * start.double()).exp().sum()
        rows.append(LayerSigma(**vars(row), start_l1=float(l1), start_relative=float(relative.mean())))
    return tuple(rows)


def a_distance(
    net: nn.Module,
    one: Any,
    other: Any,
    layers: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    penalty: float = PENALTY,
    seed: int = 0,
) -> dict[str, float]:
    """Return the proxy A-distance between two sets of images at each layer of a network.

        d_A = 2 (1 − 2 ε)

    ε is the held-out error of a linear classifier (logistic regression) that tells the two domains apart by the layer's
    output, averaged over positions: 0 if they cannot be told apart, 2 if they always can. A classifier fitted on one
    half of the images classifies the other half, and the reverse, so every image counts once. The larger domain is
    subsampled to the size of the smaller. Images with NaN or infinite values are left out.

    **Chance is a part of it.** An error above one half counts as one half, so without any shift the distance is 0 at
    best and slightly more on average. Two sets of one domain (MNIST, five layers of 10 to 64 features, 100 pairs) had:

        images of each     8      40     50     100    200    500    1,000
        mean               0.24   0.14   0.12   0.05   0.04   0.03   0.02
        one in twenty      1.00   0.50   0.44   0.22   0.18   0.09   0.07

    So give hundreds of images, and compare with two halves of one domain of the same size. Below 40 images it warns,
    below 8 it raises.

    Each image is one row. If a layer's output has a multiple of the batch's rows, such as windows of attention (Swin),
    the rows of an image are taken to be consecutive and are averaged; so are the calls of a layer that is called twice.
    Attention with batch_first=False has tokens first and images second, and so, it is assumed, have linear layers
    beside it in the same module, as in nn.TransformerEncoderLayer.

    Args:
        net: any network; a perturbed one is measured adapted and without noise. If its norm statistics are those of
            noisy steps, it first sees all images once, to collect statistics without noise.
        one: images: a tensor, a domain of `undrift.images`, or an iterable of batches. Labels are not read.
        other: the same for the other domain.
        layers: names of submodules; None takes every convolution, linear and attention layer with an output for each
            image. Layers that some pass does not call, or whose rows do not divide by the images (a table of positions
            in Swin V2), are left out; if you name one, it raises.
        batch_size: images per batch, of a tensor or a domain.
        penalty: ½·penalty·‖w‖² keeps the classifier finite where the domains are separable.
        seed: of the two halves, and of the subsample of the larger domain.

    Examples:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2))
        >>> dark, bright = torch.rand(40, 1, 3, 3), 9 + torch.rand(40, 1, 3, 3)
        >>> a_distance(net, dark, bright)["0"]
        2.0
    """
    if not 0 < penalty < float("inf"):
        raise OptionError(f"penalty={penalty!r} is not a number above 0. {PENALTY} is usual.")
    inner = net.net if isinstance(net, Perturbed) else net
    chosen = chosen_layers(inner, layers)
    domains = [one, other]
    mean: AbstractContextManager[None] = nullcontext()
    if isinstance(net, Perturbed):
        # All images may be needed twice, and an iterator gives them once. (A noisy draw would fit the kept statistics,
        # but the Δw that the images of a pass share tells even two halves of one domain apart.)
        if noise_kept(net):
            domains = [list(images) if isinstance(images, Iterator) else images for images in domains]
        mean = fitting_mean(net, (batch for images in domains for batch in _sound(net, images, batch_size)))
    with turn(net), evaluating(net), mean:
        first, second = (
            activations(net, chosen, _sound(net, images, batch_size), named=layers is not None) for images in domains
        )
    left = [name for name in chosen if name in first and name in second]
    if not left:
        raise OptionError(
            f"none of the {len(chosen)} layers examined in {type(inner).__name__} has an output for each image; "
            "needed: at least one that every pass calls, with as many rows for each image. Name submodules: layers=…"
        )
    count = min(len(seen[left[0]]) for seen in (first, second))
    if count < LEAST:
        raise DataError(
            f"one of the domains has {count} images; needed: at least {LEAST} of each, to hold half of them out. Give "
            "more images: hundreds are better."
        )
    if count < FEW:
        warn(
            f"one of the domains has {count} images, and below {FEW} of each much of an A-distance is chance: without "
            "any shift it may come to 0.5 and more. Give more images: hundreds are better."
        )
    drawn = {n: (_drawn(first[n], count, seed), _drawn(second[n], count, seed)) for n in left}
    return {name: 2 * (1 - 2 * min(domain_error(*both, penalty, seed), 0.5)) for name, both in drawn.items()}


def _drawn(rows: Tensor, count: int, seed: int) -> Tensor:
    """Return a random subset of rows, as the first ones of a data set often are of one class."""
    if len(rows) == count:
        return rows
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count].to(rows.device)]


def domain_error(one: Tensor, other: Tensor, penalty: float = PENALTY, seed: int = 0) -> float:
    """Return the held-out error of a linear classifier that tells the rows of two matrices apart.

    Two folds: a logistic regression on one half, with features standardised there, classifies the other half.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [matrix.double()[torch.randperm(len(matrix), generator=generator)] for matrix in (one, other)]
    halves = [[matrix[: len(matrix) // 2], matrix[len(matrix) // 2 :]] for matrix in parts]
    wrong, total = 0.0, 0
    for train, test in ((0, 1), (1, 0)):
        fitted = torch.cat([half[train] for half in halves])
        mean, std = fitted.mean(0), fitted.std(0)
        std = torch.where(std > 1e-12 * (1 + mean.abs()), std, torch.inf)  # a constant feature says nothing

        def ready(rows: Tensor, mean: Tensor = mean, std: Tensor = std) -> Tensor:
            return (rows - mean) / std

        signs = torch.cat([rows.new_full((len(rows),), sign) for rows, sign in _signed(halves, train)])
        weight, bias = _logistic(ready(fitted), signs, penalty)
        for rows, sign in _signed(halves, test):
            score = sign * (ready(rows) @ weight + bias)
            # A row on the boundary is half wrong, so that useless features give an error of one half.
            wrong += float((score < 0).sum()) + 0.5 * float((score == 0).sum())
            total += len(rows)
    return wrong / total


def _signed(halves: list[list[Tensor]], which: int) -> list[tuple[Tensor, float]]:
    return [(halves[0][which], -1.0), (halves[1][which], 1.0)]


def _logistic(rows: Tensor, signs: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias that minimise mean log(1 + exp(−y(xw + b))) + ½·penalty·‖w‖², by Newton's method."""
    basis: Tensor | None = None
    if rows.shape[1] > rows.shape[0]:
        # The minimum lies in the span of the rows: the same answer with fewer unknowns.
        basis = torch.linalg.qr(rows.T).Q
        rows = rows @ basis
    design = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    decay = torch.full_like(design[0], penalty)
    decay[-1] = 1e-8  # the bias is free, except that the Hessian must stay invertible if all rows are certain

    def loss(at: Tensor) -> Tensor:
        return F.softplus(-signs * (design @ at)).mean() + 0.5 * (decay * at.square()).sum()

    at = torch.zeros_like(design[0])
    for _ in range(NEWTON_STEPS):
        share = torch.sigmoid(-signs * (design @ at))
        slope = -(design.T @ (signs * share)) / len(design) + decay * at
        curvature = design.T @ (design * (share * (1 - share))[:, None]) / len(design) + decay.diag()
        step = torch.linalg.solve(curvature, slope)
        now, pace = loss(at), 1.0
        while pace > 1e-4 and float(loss(at - pace * step)) > float(now):
            pace /= 2  # a whole step may overshoot far from the minimum
        at = at - pace * step
        if float(slope.abs().max()) < 1e-8:
            break
    weight = at[:-1] if basis is None else basis @ at[:-1]
    return weight, at[-1]


def _sound(net: nn.Module, images: Any, batch_size: int) -> Iterator[Tensor]:
    # A loader has batches of its own.
    return finite_batches(net, images, batch_size if isinstance(images, Tensor | FileDomain | TensorDomain) else None)
