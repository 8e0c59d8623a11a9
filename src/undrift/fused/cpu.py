"""The fused functions on a CPU: ε is drawn in pieces that stay in the cores' caches, in place, in y's memory order.

Thirty operators make ε. Over a whole tensor each of them is a pass over memory; here a piece goes through all of them
before the next. What the backward pass needs, √plane·ε, is kept: memory is not what a CPU lacks.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from undrift.fused import tiles
from undrift.fused.epsilon import ANGLE_BITS, COSINE, FACTORS, HALF, SHIFTS, SINE, signed
from undrift.fused.plain import by_channel

# Pairs a thread: few enough for a shared cache, and many enough that forty calls of PyTorch's weigh little beside them.
PIECE = 1 << 17
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Said each time: torch has defaults that a user may change.
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
WORD: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
_own = threading.local()


def supports(*tensors: Tensor) -> bool:
    """Return whether these tensors can be worked on here: real numbers on a CPU, in any memory order."""
    return all(t.device.type == "cpu" and t.dtype in _DTYPES for t in tensors)


@torch.no_grad()
def normal(key: Tensor, shape: torch.Size, first_row: int) -> Tensor:
    """Return what `epsilon.normal` returns, up to rounding."""
    low, high = _words(key)
    out = torch.empty(shape, **FLOAT)
    rows, numbers = shape[0], shape[1:].numel()
    half = (numbers + 1) // 2
    flat = out.view(rows, numbers)
    # A piece is some rows' pairs, or a part of one row's.
    most = PIECE * torch.get_num_threads()
    together = max(1, most // max(1, half))
    step = max(1, half if together > 1 else min(half, most))
    for row in range(0, rows, together):
        some = flat[row : row + together]
        for column in range(0, half, step):
            end = min(half, column + step)
            first = some[:, column:end]
            counters = _buffers(first.numel())[0].view_as(first)
            start = signed((first_row + row) * half + column + low)
            _draw(first, some[:, half + column : half + end], counters, start, signed(high))
    return out


@torch.no_grad()
def normal_last(key: Tensor, shape: torch.Size, first_row: int) -> Tensor:
    """Return what `normal` returns, in memory that has the channels (dimension 1) last."""
    channels, positions = shape[1], shape[2:].numel()
    if channels % 2:  # the sines end inside a channel
        return normal(key, shape, first_row).movedim(1, -1).contiguous().movedim(-1, 1)
    low, high = _words(key)
    out = torch.empty((shape[0], *shape[2:], channels), **FLOAT)
    vectors, half = out.view(-1, channels), channels // 2
    # The counter of image n, channel c, position p is (n · half + c) · positions + p.
    image = torch.arange(shape[0], **WORD)[:, None] * signed(half * positions)
    at = (image + torch.arange(positions, **WORD)).view(-1, 1)
    at += signed(first_row * half * positions + low)
    channel = torch.arange(half, **WORD) * positions
    step = max(1, PIECE * torch.get_num_threads() // max(1, half))
    for row in range(0, len(vectors), step):
        some = vectors[row : row + step]
        _draw(some[:, :half], some[:, half:], channel, at[row : row + step], signed(high))
    return out.movedim(-1, 1)


def _words(key: Tensor) -> tuple[int, int]:
    """Return the lower and upper word of a key."""
    word = int(key)
    return word % 2**32, (word >> 32) % 2**32


def _buffers(size: int) -> list[Tensor]:
    """Return this thread's counters and four more buffers of that size."""
    if getattr(_own, "size", 0) < size:
        # They outlive the call: what inference mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            _own.buffers = [torch.arange(size, **WORD), *(torch.empty(size, **WORD) for _ in range(4))]
            _own.sine, _own.cosine = (tuple(torch.tensor(c, **FLOAT) for c in of) for of in (SINE, COSINE))
        _own.size = size
    return [b[:size] for b in _own.buffers]


def _draw(first: Tensor, second: Tensor, columns: Tensor, rows: Tensor | int, high: int) -> None:
    """Write the pairs of the counters columns + rows: sines into first, cosines into second, which may be shorter.

    The key's lower word was added to rows; its upper word is high.
    """
    _, z, spare, third, fourth = _buffers(first.numel())
    torch.add(columns, rows, out=z.view_as(first))
    for step, shift in enumerate(SHIFTS):
        torch.bitwise_right_shift(z, shift, out=spare).bitwise_and_((1 << (32 - shift)) - 1)
        z.bitwise_xor_(spare)
        if step < len(FACTORS):
            z.mul_(signed(FACTORS[step]))
        if step == 0:
            z.add_(high)
    angle, radius, value = (b.view(torch.float32) for b in (third, fourth, spare))
    taken = ANGLE_BITS + 1
    torch.bitwise_right_shift(z, taken, out=spare).bitwise_and_((1 << (32 - taken)) - 1)
    radius.copy_(spare).mul_(2.0 ** (taken - 32)).add_(2.0 ** (taken - 33)).log2_().neg_().sqrt_()
    angle.copy_(torch.bitwise_and(z, 2**ANGLE_BITS - 1, out=spare)).sub_(HALF)
    # The bit above the angle is the cosine's sign: it goes where a float32 has its own.
    z.bitwise_left_shift_(31 - ANGLE_BITS).bitwise_and_(-(2**31)).bitwise_xor_(fourth)
    radius.mul_(angle)
    angle.mul_(angle)
    _polynomial(_own.sine, angle, value)
    torch.mul(value.view_as(first), radius.view_as(first), out=first)
    _polynomial(_own.cosine, angle, value)
    turned, width = z.view(torch.float32), second.shape[1]
    torch.mul(value.view_as(first)[:, :width], turned.view_as(first)[:, :width], out=second)


def _polynomial(coefficients: tuple[Tensor, ...], square: Tensor, out: Tensor) -> None:
    torch.add(coefficients[-2], square, alpha=float(coefficients[-1]), out=out)
    for c in reversed(coefficients[:-2]):
        torch.addcmul(c, out, square, out=out)


def noise(y: Tensor, plane: Tensor, key: Tensor, first_row: int, groups: int, last: bool) -> Tensor:
    """Return √plane·ε for an output like y, in y's memory order (a `dense` one) and plane's dtype."""
    if last:
        vectors = y.shape[1:-1].numel()
        drawn = normal(key, torch.Size((len(y) * vectors, y.shape[-1])), first_row * vectors).view(y.shape)
    else:
        drawn = (normal if y.is_contiguous() else normal_last)(key, y.shape, first_row)
    drawn = drawn.to(plane.dtype)
    if last or groups == 1:
        return drawn.mul_(plane.sqrt())
    drawn.unflatten(1, (groups, -1)).mul_(plane.sqrt().unsqueeze(2))
    return drawn


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return y + σ·√plane·ε and, to keep for the backward pass, √plane·ε; in y's memory order, where it is `dense`."""
    y = tiles.dense(y, last)
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
    # √plane·ε stands where ε should: divided by plane it is ε / √plane.
    positive = plane > 0
    grad_plane = torch.where(positive, 0.5 * by_position / torch.where(positive, plane, 1), 0)
    return grad_plane, (0.5 * sigma * by_kernel).to(log_var.dtype)


def _sigma(log_var: Tensor, plane: Tensor) -> Tensor:
    return (0.5 * log_var).exp().to(plane.dtype)
