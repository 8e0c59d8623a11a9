"""Record a function of tensors as one CUDA graph, so that none of its kernels waits for Python."""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from undrift._errors import CannotRecord

T = TypeVar("T")
_SETTLING = 3  # calls before the recording, in which kernels are compiled and an optimiser makes its state


class Captured(Generic[T]):
    """A function of tensors that a GPU repeats by itself.

    The first three calls run as usual. The fourth is recorded; it and all later ones replay the same kernels without
    Python between them. Each replay has new noise and moves kept statistics, as a usual call does. Tensors that are not
    on a GPU, or have other shapes than in the first call, run as usual.

    A replay returns the same tensors each time, and the next one overwrites them.

    Args:
        step: forward, loss, backward and optimiser (with `capturable=True`). It must not read values back (`item`,
            `if loss > …`), because no Python runs in a replay.

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
        self._kinds = self._kinds or kinds  # of the first call: a short last batch is never recorded
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
        # On a side stream, as a recording is: autograd remembers the stream of a tensor's gradient.
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
            # A stream of this GPU: torch's default for recordings belongs to whichever GPU recorded first. And other
            # threads may do what a recording must not: a loader's thread pins memory.
            side = _side_stream(tensors[0].device, "recording")
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._output = self.step(*self._inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(
                f"the step cannot be recorded as a CUDA graph ({reason(error)}); needed: a step that reads no values "
                "back, and an optimiser with capturable=True. Change that, or call the step itself, in a new process: "
                "PyTorch's generator on this GPU still believes that it is in a recording."
            ) from error
        finally:
            torch.cuda.set_stream(current)  # a recording that fails leaves its own stream in place
        self._graph = graph


@cache
def _side_stream(device: torch.device, _what: str) -> torch.cuda.Stream:
    """Return the same stream every time: libraries keep a workspace for each, and freed memory stays with it."""
    return torch.cuda.Stream(device)


def reason(error: BaseException) -> str:
    """Return what went wrong in a recording: the error before the one that its end raises, which says less."""
    first = error.__context__
    return str(first if isinstance(first, RuntimeError) else error).partition("\n")[0]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
