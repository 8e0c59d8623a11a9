"""The functions on a CPU: ε is drawn in pieces that fit the cores' caches, in place, in y's own memory order.

A pair of numbers takes nearly thirty operators. Over a whole tensor each of them is a pass over memory; here a piece
goes through all of them before the next.

√plane·ε is kept for the backward pass, because a CPU has enough memory. There is no second derivative.
"""

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from undrift.kernels import reference
from undrift.kernels.epsilon import BITS, COSINE, JOINED, SINE, columns, rows, signed
from undrift.kernels.layout import dense
from undrift.kernels.reference import by_channel


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1)."""
    total: Tensor = _CpuSquareSum.apply(x, groups, last)  # type: ignore[no-untyped-call]
    return total


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype."""
    out: Tensor = _CpuAddNoise.apply(y, plane, log_var, key, first_row, groups, last)  # type: ignore[no-untyped-call]
    return out


class _CpuSquareSum(Function):
    """PyTorch's operators, with a gradient from x as it is: autograd would keep 2·x, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        return reference.square_sum(x, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return reference.square_sum_gradient(grad, x, *ctx.settings), None, None


class _CpuAddNoise(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plane: Tensor, log_var: Tensor, *settings: Any) -> Tensor:
        out, kept = noisy(y, plane, log_var, *settings)
        ctx.save_for_backward(plane, log_var, kept)
        ctx.settings = settings[2:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plane, log_var, kept = ctx.saved_tensors
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[1:3]):
            grads = noise_gradients(grad, kept, plane, log_var, *ctx.settings)
        return grad, *grads, None, None, None, None


def noise(y: Tensor, plane: Tensor, key: Tensor, first_row: int, groups: int, last: bool) -> Tensor:
    """Return √plane·ε for an output like y, in y's memory order (a `dense` one) and plane's dtype."""
    along = last or not y.is_contiguous()  # channels are neighbours in memory: each position is a vector
    drawn = torch.empty(y.shape if last or not along else y.movedim(1, -1).shape, **FLOAT)
    positions = (y.shape[1:-1] if last else y.shape[2:]).numel()
    # Both numbers of a pair have one energy, unless they are of two groups.
    inside = plane.dtype is torch.float32 and (last or groups == 1)
    seen = (-1, drawn.shape[-1], 1) if along else (len(y), y.shape[1], positions)
    energy = plane.reshape(*((-1, 1, 1) if along else (len(y), 1, positions))) if inside else None
    fill(drawn.view(seen), key, first_row * positions, energy)
    out = drawn if last or not along else drawn.movedim(-1, 1)
    if inside:
        return out
    out = out.to(plane.dtype)
    if last or groups == 1:
        return out.mul_(plane.sqrt())
    out.unflatten(1, (groups, -1)).mul_(plane.sqrt().unsqueeze(2))
    return out


def noisy(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return y + σ·√plane·ε and, to keep for the backward pass, √plane·ε; in y's memory order, where it is `dense`."""
    y = y if y.is_contiguous() else dense(y, last)
    kept = noise(y, plane, key, first_row, groups, last)
    sigma = by_channel(_sigma(log_var, plane), y.shape, last)
    # Added in float32 or better, rounded once.
    return torch.addcmul(y.to(kept.dtype), kept, sigma).to(y.dtype), kept


def noise_gradients(
    grad: Tensor, kept: Tensor, plane: Tensor, log_var: Tensor, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var from what the forward pass kept."""
    if grad.stride() != kept.stride():  # one copy: sums over two orders at once would take longer
        grad = torch.empty_like(kept, dtype=grad.dtype).copy_(grad)
    pull = grad * kept
    sigma = _sigma(log_var, plane)
    if last or not kept.is_contiguous():
        vectors = (pull if last else pull.movedim(1, -1)).flatten(0, -2)
        by_kernel = vectors.sum(0)
        if groups == 1:
            with torch.autocast("cpu", enabled=False):  # a backward pass inside it would multiply in bfloat16
                by_position = (vectors @ sigma).view_as(plane)
        else:
            sums = vectors.unflatten(1, (groups, -1)).mul_(sigma.view(groups, -1)).sum(2)
            by_position = sums.view(len(grad), -1, groups).movedim(2, 1).reshape(plane.shape)
    else:
        flat = pull.flatten(2)
        by_kernel = flat.sum(2).sum(0)
        by_position = flat.unflatten(1, (groups, -1)).mul_(sigma.view(groups, -1, 1)).sum(2).view_as(plane)
    # √plane·ε stands where ε should: divided by plane it is ε / √plane. Where plane is 0 it is 0, whatever divides it.
    grad_plane = (0.5 * by_position).div_(plane.clamp_min(torch.finfo(plane.dtype).smallest_normal))
    return grad_plane, (0.5 * sigma * by_kernel).to(log_var.dtype)


def _sigma(log_var: Tensor, plane: Tensor) -> Tensor:
    return (0.5 * log_var).exp().to(plane.dtype)


# Pairs a thread: few enough for a shared cache, many enough that thirty calls of PyTorch's weigh little beside them.
PIECE = 1 << 17
# Said each time: torch has defaults that a user may change.
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
WORD: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
_own = threading.local()


@torch.inference_mode()  # less of PyTorch's between a call and its loop; what is written to was made outside
def fill(out: Tensor, key: Tensor, first_row: int, energy: Tensor | None = None) -> None:
    """Write ε, or √energy·ε, into images × channels × positions; energy has one channel. Vectors have one position."""
    images, channels, positions = out.shape
    half = (channels + 1) // 2
    row = rows(key, images * positions, first_row).view(images, 1, positions)
    column = columns(key, half)[:, None]
    for image, channel, place in _pieces(images, half, positions):
        first = out[image, channel, place]
        second = out[image, half + channel.start : half + channel.stop, place]
        torch.bitwise_xor(row[image, :, place], column[channel], out=_buffers(first.numel())[0].view(first.shape))
        _draw(first, second, None if energy is None else energy[image, :, place])


def _pieces(images: int, half: int, positions: int) -> Iterator[tuple[slice, slice, slice]]:
    """Give some images, or some channels of one image, or some positions of one channel, until all were given."""
    most = PIECE * torch.get_num_threads()
    wide = max(1, min(positions, most))
    high = max(1, min(half, most // wide))
    together = max(1, most // max(1, high * wide)) if high >= half and wide >= positions else 1
    for image in range(0, images, together):
        for channel in range(0, half, high):
            for place in range(0, positions, wide):
                yield (
                    slice(image, image + together),
                    slice(channel, min(half, channel + high)),
                    slice(place, place + wide),
                )


class _Constants:
    """Numbers as tensors: beside a tensor PyTorch makes one of each Python number, which takes longer than the rest."""

    def __init__(self) -> None:
        def words(*of: int) -> list[Tensor]:
            return [torch.tensor(signed(word), **WORD) for word in of]

        self.first, self.second = words(*JOINED.factors)
        self.shift, self.mask = words(JOINED.shifts[0], 2 ** (32 - JOINED.shifts[0]) - 1)
        self.fraction, self.others = words(2**BITS - 1, 32 - BITS)
        # u − 1 at a radius of 0 bits: exact, as u is.
        self.least = torch.tensor(0.5 * 2.0**-BITS - 1, **FLOAT)
        self.start = torch.tensor(-1.0, **FLOAT)
        # For the natural logarithm: log1p takes less time than log2.
        self.sine, self.cosine = (
            tuple(torch.tensor(c / math.sqrt(math.log(2)), **FLOAT) for c in of) for of in (SINE, COSINE)
        )


def _buffers(size: int) -> tuple[Tensor, ...]:
    """Return four of this thread's buffers, of that size, as words and as numbers."""
    if getattr(_own, "size", 0) < size:
        # They outlive the call: what inference mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            _own.whole = [torch.empty(size, **WORD) for _ in range(4)]
            _own.constants = _Constants()
        _own.size, _own.views = size, ()
    if not _own.views or len(_own.views[0]) != size:
        words = [b[:size] for b in _own.whole]
        _own.views = (*words, *(b.view(torch.float32) for b in words))
    views: tuple[Tensor, ...] = _own.views
    return views


def _draw(first: Tensor, second: Tensor, energy: Tensor | None) -> None:
    """Write pairs for the words in the first buffer: sines into first, cosines into second, which may be shorter."""
    z, spare, _, _, value, square, angle, radius = _buffers(first.numel())
    k = _own.constants
    z.mul_(k.first)
    # >> keeps the sign of an int32; the mixer shifts zeros in.
    z.bitwise_xor_(torch.bitwise_right_shift(z, k.shift, out=spare).bitwise_and_(k.mask)).mul_(k.second)
    radius.copy_(torch.bitwise_and(z, k.fraction, out=spare))
    torch.add(k.least, radius, alpha=2.0**-BITS, out=radius).log1p_()
    if energy is None:
        radius.neg_()
    else:
        radius.view(first.shape).mul_(-energy)
    radius.sqrt_()
    angle.copy_(torch.bitwise_right_shift(z, k.others, out=spare).bitwise_and_(k.fraction))
    torch.add(k.start, angle, alpha=2.0 ** (1 - BITS), out=angle)
    torch.mul(angle, angle, out=square)
    _polynomial(k.cosine, square, value)
    height = second.shape[1]
    torch.mul(value.view(first.shape)[:, :height], radius.view(first.shape)[:, :height], out=second)
    radius.mul_(angle)
    _polynomial(k.sine, square, value)
    torch.mul(value.view(first.shape), radius.view(first.shape), out=first)


def _polynomial(coefficients: tuple[Tensor, ...], square: Tensor, out: Tensor) -> None:
    torch.add(coefficients[-2], square, alpha=float(coefficients[-1]), out=out)
    for c in reversed(coefficients[:-2]):
        torch.addcmul(c, out, square, out=out)
