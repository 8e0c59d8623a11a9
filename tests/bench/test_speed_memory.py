"""The memory of a step: peaks of a GPU (a stand-in) above what lay there before, and what autograd keeps on a CPU."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from undrift_bench.bench.speed.floor import layers
from undrift_bench.bench.speed.measure import measure
from undrift_bench.bench.speed.memory import MIB, Peaks, kept_for_backward, redrawing
from undrift_bench.bench.speed.steps import Case, make_loss

GPU = torch.device("cuda")


class Allocator:
    """A GPU's memory, counted in MiB: what tensors take, what is cached beside it, and the pools of graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.cached = self.pools = self.peak = self.most = 0
        self.calls = {
            "synchronize": lambda _device: None,
            "empty_cache": self._empty,
            "reset_peak_memory_stats": self._reset,
            "memory_allocated": lambda _device: self.allocated * MIB,
            "memory_reserved": lambda _device: self._reserved * MIB,
            "max_memory_allocated": lambda _device: self.peak * MIB,
            "max_memory_reserved": lambda _device: self.most * MIB,
        }
        for name, call in self.calls.items():
            monkeypatch.setattr(torch.cuda, name, call)

    @property
    def _reserved(self) -> int:
        return self.allocated + self.cached + self.pools

    def take(self, size: int) -> None:
        taken = max(0, size)
        self.cached = max(0, self.cached - taken) if taken else self.cached - size
        self.allocated += size
        self.peak, self.most = max(self.peak, self.allocated), max(self.most, self._reserved)

    def _empty(self) -> None:
        self.cached = 0

    def _reset(self, _device: object) -> None:
        self.peak, self.most = self.allocated, self._reserved


class Circle:
    """What the network before left: garbage that refers to itself."""

    def __init__(self, memory: Allocator, size: int) -> None:
        self.memory, self.size, self.self = memory, size, self
        memory.take(size)

    def __del__(self) -> None:
        self.memory.take(-self.size)


def step(memory: Allocator, size: int) -> None:
    memory.take(size)
    memory.take(-size)


def measured(memory: Allocator, weights: int, pool: int = 0) -> dict[str, float]:
    """Return the peaks of a network whose trial needs 900 MiB, and whose steps need 50, or a graph's pool."""
    peaks = Peaks(GPU)
    memory.take(weights)
    step(memory, 900)
    memory.pools += pool
    peaks.settle()
    step(memory, 0 if pool else 50)
    return peaks.found()


@pytest.mark.slow
def test_a_case_has_the_same_peaks_whatever_the_process_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Allocator(monkeypatch)
    first = measured(memory, 30)
    assert first == {"peak": 80, "reserved": 80, "before": 0}
    memory.take(-30)
    Circle(memory, 700)
    memory.take(11)  # a workspace that stays
    step(memory, 300)
    assert memory.allocated == 711
    again = measured(memory, 30)
    assert again == first | {"before": 11}


def test_a_graphs_pool_is_in_what_is_reserved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Allocator(monkeypatch)
    assert measured(memory, 30, pool=400) == {"peak": 30, "reserved": 430, "before": 0}


def test_a_cpu_has_no_peaks() -> None:
    peaks = Peaks(torch.device("cpu"))
    peaks.settle()
    assert peaks.found() == {}


def test_each_piece_that_autograd_keeps_counts_once_without_parameters_and_images() -> None:
    weight, frozen, x = nn.Parameter(torch.rand(4, 8)), torch.rand(6, 4), torch.rand(16, 8)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = (x @ weight.T).exp()  # keeps x, the images, and y
        y = y * y.square()  # keeps y again, and its square
        return (y @ frozen.T).sum()  # keeps the frozen weights

    assert kept_for_backward(loss, x, [weight, frozen]) * MIB == 4 * 2 * (16 * 4)
    assert kept_for_backward(loss, x, [weight]) * MIB == 4 * (2 * 16 * 4 + 6 * 4)


def test_on_a_cpu_vmp_keeps_the_noise_that_a_second_drawing_would_save() -> None:
    case, cpu = Case("WRN-40", 8, 32, width=1), torch.device("cpu")
    x, kept = torch.rand(8, 3, 32, 32), {}
    for kind in ("tent", "vmp"):
        loss, parameters, net = make_loss(kind, case, cpu, low=False)
        apart = [*net.parameters(), *net.buffers(), *parameters]
        kept[kind] = kept_for_backward(loss, x, apart)
        assert kept_for_backward(loss, x, apart) == kept[kind]
    shapes = [shape for _, shape in layers(case, x)]
    found = redrawing(shapes, repeats=1)
    assert found["redraw_mib"] == sum(4 * shape.numel() for shape in shapes) / MIB
    # What is left beside it are planes: one channel where an output has 16 to 64.
    assert 0 < kept["vmp"] - kept["tent"] - found["redraw_mib"] < 0.1 * kept["tent"]
    assert found["redraw_ms"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_peaks_come_again_and_a_graph_reserves_what_no_tensor_shows() -> None:
    case = asdict(Case("WRN-28", 32, 32, width=2))

    def found(kind: str, graphs: bool = False) -> dict[str, float]:
        job = {"case": case, "kind": kind, "low": True, "graphs": graphs, "steps": 8, "floor": False}
        return measure(job, GPU)

    first, vmp, again, graph = found("tent"), found("vmp"), found("tent"), found("tent", graphs=True)
    assert again["peak"] == pytest.approx(first["peak"], rel=0.01)
    assert again["reserved"] == pytest.approx(first["reserved"], rel=0.1)
    assert vmp["peak"] < 1.25 * first["peak"]
    assert graph["peak"] < first["peak"] < graph["reserved"] * 1.1
