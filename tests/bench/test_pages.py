"""The tables of docs/explanation, from made-up records: ratios by hand, bars, and what failed."""

import json
import runpy
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT
from undrift_bench.bench.harness.limit import ANY, Limit
from undrift_bench.bench.speed import page, predict_page
from undrift_bench.bench.speed.benchmark import CPU, GPU
from undrift_bench.bench.speed.steps import Case

ROOT = Path(__file__).parents[2]
WRN, RESNET, VIT = GPU
WHERE = {"machine": {"hardware": "a GPU", "torch": "2.0", "date": "2026-01-02"}}
MODES = {"": (False, False), "c": (True, False), "g": (False, True), "cg": (True, True)}
TENT = {"": 15.0, "c": 13.0, "g": 14.0, "cg": 10.0}
VMP = {"": 24.0, "c": 16.0, "g": 20.0, "cg": 13.0}
FORM = "the present form"


def step(case: Case, kind: str, mode: str, ms: float, **more: Any) -> dict[str, Any]:
    compiled, graphs = MODES[mode]
    row = {"case": asdict(case), "kind": kind, "compiled": compiled, "low": True, "ms": ms}
    return row | {"peak": 100.0, "reserved": 200.0} | ({"graphs": True} if graphs else {}) | more


def speeds(case: Case = WRN) -> dict[str, Any]:
    """What `undrift bench speed` writes of one network."""
    rows = [step(case, "tent", mode, ms) for mode, ms in TENT.items()]
    rows += [step(case, "vmp", mode, ms, extra_ms=2.0, peak=130.0, reserved=230.0) for mode, ms in VMP.items()]
    rows += [step(case, "released", "", 60.0, low=False), step(case, "tent", "", 1.0, low=False)]
    waits = [{"case": asdict(case), "kind": kind, "waits": count} for kind, count in (("tent", 1), ("vmp", 3))]
    return {"steps": {"rows": rows} | WHERE, "launches": {"rows": waits} | WHERE}


def cells(text: str) -> list[list[str]]:
    """Return the lines of the tables in a text, without their headers' rules."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def column(found: dict[str, Any], case: Case = WRN) -> list[str]:
    """Return the numbers of a network, from the first line of the GPU's table to the last."""
    header, *lines = cells(page.gpu(found))
    return [line[header.index(page.title(case))] for line in lines]


def test_each_ratio_is_the_one_it_says_and_a_missed_bar_is_bold() -> None:
    # Tent in float32 took 1 ms: none of these speaks of it.
    assert column(speeds()) == [
        "1.00",  # 13 with graphs over 13 without
        "**1.30**",  # 13 over 10
        "1.20",  # 1 + 2 / 10
        "1.15",  # 230 MiB reserved over 200
        "1.23",  # 16 over 13
        "**1.30**",  # 130 MiB over 100
        "1.60",  # 24 over 15: the bar itself holds
        "1.43",  # 20 over 14
        "**2**",
        "**4.62**",  # 60 over 13, at least 5
        "**3.75**",  # 60 over 16
    ]
    assert [line[1] for line in cells(page.gpu(speeds()))[1:]] == [
        *("≤ 1.25", "≤ 1.25", "–", "≤ 1.25", "≤ 1.25", "≤ 1.25", "≤ 1.6", "≤ 1.6", "≤ 0", "≥ 5; ≥ 3.5", "≥ 5; ≥ 3.5"),
    ]
    assert column(speeds(RESNET), RESNET)[-2:] == ["4.62", "3.75"]  # of which 3.5 are asked
    assert "a GPU; torch 2.0; 2026-01-02" in page.gpu(speeds())


def test_the_first_bar_takes_the_faster_tent() -> None:
    found = speeds()
    found["steps"]["rows"][0]["ms"] = 12.0  # uncompiled; compiled takes 13
    assert column(found)[0] == "1.08"


@pytest.mark.parametrize(
    ("kind", "mode", "lost"),
    [
        ("tent", "c", {0, 1, 2, 3, 4, 5}),
        ("tent", "cg", {1, 2, 3}),
        ("tent", "", {0, 1, 2, 3, 6}),
        ("vmp", "cg", {0, 1, 2, 3, 9}),
        ("vmp", "g", {0, 1, 2, 3, 7, 9}),
        ("vmp", "c", {1, 2, 3, 4, 5, 10}),
        ("released", "", {9, 10}),
    ],
)
def test_where_a_step_failed_no_ratio_speaks_of_it(kind: str, mode: str, lost: set[int]) -> None:
    found, whole = speeds(), column(speeds())
    for row in found["steps"]["rows"]:
        if (row["kind"], row["compiled"], row.get("graphs", False)) == (kind, *MODES[mode]) and row["ms"] != 1.0:
            row["error"] = "out of memory"
            if kind == "tent":  # it failed before there was a number; the others' does not count
                del row["ms"], row["peak"]
    assert column(found) == ["not measured" if number in lost else text for number, text in enumerate(whole)]
    assert set(column(found, VIT)) == {"not measured"}


def test_waits_that_were_counted_elsewhere_say_where() -> None:
    found = speeds()
    found["launches"]["machine"] = WHERE["machine"] | {"date": "2026-01-03"}
    assert "chosen without trial. Waits: a GPU; torch 2.0; 2026-01-03." in page.gpu(found)
    found["steps"]["cudnn_benchmark"] = True
    assert "chosen by trial." in page.gpu(found)
    del found["launches"]
    assert column(found)[8] == "not measured"


def test_a_cpus_table_has_float32_steps() -> None:
    rows = [step(CPU[0], *each, low=False) for each in (("tent", "", 2.0), ("vmp", "", 3.5), ("released", "", 7.0))]
    rows[1]["extra_ms"] = 0.5
    text = page.cpu({"steps": {"rows": rows} | WHERE})
    found = [line[1:] for line in cells(text)]
    assert found[:3] == [["bar", "WRN-40-2, batch 64"], ["≤ 1.6", "**1.75**"], ["–", "1.25"]]
    assert found[3:] == [["≤ 1.6", "not measured"], *[["–", "not measured"]] * 2, ["–", "2.00"]]
    # With ε drawn again in the backward pass: 0.5 ms more, and 50 of 160 MiB less.
    rows[0]["kept"], rows[1]["kept"] = 100.0, 160.0
    rows[1] |= {"redraw_ms": 0.5, "redraw_mib": 50.0}
    again = [line[2] for line in cells(page.cpu({"steps": {"rows": rows} | WHERE}))[3:6]]
    assert again == ["**2.00**", "1.60", "1.10"]


def test_kernels_are_shown_by_kind_where_they_were_looked_at() -> None:
    assert page.kernels(speeds()) == ""
    rows = [
        {"case": asdict(WRN), "kind": "tent", "kernels": 5, "kernel_ms": {"compiler": 2.0, "other": 4.0}},
        {"case": asdict(WRN), "kind": "vmp", "kernels": 9, "kernel_ms": {"other": 4.5, "add_noise": 1.0, "new": 0.25}},
        {"case": asdict(VIT), "kind": "tent", "error": "no memory"},
        {"case": asdict(VIT), "kind": "vmp", "kernels": 3, "kernel_ms": {"other": 1.0}},
    ]
    header, *lines = cells(page.kernels({"kernels": {"rows": rows} | WHERE}))
    assert header[1:] == ["WRN-28-10, batch 200", "ResNet-50, batch 64", "ViT-S/16, batch 64"]
    assert [line[:2] for line in lines] == [
        ["all", "6.00 → 5.75"], ["add_noise", "– → 1.00"], ["compiler", "2.00 → –"], ["other", "4.00 → 4.50"],
        ["new", "– → 0.25"], ["how many kernels", "5 → 9"],
    ]  # fmt: skip
    assert {line[2] for line in lines} == {"not measured"}
    assert lines[3][3] == "not measured → 1.00"


def test_a_number_next_to_its_bar_has_digits_enough_to_show_the_side() -> None:
    assert Limit(most=1.25).shown(1.2501) == "**1.2501**"
    assert Limit(most=1.25).shown(1.2499) == "1.25"
    assert Limit(least=5).shown(4.999) == "**4.999**"
    assert Limit(-0.01, 0.01).shown(-0.0104, 3, "+") == "**−0.0104**"
    assert ANY.shown(0.5, 3, "+") == "+0.500"


def scores(full: list[float], **others: list[float]) -> dict[str, Any]:
    named = {"samples=0": others.get("mean"), "full, 10 other draws": others.get("other"), "full, 10 draws": full}
    named |= {f"fast, {how}": others.get("fast") for how in ("one call", "batches of 200", "batches of 8")}
    return {"a setting": {name: {"nll": nll} for name, nll in named.items() if nll}}


def predictions(form: str = FORM) -> dict[str, Any]:
    """What predict.py writes: fast is 0.02 above ten draws on one of the fifteen, 0.005 above on the others."""
    done = {name: scores([1.0], mean=[1.5], other=[0.99], fast=[1.005]) for name in CORRUPTIONS}
    done[CORRUPTIONS[3]] = scores([1.0], mean=[1.5], other=[1.0], fast=[1.02])
    of = {"machine": "CPU", "torch": "2.0", "threads": 2, "images": 1500, "seeds": 1, "fast": form}
    way = {"batch": 200, "forward_ms": 6.0}
    rows = [way | {"way": "full, folded", "ratio": 11.5}, way | {"way": "fast", "ratio": 2.9}]
    return {"quality": done, "quality_of": of, "time": {"wrn28_10, a GPU": of | {"machine": "a GPU", "rows": rows}}}


def test_differences_of_nll_are_means_with_the_largest_beside_them() -> None:
    found = predictions()
    text = predict_page.quality([found, {}], FORM)
    fast = "+0.006 (+0.020)"
    assert cells(text)[1:] == [
        ["all fifteen", "a setting", "+0.500 (+0.500)", "−0.009 (−0.010)", fast, fast, fast],
    ]
    assert text.startswith("CPU, 2 threads; torch 2.0; 1,500 images a corruption; 1 seed.")
    found["quality"] = {CORRUPTIONS[3]: found["quality"][CORRUPTIONS[3]]}
    found["quality"][DEVELOPMENT[0]] = scores([1.0], fast=[1.02])
    few, development = cells(predict_page.quality([found], FORM))[1:]
    assert (few[0], few[4]) == ("1 of fifteen", "**+0.020** (+0.020)")
    assert development == [
        *("1 of three (development)", "a setting", "not measured", "not measured"), *["+0.020 (+0.020)"] * 3,
    ]  # fmt: skip


def test_seeds_give_a_mean_and_its_error() -> None:
    found = predictions()
    found["quality"] = {name: scores([1.0, 2.0], fast=[1.03, 2.01]) for name in CORRUPTIONS}
    assert cells(predict_page.quality([found], FORM))[1][4] == "**+0.020** ± 0.010 (+0.020)"


def test_another_form_of_fast_does_not_speak_for_this_one() -> None:
    line = cells(predict_page.quality([predictions("a form of old")], FORM))[1]
    assert line[2:] == ["+0.500 (+0.500)", "−0.009 (−0.010)", *["not measured"] * 3]
    ways = {line[0]: line[1] for line in cells(predict_page.times([predictions("a form of old")], FORM))}
    assert (ways["fast, an earlier form"], ways["fast"]) == ("2.90", "not measured")


def test_times_are_beside_their_bars() -> None:
    text = predict_page.times([{}, predictions()], FORM)
    assert cells(text) == [
        ["way", "batch 200", "bar"],
        ["full, ten draws folded", "**11.50**", "≤ 11"],
        ["full, one pass a draw", "not measured", "–"],
        ["fast", "2.90", "≤ 3"],
        ["`samples=0`", "not measured", "–"],
    ]
    assert text.startswith("WRN-28-10; a GPU; torch 2.0. One noise-free forward pass takes 6.00 ms at batch 200.")


def test_choices_keep_the_order_of_the_page_and_their_own_names() -> None:
    each = {"snow": {"a new one": 0.5, "2 draws, averaged": -0.1}, "fog": {"a new one": 0.7, "2 draws, averaged": 0.0}}
    found = {"machine": "CPU", "torch": "2.0", "images": 400, "a setting": each}
    assert cells(predict_page.choice(found)) == [
        ["choice", "a setting"], ["two draws, averaged", "−0.050 (−0.100)"], ["a new one", "+0.600 (+0.700)"],
    ]  # fmt: skip


def test_without_records_nothing_is_claimed() -> None:
    texts = [
        *(page({}) for page in (page.gpu, page.cpu, predict_page.choice)),
        *(page([{}], FORM) for page in (predict_page.quality, predict_page.times)),
    ]
    assert texts == ["Not measured yet."] * 5


@pytest.mark.slow
def test_new_measurements_reach_the_pages_and_a_check_finds_that_they_have_not(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
    run: Callable[[list[str]], int] = script["main"]
    for place, blocks in script["BLOCKS"].items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in blocks))
    here = ["--root", str(tmp_path), "--results", str(tmp_path)]
    assert run(here) == 0
    assert run([*here, "--check"]) == 0
    explanation = tmp_path / "docs" / "explanation"
    assert "<!-- speed-kernels -->\n<!-- /speed-kernels -->" in (explanation / "speed.md").read_text()
    (tmp_path / "speed-cuda.json").write_text(json.dumps(speeds()))
    form = runpy.run_path(str(ROOT / "benchmarks" / "predict.py"))["FORM"]
    (tmp_path / "predict.json").write_text(json.dumps(predictions(form)))
    assert run([*here, "--check"]) == 1
    assert run(here) == 0
    assert run([*here, "--check"]) == 0
    assert "**4.62**" in (explanation / "speed.md").read_text()
    assert "| fast | 2.90 | ≤ 3 |" in (explanation / "uncertainty.md").read_text()
