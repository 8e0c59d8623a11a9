"""A CUDA graph's part, played on a CPU: a tape of operators, each repeated on the memory that it was recorded on.

Nothing of Python happens in a replay, inputs and outputs lie where they lay, and what was replaced since is not seen.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import undrift
from undrift import Stream
from undrift.likelihood import entropy
from undrift.loop import captured
from undrift.posterior import norm
from undrift.stream import stream

# Methods and settings whose captured stream is the plain one, with a tape and with a graph.
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("vmp", {}),
    ("vmp", {"stream_optimiser": "adam", "lr": 1e-4}),
    ("vmp", {"norm_statistics": "moving", "stream_norm_momentum": 0.3}),
    ("vmp", {"norm_statistics": "domain"}),
    ("vmp", {"norm_statistics": "batch", "kl_reduction": "mean"}),
    ("vmp", {"train_samples": 3, "answer": "before"}),
    ("vmp", {"train_samples": 0}),
    ("vmp", {"stream_steps": 2, "answer": "before"}),
    ("vmp", {"stream_split": 4}),
    ("vmp", {"guard": True}),
    ("vmp", {"episodic": True}),
    ("vmp", {"estimator": "drawn"}),
    ("vmp", {"linear_sharing": "weight", "conv_sharing": "weight"}),
    ("vmp:released", {}),
    ("bbb", {}),
    ("tent", {}),
    ("tent-ft", {"answer": "after"}),
    ("bacs", {"posterior_weight": 1e-3}),
    ("norm-stats", {}),
    ("source", {}),
]
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "equal")


class Tape(TorchDispatchMode):
    """Writes down each operator with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ASKING:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        fresh = all(r.alias_info is None for r in func._schema.returns)
        kept = [t for t in tree_leaves(out) if isinstance(t, Tensor)] if fresh else []
        self.operators.append((func, args, kwargs or {}, kept))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Do it again, results written to where they were; nobody is told that a tensor has changed."""
        given = [t for _, args, kwargs, _ in self.operators for t in tree_leaves((args, kwargs))]
        with ExitStack() as kept_versions:  # one tensor each: PyTorch 2.6 takes no more
            for tensor in {id(t): t for t in given if isinstance(t, Tensor)}.values():
                kept_versions.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            for func, args, kwargs, kept in self.operators:
                found = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for mine, value in zip(kept, found[: len(kept)], strict=True):
                    mine.detach().copy_(value)


class Taped:
    """`undrift.Captured` with a tape for its graph; `made` lists all, `recording` says whether one is at it."""

    made: "list[Taped]"
    recording = False

    def __init__(self, step: Callable[..., Any]) -> None:
        self.step, self.calls, self.replays = step, 0, 0
        self.tape: Tape | None = None
        self.made.append(self)

    @property
    def recorded(self) -> bool:
        return self.tape is not None

    def __call__(self, images: Tensor) -> Any:
        self.calls += 1
        if self.tape is not None:
            self.input.copy_(images)
            self.tape.replay()
            self.replays += 1
            return self.output
        if self.calls <= 3:
            return self.step(images)
        self.input, tape = images.clone(), Tape()
        Taped.recording = True
        try:
            with tape:
                self.output = self.step(self.input)
        except RuntimeError as error:
            raise undrift.CannotRecord("no") from error
        finally:
            Taped.recording = False
        self.tape = tape
        return self.output


@contextmanager
def taped(patches: pytest.MonkeyPatch) -> Iterator[list[Taped]]:
    """Let streams on a CPU be captured, on tape, for the length of a `with` block; give all that was made for it."""
    with patches.context() as patched:
        patched.setattr(Taped, "made", [], raising=False)
        patched.setattr(captured, "Captured", Taped)
        patched.setattr(captured, "on_gpu", lambda _tensor: True)
        patched.setattr(norm, "capturing", lambda _x: Taped.recording)
        yield Taped.made


class Fragile:
    """Entropy; NaN for a batch with a value above 50, without looking. It counts how often Python came by."""

    recordable = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
        self.calls += 1
        return entropy(logits) * torch.where(step.images.amax() > 50, torch.nan, 1.0)

    def __repr__(self) -> str:
        return "Fragile()"


def network() -> nn.Module:
    """Return a small classifier with opinions: its head is large enough for a step to change something."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    with torch.no_grad():
        net[8].weight *= 10
    return net.eval()


def batches(count: int, size: int = 8) -> list[Tensor]:
    """Return batches of one domain, each its own."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(size, 3, 12, 12, generator=generator) * (1 + 0.1 * k) for k in range(count)]


def state(going: undrift.Stream) -> dict[str, Tensor]:
    """Return all that adaptation has changed, on the CPU: learnables, statistics, the noise's step."""
    return {name: value.cpu() for name, value in going.state_dict()["model"].items()}


def going(x: list[Tensor], method: str = "vmp", **settings: Any) -> Stream:
    """Return a stream of the network over batches, where they are."""
    generator = torch.Generator().manual_seed(0)
    how = {"stream_optimiser": "sgd", "lr": 0.01, **settings}
    return stream(network().to(x[0].device), x, method=method, generator=generator, **how)


def asking(x: list[Tensor], captured: bool, likelihood: Any = None, **options: Any) -> Stream:
    """Return a stream of the perturbed network that asks `Fragile`, or what is given."""
    net = network().to(x[0].device)
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(0), **options)
    return stream(model, x, likelihood or Fragile(), lr=0.01, captured=captured)


def the_same(one: Stream, other: Stream, answers: tuple[list[Any], list[Any]], rtol: float = 1e-4) -> None:
    """Assert that two streams gave the same answers, and stand at the same place."""
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got.probs, want.probs, rtol=rtol, atol=rtol / 10)
        torch.testing.assert_close(got.mutual_info, want.mutual_info, rtol=10 * rtol, atol=rtol / 10)
    ends = state(one), state(other)
    assert ends[0]["key.step"] == ends[1]["key.step"]
    torch.testing.assert_close(*ends, rtol=rtol, atol=rtol / 10)
    assert one.report == other.report
    assert one.latest == pytest.approx(other.latest, rel=rtol, abs=rtol / 10, nan_ok=True)
    assert one.online.seen == other.online.seen
    assert all(p.grad is None for p in one.model.parameters())


def reset(s: Stream) -> None:
    """Put the start state back."""
    s.online.reset()


def loaded(s: Stream) -> None:
    """Go on from the stream's own state."""
    s.load_state_dict(s.state_dict())


def off(s: Stream) -> None:
    """Ask the source network something."""
    with s.model.off():
        s.model.net(batches(1)[0].to(s.model.key.step.device))
