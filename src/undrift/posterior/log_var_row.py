"""The log-variances of all layers as one row, so that noise and KL give them one gradient and not two to be added.

Each log-variance is used twice in a step: by its layer's noise, and by the KL. Left to autograd, their gradients are
two tensors a layer and a third kernel that adds them: a hundred launches of a few numbers each. Here all layers' noise
writes into one row, the KL's gradient is another, and one kernel adds the two.

What a node of noise depends on in autograd is a `handle`, a number that nobody reads: it has no gradient, but tells
autograd that the row's node comes after all others.
"""

from collections.abc import Callable, Sequence
from operator import add, is_
from typing import Any

import torch
from torch import Tensor, nn

from undrift.kernels.triton import native
from undrift.posterior.tensor_guard import likeness


class Gradients:
    """What layers have written in a backward pass, until the row's node takes it."""

    __slots__ = ("found", "like", "log_vars", "native", "sizes", "spent")

    def __init__(self, like: Tensor, sizes: tuple[int, ...], log_vars: Sequence[Tensor]) -> None:
        self.like, self.sizes, self.log_vars = like, sizes, log_vars
        self.spent = False  # a backward pass has come through: log-variances may have been moved since
        self.found: dict[int, tuple[Tensor, tuple[Tensor, ...], set[int]]] = {}
        # The same for nodes that are not Python's; all of a pass write into one.
        self.native: Any = None if native.module is None else native.module.written(like, sizes)

    def of(self, place: int, node: Any) -> Tensor:
        """Return where the layer at a place is to write its log-variances' gradient in this backward pass.

        Args:
            node: the row's. A pass that does not come to it, one for other tensors, leaves nothing here.
        """
        if not torch._C._will_engine_execute_node(node):
            return torch.empty_like(self.log_vars[place])
        if self.native is not None:
            there: Tensor = native.module.place(self.native, place)
            return there
        task = torch._C._current_graph_task_id()
        held = self.found.get(task)
        if held is None:
            row = torch.empty_like(self.like)
            held = self.found[task] = (row, row.split(self.sizes), set())
        held[2].add(place)
        return held[1][place]

    def _taken(self) -> tuple[Tensor, tuple[Tensor, ...], set[int]] | None:
        if self.native is None:
            return self.found.pop(torch._C._current_graph_task_id(), None)
        held = native.module.take(self.native)
        return None if held is None else (held[0], held[0].split(self.sizes), held[1])

    def taken(self, more: Tensor | None) -> Sequence[Tensor | None]:
        """Return each log-variance's gradient in this backward pass; `more` is the row's own, the KL's."""
        self.spent = True
        held = self._taken()
        if held is None:
            return [None] * len(self.sizes) if more is None else more.split(self.sizes)
        row, pieces, written = held
        if torch.is_grad_enabled():  # somebody wants the KL's gradient differentiated
            pieces = _once(pieces)
            if more is not None:
                pieces = tuple(map(add, pieces, more.split(self.sizes)))
        elif more is not None:
            row += more
        if len(written) < len(pieces):  # what no layer has written is nobody's memory
            own: list[Tensor | None] = list(pieces)
            for place in {*range(len(pieces))} - written:
                start = sum(self.sizes[:place])
                own[place] = None if more is None else more[start : start + self.sizes[place]]
                if more is None and self.log_vars[place]._backward_hooks:
                    own[place] = torch.zeros_like(pieces[place])  # a user's hook is not to be given None
            return own
        return pieces


def _once(pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients that have none themselves, and say so: a noise's node is differentiated once."""
    message = b"trying to differentiate twice a function that was marked with @once_differentiable"
    with torch.enable_grad():
        error = torch._C._functions.DelayedError(message, len(pieces))
        found: tuple[Tensor, ...] = error(*(piece.detach().requires_grad_() for piece in pieces))
    return found


class Row:
    """The log-variances of one forward pass.

    Attributes:
        log_vars: each of them, in the order of their weights' numbers.
        values: all of them, one after the other.
        handle: what the nodes of their noise depend on.
        gradients: where these write.
    """

    __slots__ = ("gradients", "handle", "log_vars", "values", "versions")

    def __init__(self, log_vars: list[Tensor], gradients: Gradients) -> None:
        self.log_vars, self.versions = log_vars, [v._version for v in log_vars]
        self.gradients = gradients
        self.values, self.handle = _apply(gradients, *log_vars)  # type: ignore[no-untyped-call]

    def holds(self, log_vars: Sequence[Tensor]) -> bool:
        """Return whether these are its log-variances, with the values that they had.

        A version is not enough: an optimiser's fused kernels move none.
        """
        if self.gradients.spent or not all(map(is_, log_vars, self.log_vars)) or len(log_vars) != len(self.log_vars):
            return False
        return log_vars[0].device == self.values.device and [v._version for v in log_vars] == self.versions


class Rows:
    """Makes the row of each pass, where there can be one: of vectors, all trained, of one device and dtype.

    Args:
        noises: a network's, in the order of their numbers.
    """

    def __init__(self, noises: nn.ModuleDict) -> None:
        self.noises = noises
        self._alike: Callable[..., bool] | None = None
        self._made: tuple[Tensor, tuple[int, ...]] | None = None

    def next(self) -> Row | None:
        """Return the log-variances as they are now."""
        log_vars: list[Any] = [noise._parameters.get("log_var") for noise in self.noises._modules.values()]
        if self._alike is None or not self._alike(*log_vars):
            fit = fits(log_vars)
            self._alike = likeness(*log_vars) if fit else None
            self._made = None if not fit else (spread(log_vars), tuple(v.numel() for v in log_vars))
        return None if self._made is None else Row(log_vars, Gradients(*self._made, log_vars))

    def __getstate__(self) -> dict[str, Any]:
        return {"noises": self.noises, "_alike": None, "_made": None}


def fits(log_vars: Sequence[Tensor | None]) -> bool:
    """Return whether these can be a row. Kernels write gradients at multiples of 16 bytes."""
    first = log_vars[0] if log_vars else None
    return first is not None and all(
        v is not None and type(v) is nn.Parameter and v.ndim == 1 and v.numel() > 0 and v.requires_grad
        and v.dtype == first.dtype and v.device == first.device
        and (v.numel() * v.element_size() % 16 == 0 or i == len(log_vars) - 1)
        for i, v in enumerate(log_vars)
    )  # fmt: skip


def spread(log_vars: Sequence[Tensor]) -> Tensor:
    """Return one number, spread: rows like it are made in half the time that sizes, dtype and device take."""
    return log_vars[0].detach().new_empty(1).expand(sum(v.numel() for v in log_vars))


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *log_vars: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return torch.cat(log_vars), log_vars[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, more: Tensor | None, _handle: None) -> Any:
        return None, *ctx.gradients.taken(more)


# Past Function's own apply: it asks each tensor for functorch, in which no pass begins.
_apply = super(torch.autograd.Function, _Joined).apply
