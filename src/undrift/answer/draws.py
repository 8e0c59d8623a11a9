"""Run several draws in one forward pass by repeating the batch; each row gets its own noise."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.posterior.noise import Noise, Rerun
from undrift.posterior.perturbed import Perturbed
from undrift.system.private import BatchNorm

# Most rows per pass. A small batch leaves an accelerator idle, so ten draws take hardly longer than one. A CPU is busy
# with a few rows (WRN-40-2, two cores, batch 8: no measurable gain).
ON_ACCELERATOR, ON_CPU = 2048, 32
# Most input values per pass: early layers make tens of values of each, and kernels index with 32 bits.
NUMBERS = 2**28

# Input values that fitted into memory, for networks that ran out of it once, so that not every batch fails first.
_fitted: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()


def foldable(model: Perturbed) -> bool:
    """Return whether the rows of one pass are independent draws.

    They are not if one Δw serves the whole pass (drawn weights, attention, subclassed layers), or if a batch norm
    computes statistics of the pass, which would pool the draws.
    """
    pooled = any(norm.statistics in _OF_THE_PASS and isinstance(norm.layer, BatchNorm) for norm in model.norms)
    return not pooled and not any(getattr(hook, "__func__", None) in _DRAWN for _, hook in model._after)


_OF_THE_PASS = (None, "batch")
_DRAWN = (Noise.drawn, Rerun.drawn)


def limit_of(model: Perturbed, fold_limit: int | None) -> int | None:
    """Return the limit, or 0 if draws cannot share a pass."""
    _check(fold_limit)
    return fold_limit if foldable(model) else 0


def draw(
    model: nn.Module, draws: Sequence[Tensor], fold_limit: int | None, ask: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yield the logits of each pass; together they hold the rows of `draws`, in order.

    A pass takes as many draws as fit into `fold_limit` rows, at least one. A pass that runs out of memory is repeated
    with half as many draws, and the same noise as with a limit of that size.

    Args:
        draws: the images of each draw, all of them on the device.
        fold_limit: most rows per pass; 0 makes one pass per draw, None chooses.
        ask: returns the logits of images, one row each.
    """
    most = _draws_a_pass(model, draws, fold_limit)
    first = 0
    while first < len(draws):
        left = len(draws) - first
        count = math.ceil(left / math.ceil(left / most))  # equal passes: ten as 4, 3, 3, not 4, 4, 2
        part = draws[first : first + count]
        step = model.key.step.clone() if count > 1 and isinstance(model, Perturbed) else None
        logits = None
        try:
            logits = ask(part[0] if count == 1 else torch.cat(list(part)))
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        if logits is None:  # not in the except clause: there the error still holds the failed pass's tensors
            most = count // 2
            _fitted[model] = most * draws[0].numel()
            if step is not None and isinstance(model, Perturbed):
                model.key.step.copy_(step)
            continue
        yield logits
        first += count


def _check(fold_limit: int | None) -> None:
    if fold_limit is not None and (isinstance(fold_limit, bool) or not isinstance(fold_limit, int) or fold_limit < 0):
        raise OptionError(
            f"fold_limit={fold_limit!r} is not a whole number from 0 up. 0 makes one pass per draw, 200 puts as many "
            "draws into a pass as make 200 rows."
        )


def _draws_a_pass(model: nn.Module, draws: Sequence[Tensor], fold_limit: int | None) -> int:
    _check(fold_limit)
    images = draws[0]
    if len(draws) == 1 or len(images) == 0 or fold_limit == 0:
        return 1
    if not isinstance(model, Perturbed) or not foldable(model):
        return 1
    rows, size = fold_limit, images.numel() // len(images)
    if rows is None:
        rows = min(ON_CPU if images.device.type == "cpu" else ON_ACCELERATOR, NUMBERS // size)
    rows = min(rows, _fitted.get(model, rows * size) // size)
    # All at once if they fit, even if the last covers only a part of the batch.
    return len(draws) if sum(map(len, draws)) <= rows else max(1, rows // len(images))
