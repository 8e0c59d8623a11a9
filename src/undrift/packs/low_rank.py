"""Shifts as a product of two thin factors: the largest singular values, or a mean that was learned as factors.

    shift ≈ rows · diag(scale) · columns,   rows: kernels × rank,   columns: rank × weights of a kernel

A component is one column of `rows`, its scale, and one row of `columns`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.packs.shift import Shift, as_rows, only, row_length


class LowRankShift(Shift):
    """A shift of low rank: factors of 8 bits with one scale per component, or of 32 bits."""

    kind = "low-rank"

    def __init__(self, rows: Tensor, scale: Tensor, columns: Tensor, shape: tuple[int, ...]) -> None:
        self.rows, self.scale, self.columns, self.shape = rows, scale, columns, shape

    @classmethod
    def of(cls, shift: Tensor, rank: int) -> "LowRankShift":
        """Return the `rank` largest singular values of a shift, its factors rounded to 8 bits."""
        u, s, v = torch.linalg.svd(as_rows(shift), full_matrices=False)
        kept = min(rank, len(s))
        root = s[:kept].sqrt()
        return cls.from_factors(u[:, :kept] * root, root.unsqueeze(1) * v[:kept], tuple(shift.shape)).rounded()

    @classmethod
    def from_factors(cls, rows: Tensor, columns: Tensor, shape: tuple[int, ...]) -> "LowRankShift":
        """Return the shift rows · columns, exactly: for a mean that was learned as two factors."""
        wide = [factor.detach().to(torch.float32).contiguous() for factor in (rows, columns)]
        return cls(wide[0], wide[0].new_ones(rows.shape[1]), wide[1], shape)

    def rounded(self) -> "LowRankShift":
        """Return it with factors of 8 bits, each component scaled to its largest entry."""
        highs = [self.rows.abs().amax(0), self.columns.abs().amax(1)]
        a, b = (high.clamp(min=torch.finfo(torch.float32).tiny) / 127 for high in highs)
        rows, columns = (self.rows / a).round(), (self.columns / b.unsqueeze(1)).round()
        return LowRankShift(rows.to(torch.int8), self.scale * a * b, columns.to(torch.int8), self.shape)

    def to(self, device: torch.device | str) -> "LowRankShift":
        """Return the same shift on a device."""
        return LowRankShift(self.rows.to(device), self.scale.to(device), self.columns.to(device), self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return factors and scales."""
        return {"rows": self.rows, "scale": self.scale, "columns": self.columns}

    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift."""
        wide = torch.promote_types(source.dtype, torch.float32)
        rows = self.rows.to(wide) * self.scale.to(wide)
        base = source.detach().to(wide).reshape(self.shape[0], -1)
        return torch.addmm(base, rows, self.columns.to(wide)).view(self.shape).to(source.dtype)

    def stored(self) -> dict[str, Tensor]:
        """Return factors and scales."""
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors().items()}

    def described(self) -> dict[str, Any]:
        """Return nothing: the tensors say it all."""
        return {}

    @classmethod
    def read(cls, shape: tuple[int, ...], described: Mapping[str, Any], stored: Mapping[str, Tensor]) -> "LowRankShift":
        """Return the shift that a file describes."""
        del described
        found = stored.get("rows")
        dtype = torch.int8 if found is not None and found.dtype == torch.int8 else torch.float32
        rank = 0 if found is None or found.ndim != 2 else found.shape[1]
        rows, scale, columns = only(
            stored,
            rows=(dtype, (shape[0], rank)),
            scale=(torch.float32, (rank,)),
            columns=(dtype, (rank, row_length(shape))),
        )
        return cls(rows, scale, columns, shape)
