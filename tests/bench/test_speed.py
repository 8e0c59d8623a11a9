"""`undrift bench speed`: ratios by hand, and processes of which one may fail."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from undrift.bench import speed
from undrift.bench.speed_kernels import by_kind
from undrift.bench.speed_report import how, kernels, ratios
from undrift.bench.speed_steps import Case, extra_bytes

CPU = torch.device("cpu")


def row(kind: str, ms: float, *, compiled: bool = False, graphs: bool = False, peak: float = 100.0) -> dict[str, Any]:
    case = {"network": "WRN-28", "batch": 2}
    return {"case": case, "kind": kind, "compiled": compiled, "graphs": graphs, "low": True, "ms": ms, "peak": peak}


def test_each_ratio_is_of_the_fastest_steps_that_it_speaks_of() -> None:
    rows = [
        row("tent", 15), row("vmp", 24), row("released", 90),
        row("tent", 13, compiled=True), row("vmp", 16, compiled=True, peak=110),
        row("tent", 14, graphs=True), row("vmp", 18, graphs=True),
        row("tent", 10, compiled=True, graphs=True), row("vmp", 12, compiled=True, graphs=True, peak=5),
        {**row("vmp", 1), "error": "out of memory"},
    ]  # fmt: skip
    del rows[-1]["ms"]  # a step that failed is in no ratio
    found = {what: (ratio, bar) for _, what, ratio, bar in ratios(rows)}
    assert found == {
        "VMP over Tent, each in its fastest mode": (1.2, 1.25),
        "the same without CUDA graphs": (pytest.approx(16 / 13), 1.25),
        "peak memory of the same": (1.1, 1.25),
        "VMP over Tent, uncompiled": (1.6, 1.6),
        "VMP over Tent, uncompiled, CUDA graphs": (pytest.approx(18 / 14), 1.6),
        "released formulation over VMP": (7.5, -5.0),
    }
    assert how(rows[7]) == "channels-last bf16, compiled, CUDA graphs"


def test_without_compiled_steps_only_the_uncompiled_bar_is_shown() -> None:
    assert [what for _, what, *_ in ratios([row("tent", 2), row("vmp", 3)])] == ["VMP over Tent, uncompiled"]


def test_a_job_that_fails_says_why_and_the_others_go_on() -> None:
    case, said = asdict(Case("WRN-40", 2, 8, width=1)), []
    jobs = [{"case": case, "kind": kind, "low": False, "compiled": False, "steps": 1} for kind in ("nonsense", "tent")]
    failed, tent = speed._measured(jobs, CPU, said.append)
    assert failed["error"] == "KeyError: 'nonsense'"
    assert tent["ms"] > 0
    assert len(said) == 2


def test_the_bytes_of_the_noise_by_hand() -> None:
    """x and y of each layer: x, 2 y and grad of y; but for the first layer also x, its gradient, and that again."""

    class Two(Case):
        def build(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 5, 1))

    x = torch.zeros(2, 3, 6, 6)
    positions = 2 * 6 * 6
    assert extra_bytes(Two("two", 2, 6), x, low=False) == 4 * positions * ((3 + 3 * 4) + (4 * 4 + 3 * 5))


def test_kernels_are_told_apart_by_their_names() -> None:
    seen = [
        ("noise_gradients_kernel", 2.0), ("grouped_noise_gradients_kernel", 1.0), ("square_sum_gradient_kernel", 0.5),
        # The compiler names its own after the operators in them.
        ("triton_red_fused_add_noise_traced_relu_7", 4.0), ("nvjet_sm90_tst", 8.0), ("Memset (Device)", 0.25),
    ]  # fmt: skip
    found = by_kind(seen)
    assert found == {"noise_gradients": 3.0, "square_sum": 0.5, "compiler": 4.0, "other": 8.25}
    rows = [row("vmp", 1.0) | {"kernels": 6, "kernel_ms": found}, row("tent", 1.0) | {"error": "no memory"}]
    lines = kernels(rows).splitlines()[2:]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "WRN-28", "vmp", "6", "15.75", "–", "3.00", "0.50", "–", "4.00", "8.25",
    ]  # fmt: skip
    assert "failed" in lines[1]
