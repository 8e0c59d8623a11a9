"""A step of one's own as one CUDA graph, so that none of its kernels waits for Python."""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from undrift._errors import CannotRecord

T = TypeVar("T")
_SETTLING = 3  # calls in which kernels are compiled and an optimiser makes its state


class Captured(Generic[T]):
    """A function of tensors that a GPU repeats by itself.

    The first three calls run as they are, the fourth is recorded, and it and all later ones are replayed: the same
    kernels, without Python between them. Noise is new at every replay, and kept statistics move, as in a call that is
    not replayed. Tensors elsewhere than on a GPU, and tensors of other shapes than the first call's, run as they are.

    What a replay returns are the same tensors each time: the next one writes over them.

    Args:
        step: forward, loss, backward and optimiser (with `capturable=True`); it must not read values back (`item`,
            `if loss > …`), as nothing of Python happens in a replay.

    Examples:
        >>> doubled = Captured(lambda x: 2 * x)
        >>> doubled(torch.ones(2))  # on a CPU the function itself
        tensor([2., 2.])
    """

    def __init__(self, step: Callable[..., T]) -> None:
        self.step, self.calls = step, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kinds: list[tuple[object, ...]] = []
        self._inputs: tuple[Tensor, ...] = ()
        self._output: T | None = None

    @property
    def recorded(self) -> bool:
        """Whether there is a graph that calls replay."""
        return self._graph is not None

    def __call__(self, *tensors: Tensor) -> T:
        """Take the step."""
        if not tensors or not all(t.is_cuda for t in tensors):
            return self.step(*tensors)
        kinds = [_kind(t) for t in tensors]
        self._kinds = self._kinds or kinds  # the first call's: a short last batch is never what is recorded
        if kinds != self._kinds:
            return self.step(*tensors)
        if self._graph is None:
            self.calls += 1
            with torch.cuda.device(tensors[0].device):
                if self.calls <= _SETTLING:
                    return self._aside(tensors)
                self._record(tensors)
        for mine, given in zip(self._inputs, tensors, strict=True):
            mine.copy_(given)
        assert self._graph is not None
        self._graph.replay()
        return self._output  # type: ignore[return-value]

    def _aside(self, tensors: tuple[Tensor, ...]) -> T:
        # As a recording does: autograd remembers which stream a tensor's gradient comes in.
        side = _side_stream(tensors[0].device, "settling")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = self.step(*tensors)
        torch.cuda.current_stream().wait_stream(side)
        return output

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        graph, self._inputs = torch.cuda.CUDAGraph(), tuple(t.detach().clone() for t in tensors)
        current = torch.cuda.current_stream()
        try:
            # A stream of this GPU: torch's own for recordings is of whichever GPU was first. And other threads may do
            # what we must not meanwhile: a loader's pins memory.
            side = _side_stream(tensors[0].device, "recording")
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._output = self.step(*self._inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(
                f"the step cannot be recorded as a CUDA graph ({reason(error)}); needed: a step that reads no values "
                "back, and an optimiser with capturable=True. Change that, or call the step itself, in a new process: "
                "PyTorch's generator on this GPU takes itself to be still in the recording."
            ) from error
        finally:
            torch.cuda.set_stream(current)  # one that fails stays in its own
        self._graph = graph


@cache
def _side_stream(device: torch.device, _what: str) -> torch.cuda.Stream:
    """Return always the same stream: libraries keep workspaces for each, and freed memory stays with it."""
    return torch.cuda.Stream(device)


def reason(error: BaseException) -> str:
    """Return what went wrong in a recording: its end, which fails then too, says less than what came before."""
    first = error.__context__
    return str(first if isinstance(first, RuntimeError) else error).partition("\n")[0]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
