"""A captured step without a GPU: what is recorded when, others playing CUDA's part; tests/test_gpu.py has the rest."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import undrift


def test_on_a_cpu_every_call_is_the_step_itself() -> None:
    seen: list[Tensor] = []

    def step(x: Tensor) -> int:
        seen.append(x)
        return len(seen)

    fast = undrift.Captured(step)
    batches = [torch.full((size,), float(size)) for size in (2, 2, 3, 2, 2)]
    assert [fast(batch) for batch in batches] == [1, 2, 3, 4, 5]
    assert all(got is given for got, given in zip(seen, batches, strict=True))
    assert undrift.Captured(lambda: "nothing")() == "nothing"


class OnGpu(Tensor):
    """A tensor that says it is elsewhere."""

    is_cuda = True


class Graph:
    """A recording that counts its replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class Stream:
    """A stream that need not be waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return a list; what is put there is raised while recording."""
    errors: list[Exception] = []

    @contextmanager
    def recording(_graph: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        # Of this GPU; and other threads may do what they want.
        assert isinstance(stream, Stream)
        assert capture_error_mode == "thread_local"
        yield
        if errors:
            raise errors[0]

    parts = {"CUDAGraph": Graph, "graph": recording, "Stream": Stream, "current_stream": Stream}
    others = {"stream": nullcontext, "device": nullcontext, "set_stream": lambda _stream: None}
    for name, part in {**parts, **others}.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return errors


def batch(size: int, value: float = 0.0) -> Tensor:
    return torch.full((size, 6), value).as_subclass(OnGpu)


def test_three_calls_settle_and_the_fourth_of_their_shape_is_recorded(failing: list[Exception]) -> None:
    assert not failing
    sizes: list[int] = []
    fast = undrift.Captured(lambda x: sizes.append(len(x)) or len(x))
    # Epochs of four batches, the last of them short: it is the fourth call, and not what is recorded.
    for size in (4, 4, 4, 2, 4, 4, 4, 2):
        assert fast(batch(size)) == size
    assert sizes == [4, 4, 4, 2, 4, 2]  # settling, short, recording, short
    assert fast.recorded
    assert fast._graph.replays == 3
    # A view of something larger is as good as a batch of its own, and each batch goes where the recording reads.
    wide = torch.full((4, 8), 3.0).as_subclass(OnGpu)
    fast(wide[:, 1:7])
    assert fast._graph.replays == 4
    assert torch.equal(fast._inputs[0].as_subclass(Tensor), torch.full((4, 6), 3.0))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), undrift.CannotRecord),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_a_recording_that_fails_says_why(failing: list[Exception], error: Exception, expected: type[Exception]) -> None:
    failing.append(error)
    fast = undrift.Captured(len)
    for _ in range(3):
        fast(batch(2))
    assert not fast.recorded
    with pytest.raises(expected, match=r"not permitted.*reads no values back|no memory"):
        fast(batch(2))
