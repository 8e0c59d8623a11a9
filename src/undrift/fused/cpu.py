"""The fused functions on a CPU: ε is drawn in pieces that stay in the cores' caches, in place.

Thirty operators make ε. Over a whole tensor each of them is a pass over memory; here a piece goes through all of them
before the next. What the backward pass needs, √plane·ε, is kept: memory is not what a CPU lacks.
"""

import threading

import torch
from torch import Tensor

from undrift.fused.epsilon import ANGLE_BITS, COSINE, FACTORS, HALF, SHIFTS, SINE, signed
from undrift.fused.plain import by_channel

# Pairs a thread: few enough for a shared cache, and many enough that forty calls of PyTorch's weigh little beside them.
PIECE = 1 << 17
_own = threading.local()


def supports(*tensors: Tensor) -> bool:
    """Return whether these tensors can be worked on here: float32, in the order of their indices."""
    return all(t.dtype is torch.float32 and t.is_contiguous() for t in tensors)


@torch.no_grad()
def normal(key: Tensor, shape: torch.Size, first_row: int) -> Tensor:
    """Return what `epsilon.normal` returns, up to rounding."""
    word = int(key)
    low, high = word % 2**32, (word >> 32) % 2**32
    out = torch.empty(shape)
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
            start = (first_row + row) * half + column + low
            _draw(some[:, column:end], some[:, half + column : half + end], signed(start), signed(high))
    return out


def _buffers(size: int) -> list[Tensor]:
    """Return this thread's counters and four more buffers of that size."""
    if getattr(_own, "size", 0) < size:
        _own.size = size
        _own.buffers = [
            torch.arange(size, dtype=torch.int32),
            *(torch.empty(size, dtype=torch.int32) for _ in range(4)),
        ]
        _own.sine, _own.cosine = (tuple(torch.tensor(c) for c in of) for of in (SINE, COSINE))
    return [b[:size] for b in _own.buffers]


def _draw(first: Tensor, second: Tensor, start: int, high: int) -> None:
    """Write the pairs of the counters start, start + 1, …: sines into first, cosines into second, which may be shorter.

    The key's lower word was added to start; its upper word is high.
    """
    count, z, spare, third, fourth = _buffers(first.numel())
    torch.add(count, start, out=z)
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


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return y + σ·√plane·ε and, to keep for the backward pass, √plane·ε."""
    vectors = y.shape[1:-1].numel()
    if last:
        kept = normal(key, torch.Size((len(y) * vectors, y.shape[-1])), first_row * vectors).view(y.shape)
    else:
        kept = normal(key, y.shape, first_row)
    if last or groups == 1:
        kept.mul_(plane.sqrt())
    else:
        kept.unflatten(1, (groups, -1)).mul_(plane.sqrt().unsqueeze(2))
    return torch.addcmul(y, kept, by_channel((0.5 * log_var).exp(), y.shape, last)), kept


def noise_gradients(
    grad: Tensor, kept: Tensor, plane: Tensor, log_var: Tensor, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var from what the forward pass kept."""
    pull = grad * kept
    sigma = (0.5 * log_var).exp()
    if last:
        by_kernel = pull.flatten(0, -2).sum(0)
        by_position = (pull @ sigma).unsqueeze(-1)
    else:
        flat = pull.flatten(2)
        by_kernel = flat.sum(2).sum(0)
        by_position = flat.unflatten(1, (groups, -1)).mul_(sigma.view(groups, -1, 1)).sum(2).view_as(plane)
    # √plane·ε stands where ε should: divided by plane it is ε / √plane.
    positive = plane > 0
    return torch.where(positive, 0.5 * by_position / torch.where(positive, plane, 1), 0), 0.5 * sigma * by_kernel
