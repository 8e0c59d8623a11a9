"""Call Triton's kernels on tensors: which strides, how large a tile, how many programs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.fused.epsilon import signed

_TILE = 4096  # numbers a program holds at once: 32 a thread
_WIDEST = 128


@dataclass(frozen=True)
class View:
    """A tensor as positions × channels: sizes, strides, and how ε counts along channels and positions."""

    tensor: Tensor
    positions: int
    per_image: int
    members: int  # channels of a group
    groups: int
    strides: tuple[int, int, int]  # of image, channel, position in the image
    counts: tuple[int, int]  # of channel, position in the image

    @property
    def sizes(self) -> tuple[int, ...]:
        """The arguments that every kernel takes first."""
        return (self.positions, self.per_image, self.members, self.groups)

    def tile(self) -> tuple[int, int, int]:
        """Return BP, TOGETHER, WIDTH: positions, groups and channels of a group that a program holds at once."""
        width = min(_WIDEST, _power(self.members))
        while width > 32 and self.members % width:
            width //= 2  # no empty columns: a network's widths are multiples of 32 more often than powers of two
        along = self.strides[1] == 1 or self.per_image == 1  # channels are neighbours in memory
        if not along:
            width = min(width, 16)
        groups = min(_power(self.groups), max(1, (32 if along else 8) // width))
        block = max(16, _TILE // (width * groups))
        while block > 16 and self.positions // block * (self.groups // groups) < 512:
            block //= 2  # enough programs for every multiprocessor
        return block, groups, width


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def view(tensor: Tensor, groups: int, last: bool) -> View:
    """Return a tensor as positions × channels, copied only where its memory has neither order."""
    shape = tensor.shape
    if last:
        tensor = tensor.contiguous()
        channels, numbers = shape[-1], shape[1:].numel()
        per_image = numbers // max(1, channels)
        return View(
            tensor, tensor.numel() // max(1, channels), per_image, channels, 1, (numbers, 1, channels), (1, channels)
        )
    channels, per_image = shape[1], shape[2:].numel()
    numbers = channels * per_image
    if not tensor.is_contiguous():
        order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
        if order is not None and tensor.is_contiguous(memory_format=order):
            strides = (numbers, 1, channels)
            return View(tensor, shape[0] * per_image, per_image, channels // groups, groups, strides, (per_image, 1))
        tensor = tensor.contiguous()
    strides = (numbers, per_image, 1)
    return View(tensor, shape[0] * per_image, per_image, channels // groups, groups, strides, (per_image, 1))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32: batch × groups × positions (linear: …, 1)."""
    from undrift.fused.kernels import square_sum_kernel

    v = view(x, groups, last)
    out = x.new_empty((*x.shape[:-1], 1) if last else (x.shape[0], groups, *x.shape[2:]), dtype=torch.float32)
    if out.numel():
        block, together, width = v.tile()
        programs = _cdiv(v.positions, block) * _cdiv(v.groups, together)
        with _on(x):
            square_sum_kernel[(programs,)](
                v.tensor, out, *v.sizes, *v.strides, BP=block, TOGETHER=together, WIDTH=width
            )
    return out


def square_sum_gradient(grad: Tensor, x: Tensor, groups: int, last: bool) -> Tensor:
    """Return 2·x·grad in x's dtype and memory format."""
    from undrift.fused.kernels import square_sum_gradient_kernel

    v = view(x, groups, last)
    out = torch.empty_like(v.tensor)
    if out.numel():
        block, together, width = v.tile()
        programs = _cdiv(v.positions, block) * _cdiv(v.groups, together) * _cdiv(v.members, width)
        with _on(x):
            square_sum_gradient_kernel[(programs,)](
                v.tensor, grad.contiguous(), out, *v.sizes, *v.strides, BP=block, TOGETHER=together, WIDTH=width
            )
    return out


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε in y's dtype and memory format."""
    from undrift.fused.kernels import add_noise_kernel

    v = view(y, groups, last)
    out = torch.empty_like(v.tensor)
    if out.numel():
        block, together, width = v.tile()
        programs = _cdiv(v.positions, block) * _cdiv(v.groups, together) * _cdiv(v.members, width)
        origin = signed(first_row * y.shape[1:].numel())
        with _on(y):
            add_noise_kernel[(programs,)](
                v.tensor, plane.contiguous(), log_var, key, out, origin, *v.sizes, *v.strides, *v.counts,
                BP=block, TOGETHER=together, WIDTH=width,
            )  # fmt: skip
    return out


def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    from undrift.fused.kernels import noise_gradients_kernel

    v = view(grad, groups, last)
    plane = plane.contiguous()
    grad_plane = torch.empty_like(plane)
    if not grad.numel():
        return grad_plane.zero_(), torch.zeros_like(log_var)
    block, together, width = v.tile()
    rows = _cdiv(v.positions, block)
    partial = plane.new_empty(rows, v.members * v.groups)
    origin = signed(first_row * grad.shape[1:].numel())
    with _on(grad):
        noise_gradients_kernel[(rows * _cdiv(v.groups, together),)](
            v.tensor, plane, log_var, key, grad_plane, partial, origin, *v.sizes, *v.strides, *v.counts,
            BP=block, TOGETHER=together, WIDTH=width,
        )  # fmt: skip
    return grad_plane, partial.sum(0).to(log_var.dtype)


def _on(tensor: Tensor) -> torch.cuda.device:
    """Return a context in which the tensor's device is the current one, where Triton launches."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)
