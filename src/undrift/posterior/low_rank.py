"""Train a low-rank change of a weight's mean: w = w_s + U Vᵀ, with one row of U per kernel.

The network keeps the source's weights. While a layer runs, it holds the sum. U and V are parameters of the perturbed
network, so optimisers, averages, snapshots and domain files hold two thin matrices instead of a weight.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from undrift.kernels.reference import without_autocast
from undrift.posterior import layers
from undrift.posterior.select import matching, slot

if TYPE_CHECKING:
    from undrift.posterior.perturbed import Perturbed


class LowRank(nn.Module):
    """The change of one weight: U Vᵀ, one row per kernel (convolutions: out × in·window).

    U starts at 0, so that the network starts as the source. The rows of Vᵀ are orthonormal at the start: a step of SGD
    on U then is the free step's projection on their span.

    Attributes:
        left: U. right: Vᵀ.
    """

    def __init__(self, layer: nn.Module, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows = layers.kernels(layer, weight.detach().to(torch.promote_types(weight.dtype, torch.float32)))
        self.left = nn.Parameter(rows.new_zeros(len(rows), rank))
        self.right = nn.Parameter(directions(rows, rank))
        self.spread = float(rows.std())
        self._probe: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the change, one row per kernel."""
        with without_autocast(self.left.device):
            change = self.left @ self.right
        return change if self._probe is None else change + self._probe

    def units(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Yield U and V, each with the step that changes the weight by about one standard deviation of the source's.

        Adam moves all numbers of U by the same amount a. The weight's numbers then move by a·√(rank / columns).
        """
        rank, columns = self.right.shape
        yield self.left, self.spread * (columns / rank) ** 0.5
        yield self.right, columns**-0.5

    def probe(self) -> None:
        """Ask the next backward pass for the gradient of the whole change."""
        self._probe = self.left.new_zeros(len(self.left), self.right.shape[1]).requires_grad_()

    @torch.no_grad()
    def start_from_probe(self) -> None:
        """Turn V to the singular vectors of the gradient that was asked for, and forget it."""
        gradient, self._probe = None if self._probe is None else self._probe.grad, None
        if gradient is not None and bool(gradient.isfinite().all()):
            self.right.copy_(directions(gradient, self.right.shape[0]))


class LowRankMeans:
    """The hooks of one layer: put w_s + U Vᵀ in before it runs, and the source's weight back behind it.

    Args:
        parts: the module that holds a weight, its name there, and its change.
    """

    hears_of_errors = True

    def __init__(self, parts: Sequence[tuple[nn.Module, str, LowRank]]) -> None:
        self._parts = tuple(parts)
        self._sources: list[Tensor | None] = []

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the changed weights in."""
        self.settle()
        self._sources = [module._parameters[name] for module, name, _ in self._parts]
        for (module, name, change), source in zip(self._parts, self._sources, strict=True):
            assert source is not None, "a weight that is perturbed is there"
            delta = layers.from_kernels(module, change.rows(), source.shape)
            # Directly, as this is no parameter: names and order of the network's own stay.
            table: dict[str, Any] = module._parameters
            table[name] = (source + delta).to(source.dtype)

    def after(self, *_: Any) -> None:
        """Put the source's weights back."""
        self.settle()

    def settle(self) -> None:
        """Put the source's weights back, also where Ctrl-C stopped a pass; a second time changes nothing."""
        sources, self._sources = self._sources, []
        for (module, name, _), source in zip(self._parts, sources, strict=False):
            table: dict[str, Any] = module._parameters
            table[name] = source


def directions(matrix: Tensor, rank: int) -> Tensor:
    """Return the right singular vectors of the largest singular values, as orthonormal rows.

    From the smaller of both Gram matrices: a decomposition of the matrix itself takes ten times as long.
    """
    wide = matrix.shape[0] < matrix.shape[1]
    with without_autocast(matrix.device):  # no decomposition takes half precision
        _, vectors = torch.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
        first = vectors.flip(1)[:, :rank]
        return torch.linalg.qr(matrix.T @ first if wide else first).Q.T.contiguous()


def is_smaller(weight: Tensor, layer: nn.Module, rank: int) -> bool:
    """Return whether two factors of this rank hold fewer numbers than the weight itself."""
    rows, columns = layers.kernels(layer, weight).shape
    return rank * (rows + columns) < rows * columns


def add_low_rank(model: "Perturbed") -> None:
    """Give each trained weight a low-rank change, where its factors are smaller than the weight (`mean_rank`)."""
    options, by_weight = model.options, dict[int, LowRank]()
    for choice in model.choices:
        if not options.mean_rank or not matching(choice.name, options.train) or matching(choice.name, options.frozen):
            continue
        parts = []
        for name, module, attribute, tied in layers.held_weights(choice.layer):
            weight = module._parameters.get(attribute)
            if weight is None or not is_smaller(weight, module, options.mean_rank):
                continue  # a parametrised weight is not ours to change; a small one moves freely
            if tied not in by_weight:
                by_weight[tied] = change = LowRank(module, weight, options.mean_rank)
                # Not by ModuleDict's own setter, which refuses layers called "keys" or "values".
                model.low_rank._modules[slot(choice.name, name)] = change
            parts.append((module, attribute, by_weight[tied]))
        if parts:
            model.changed += parts
            model.low_rank_hooks.append(hooks := LowRankMeans(parts))
            model.add_hook(choice.layer, hooks.after, before=hooks.before)
