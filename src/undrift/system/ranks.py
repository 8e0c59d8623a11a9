"""Share each batch among the processes of `torch.distributed`, and join their outputs.

Every process holds the whole network and runs it on a part of each batch. Outputs are joined before the loss, so that
each process sees all rows of the batch, computes the same loss, and takes the same step. Without a process group, one
process has everything.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from undrift._errors import DataError, ProcessLost

Rows = TypeVar("Rows", list[int], Tensor)

AT_ONCE = 2**25
"""Bytes of tensors that travel in one message: a copy of all gradients would be another network."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_FAILED = -1  # in place of a number of rows


def world_size() -> int:
    """Return how many processes there are, 1 where nothing is distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank, 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def part(rows: Rows) -> Rows:
    """Return this process's part of a batch: a run of its rows, as long as everybody's or one shorter."""
    first, last = part_of(len(rows), rank(), world_size())
    return rows[first:last]


def part_of(rows: int, number: int, count: int) -> tuple[int, int]:
    """Return where one of `count` parts begins and ends; the parts lie in order, and their sizes differ by one at most.

    Examples:
        >>> [part_of(8, number, 3) for number in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    return number * rows // count, (number + 1) * rows // count


@contextmanager
def background_threads() -> Iterator[None]:
    """Start threads, such as gloo's, that never interrupt a thread which computes (on Linux; else nothing).

    A message wakes a thread of gloo, which spins while another thread is inside gloo. If it interrupts that one on the
    same core, it spins until its time is over: a tenth of a step, if each process has one core.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass(frozen=True)
class Share:
    """How the rows of one batch lie on the processes, in the order of ranks.

    Attributes:
        rows: the number of rows of each process.
        rank: this process.
        alike: whether every process has the whole batch instead, because it has too few rows for all of them.
    """

    rows: tuple[int, ...]
    rank: int
    alike: bool = False

    @property
    def own(self) -> int:
        """Number of this process's rows."""
        return self.rows[self.rank]

    @property
    def first(self) -> int:
        """Where this process's rows begin in the batch."""
        return 0 if self.alike else sum(self.rows[: self.rank])

    def whole(self, mine: Tensor) -> Tensor:
        """Return the rows of all processes, given this one's; each process then has to ask the same of them.

        The gradient goes to this process's rows. Summed over the processes, those of parameters are the batch's.
        """
        return _Whole.apply(mine, self) if mine.requires_grad else self.join(mine)  # type: ignore[no-untyped-call]

    def join(self, mine: Tensor) -> Tensor:
        """Return the rows of all processes, without a gradient."""
        if self.alike:
            return mine
        padded = mine.new_zeros(max(self.rows), *mine.shape[1:])
        padded[: len(mine)] = mine.detach()
        return torch.cat([each[:rows] for each, rows in zip(_all_gather(padded), self.rows, strict=True)])

    def picked(self, mine: Tensor, kept: Tensor) -> Tensor:
        """Return the rows of the whole batch that a mask keeps, in every process."""
        if self.alike or not bool(kept.any()):
            return mine[kept.to(mine.device)] if self.alike else mine[:0]
        masks = kept.split(self.rows)
        of_all = Share(tuple(int(mask.sum()) for mask in masks), self.rank)
        return of_all.join(mine[masks[self.rank].to(mine.device)])

    def each(self, mine: Tensor) -> Tensor:
        """Return a tensor of each process as one row: this one's alone where the processes have the same batch."""
        return mine[None] if self.alike else torch.stack(_all_gather(mine))

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        return mine if self.alike else sum_over_processes([mine.clone()])[0]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return mine.view_as(mine) if share.alike else share.join(mine)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        share = ctx.share
        if share.alike:  # every process finds all of it, and they are added up
            return gradient / len(share.rows), None
        return gradient[share.first : share.first + share.own], None


# Batches ------------------------------------------------------------------------------------------------------------


def share_rows(images: Tensor, places: Tensor) -> tuple[Share, Tensor, Tensor]:
    """Return how a batch lies on the processes, this one's images, and the places of all.

    Where a process has none, as of a small last batch, each gets the whole batch.

    Args:
        images: this process's part of the batch.
        places: of these, int64 on the CPU; they may be more than the images (those that were left out).
    """
    shape = [images.ndim, *images.shape[1:]] if len(images) else [0]
    facts = torch.zeros(12, dtype=torch.int64)
    facts[:3] = torch.tensor([len(images), len(places), _DTYPES.index(images.dtype) if len(images) else 0])
    facts[3 : 3 + len(shape)] = torch.tensor(shape)
    found = torch.stack(_all_gather(facts)).tolist()
    if any(row[0] == _FAILED for row in found):
        raise DataError(_first_text(""))
    rows = tuple(row[0] for row in found)
    share = Share(rows, rank())
    everywhere = Share(tuple(row[1] for row in found), rank()).join(places)
    if min(rows) or not sum(rows):
        return share, images, everywhere
    _, _, dtype, ndim, *sizes = max(found)
    images = images.to(_DTYPES[dtype]) if len(images) else images.new_zeros(0, *sizes[: ndim - 1], dtype=_DTYPES[dtype])
    return Share((sum(rows),) * len(rows), rank(), alike=True), share.join(images), everywhere


def divide(batch: Tensor) -> tuple[Share | None, Tensor]:
    """Return how a batch that every process holds is divided among them, and this one's part of it."""
    count = world_size()
    if count == 1 or len(batch) < count:
        return (None if count == 1 else Share((len(batch),) * count, rank(), alike=True)), batch
    bounds = (part_of(len(batch), number, count) for number in range(count))
    return Share(tuple(last - first for first, last in bounds), rank()), part(batch)


def tell_failure(error: Exception) -> None:
    """Let the other processes, which wait for this one's part of a batch, raise its error too."""
    facts = torch.zeros(12, dtype=torch.int64)
    facts[0] = _FAILED
    _all_gather(facts)
    _first_text(str(error))


def _first_text(mine: str) -> str:
    """Return the first text of a process that is not empty."""
    return next((text for text in gather_texts(mine) if text), "")


# What processes say to each other --------------------------------------------------------------------------------


def sum_over_processes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add up tensors over all processes, in place."""
    _in_few_messages(tensors, lambda row: _call(dist.all_reduce, row, sent=row))
    return tensors


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Give tensors the values that they have in the first process, in place."""
    _in_few_messages(tensors, lambda row: _call(dist.broadcast, row, 0, sent=row))


@torch.no_grad()
def _in_few_messages(tensors: Sequence[Tensor], say: Callable[[Tensor], None]) -> None:
    """Change tensors in place by a collective, as many in one message as are alike."""
    if world_size() == 1:
        return
    tensors, waiting = sorted(tensors, key=lambda t: f"{t.dtype} {t.device}"), list[Tensor]()
    for number, tensor in enumerate(tensors):
        waiting.append(tensor)
        later = tensors[number + 1] if number + 1 < len(tensors) else None
        alike = later is not None and later.dtype == tensor.dtype and later.device == tensor.device
        if not alike or sum(t.numel() * t.element_size() for t in waiting) >= AT_ONCE:
            row = torch.cat([t.reshape(-1) for t in waiting])
            say(row := row.to(_place()) if dist.get_backend() == "nccl" else row)
            for t, values in zip(waiting, row.split([t.numel() for t in waiting]), strict=True):
                t.copy_(values.view(t.shape))
            waiting = []


def gather_texts(mine: str) -> list[str]:
    """Return the text of each process."""
    content = torch.frombuffer(bytearray(mine.encode() or b"\0"), dtype=torch.uint8)
    sizes = tuple(int(size) for size in torch.stack(_all_gather(torch.tensor([len(content)]))))
    joined = Share(sizes, rank()).join(content)
    return [bytes(each.numpy()).decode().rstrip("\0") for each in joined.split(sizes)]


def require_equal(mine: str, what: str) -> None:
    """Raise, in every process, unless all say the same.

    Args:
        what: they have to agree in, for the error.
    """
    if world_size() == 1:
        return
    marks = gather_texts(hashlib.blake2b(mine.encode(), digest_size=8).hexdigest())
    if len(set(marks)) > 1:
        others = [number for number, mark in enumerate(marks) if mark != marks[0]]
        raise DataError(
            f"process {', '.join(map(str, others))} of {len(marks)} has other {what} than process 0; needed: the same "
            "in all, as undrift itself divides each batch among them. Give every process the same, whole data set and "
            "network; to adapt to a data set each, start them without a process group."
        )


def _all_gather(mine: Tensor) -> list[Tensor]:
    """Return the tensor of each process; all have the same shape."""
    given = mine.detach().contiguous()
    if dist.get_backend() == "nccl":
        given = given.to(_place())
    flat = given.view(torch.uint8).reshape(-1) if given.ndim else given.reshape(1).view(torch.uint8)
    found = [torch.empty_like(flat) for _ in range(world_size())]
    _call(dist.all_gather, found, flat, sent=flat)
    return [each.view(given.dtype).view(given.shape).to(mine.device) for each in found]


def _place() -> torch.device:
    """Return the device that this process's messages have to be on with NCCL."""
    return torch.device("cuda", torch.cuda.current_device())


_sent = 0


def bytes_sent() -> int:
    """Return how many bytes this process has handed to the others since it started."""
    return _sent


def _call(collective: Callable[..., Any], *given: Any, sent: Tensor) -> None:
    global _sent  # a count per process, as the process group is
    try:
        collective(*given)
    except RuntimeError as error:
        found = re.sub(r"^\[.*?\] *", "", str(error).splitlines()[0])[:160]  # where in its source gloo is
        raise ProcessLost(
            f"another process of this run is gone ({found}); needed: all {world_size()} until the end. What it printed "
            "says why. With checkpoint=… a run goes on from its last whole step, with any number of processes."
        ) from error
    _sent += sent.numel() * sent.element_size()
