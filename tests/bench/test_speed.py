"""`undrift bench speed`: ratios by hand, processes of which some fail, kernels and waits by their names."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undrift_bench.bench.harness.limit import ANY, Limit
from undrift_bench.bench.speed import jobs as speed_jobs
from undrift_bench.bench.speed import measure
from undrift_bench.bench.speed.bars import ratios
from undrift_bench.bench.speed.kernels import MARK, STEPS, by_kind, calls, spent
from undrift_bench.bench.speed.modes import how
from undrift_bench.bench.speed.report import kernels, startup
from undrift_bench.bench.speed.steps import Case

CPU = torch.device("cpu")
WHERE = {"machine": {"hardware": "a GPU", "torch": "2.0", "date": "2026-01-02"}}
QUARTER, EAGER = Limit(most=1.25), Limit(most=1.6)


def row(kind: str, ms: float, *, compiled: bool = False, graphs: bool = False, **more: float) -> dict[str, Any]:
    case = {"network": "WRN-28", "batch": 2}
    return {"case": case, "kind": kind, "compiled": compiled, "graphs": graphs, "low": True, "ms": ms} | more


def test_each_ratio_is_of_the_fastest_steps_that_it_speaks_of() -> None:
    rows = [
        row("tent", 15, peak=100), row("vmp", 24, peak=100, extra_ms=3), row("released", 90),
        row("tent", 13, compiled=True, peak=100), row("vmp", 16, compiled=True, peak=110, extra_ms=2.6),
        row("tent", 14, graphs=True), row("vmp", 18, graphs=True, extra_ms=2, operations_ms=7),
        row("tent", 10, compiled=True, graphs=True, peak=1, reserved=200),
        row("vmp", 12, compiled=True, graphs=True, peak=5, reserved=230, extra_ms=1.5, operations_ms=0.5),
        {**row("vmp", 1), "error": "out of memory"},
    ]  # fmt: skip
    del rows[-1]["ms"]  # a step that failed is in no ratio
    found = {r.what: (r.value, r.floor, r.limit) for r in ratios(rows)}
    assert found == {
        "VMP over Tent, each in its fastest mode": (1.2, 1.15, QUARTER),
        "peak reserved memory of the same, CUDA graphs' pools included": (1.15, None, QUARTER),
        "VMP over Tent without CUDA graphs": (pytest.approx(16 / 13), pytest.approx(1.2), QUARTER),
        "peak allocated memory of the same": (1.1, None, QUARTER),
        "VMP over Tent, uncompiled": (1.6, 1.2, EAGER),
        "VMP over Tent, uncompiled, CUDA graphs": (pytest.approx(18 / 14), 1.5, EAGER),  # operations take longer
        "released formulation over VMP with CUDA graphs": (7.5, None, Limit(least=5)),
        "released formulation over VMP without CUDA graphs": (5.625, None, Limit(least=5)),
    }
    assert how(rows[7]) == "channels-last bf16, compiled, CUDA graphs"


def test_without_compiled_steps_only_the_bars_of_uncompiled_ones_are_shown() -> None:
    rows = [row("tent", 2, kept=10), row("vmp", 3, kept=15), row("released", 6)]
    found = {r.what: (r.value, r.limit) for r in ratios(rows)}
    assert found == {
        "VMP over Tent, uncompiled": (1.5, EAGER),
        "memory that autograd keeps for the backward pass": (1.5, ANY),
        "released formulation over VMP": (2.0, Limit(least=5)),
    }


@pytest.mark.slow
def test_jobs_that_fail_say_why_and_the_others_go_on() -> None:
    case, said = asdict(Case("WRN-40", 2, 8, width=1)), []
    job = {"case": case, "low": False, "compiled": False, "steps": 1}
    # One fails before its first turn, one while all get ready.
    jobs = [job | {"kind": "tent", "case": {"network": "WRN-40"}}, job | {"kind": "nonsense"}, job | {"kind": "tent"}]
    early, late, tent = speed_jobs.measured(jobs, CPU, said.append)
    assert early["error"].startswith("TypeError")
    assert late["error"] == "KeyError: 'nonsense'"
    assert tent["ms"] > 0
    assert len([line for line in said if line.startswith("WRN-40")]) == 3
    assert said[-1].startswith("WRN-40 tent")


def test_a_step_has_three_turns_and_cudnns_trials_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | bool] = []

    def make_step(*_args: Any, **_mode: Any) -> Any:
        seen.append("built")
        return lambda _x: seen.append(torch.backends.cudnn.benchmark)

    monkeypatch.setattr(measure, "make_step", make_step)
    job = {"case": asdict(Case("WRN-40", 2, 8, width=1)), "kind": "tent", "steps": 2}
    with torch.backends.cudnn.flags(benchmark=False):
        measure.measure(job, CPU, lambda: seen.append("turn"))
        assert torch.backends.cudnn.benchmark is False
    assert seen == ["turn", "turn", "built", True, True, "turn", True, True, True]


def test_cudnn_tries_the_shapes_of_a_case_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def make_step(kind: str, _case: Case, _device: torch.device, low: bool) -> Any:
        made.append((kind, low))
        return lambda x: tuple(x.shape)

    monkeypatch.setattr(measure, "make_step", make_step)
    monkeypatch.setattr(measure, "_tried", set())
    case = Case("WRN-40", 2, 8, width=1)
    asked = [("tent", False), ("vmp", False), ("released", False), ("fine-tune", True), ("tent", True)]
    found = [measure._trial(kind, case, CPU, low)() for kind, low in asked]
    assert found == [(2, 3, 8, 8), False, (2, 3, 8, 8), (2, 3, 8, 8), False]
    assert made == [("fine-tune", False), ("released", False), ("fine-tune", True)]


def test_kernels_are_told_apart_by_their_names() -> None:
    seen = [
        ("noise_gradients_kernel", 2.0), ("grouped_noise_gradients_kernel", 1.0), ("square_sum_gradient_kernel", 0.5),
        # The compiler names its own after the operators in them.
        ("triton_red_fused_add_noise_traced_relu_7", 4.0), ("nvjet_sm90_tst", 8.0), ("Memset (Device)", 0.25),
    ]  # fmt: skip
    found = by_kind(seen)
    assert found == {"noise_gradients": 3.0, "square_sum": 0.5, "compiler": 4.0, "other": 8.25}
    rows = [row("vmp", 1.0) | {"kernels": 6, "kernel_ms": found}, row("tent", 1.0) | {"error": "no memory"}]
    lines = [line for line in kernels({"rows": rows}).splitlines() if line.startswith("| WRN")]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "WRN-28", "vmp", "6", "15.75", "–", "3.00", "0.50", "–", "–", "4.00", "8.25",
    ]  # fmt: skip
    assert "failed" in lines[1]


def event(name: str, start: float, end: float, device: str = "CPU") -> SimpleNamespace:
    times = {"time_range": SimpleNamespace(start=start, end=end), "device_time": end - start}
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), **times)


def test_a_steps_kernels_are_without_what_the_profiler_repeats() -> None:
    seen = [event("add_noise_kernel", 0, 2000, "CUDA"), event("sm90_gemm", 2000, 5000, "CUDA")] * STEPS
    other = [event(MARK, 0, 9000, "CUDA"), event("Optimizer.step#Adam", 0, 500, "CUDA"), event("aten::conv", 0, 900)]
    assert spent([*seen, *other]) == {"kernels": 2, "kernel_ms": {"add_noise": 2.0, "other": 3.0}}


def test_every_call_that_waits_is_counted_and_none_of_the_profilers_own() -> None:
    step = [
        event("cudaLaunchKernel", 11, 12), event("cuLaunchKernelEx", 12, 13), event("cudaMemcpyAsync", 13, 14),
        event("cudaStreamSynchronize", 14, 15), event("cudaDeviceSynchronize", 15, 16),
        event("cudaEventSynchronize", 16, 17), event("cudaMemcpy", 17, 18), event("cudaStreamWaitEvent", 18, 19),
        event("aten::_local_scalar_dense", 13, 15), event("Memcpy DtoH (Device -> Pageable)", 14, 14.5, "CUDA"),
    ]  # fmt: skip
    around = [event("cudaDeviceSynchronize", 1, 2), event("cudaDeviceSynchronize", 21, 22)]
    marks = [event(MARK, 10, 20), event(MARK, 30, 40, "CUDA")]  # the profiler shows it once more, for the GPU
    assert calls([*around, *marks, *step]) == {"launches": 2, "waits": 4, "copies to host": 1}
    assert calls([*around, *marks]) == {"launches": 0, "waits": 0, "copies to host": 0}


def test_start_up_stands_beside_its_bars() -> None:
    rows = [
        {"what": "import torch", "seconds": 9.0},
        {"what": "import undrift", "seconds": 3.2},
        {"what": "perturb a ResNet-50", "seconds": 0.09},
    ]
    lines = [line for line in startup({"rows": rows} | WHERE).splitlines() if line.startswith("|")][2:]
    assert lines == [
        "| import torch | 9.00 | – | – |",
        "| import undrift | 3.20 | ≤ 3 | no |",
        "| perturb a ResNet-50 | 0.09 | ≤ 0.5 | yes |",
    ]
