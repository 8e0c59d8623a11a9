"""Claim: the tables of README.md and of results, speed and uncertainty below docs/explanation are what was measured.

Command:   python benchmarks/readme.py            write the tables between the markers <!-- NAME --> … <!-- /NAME -->
           python benchmarks/readme.py --check    write nothing; exit 1 if a page differs from its records
Hardware:  any; nothing is run. Machine, date and seeds of each measurement stand above its table.
Seeds:     those of the cells and records.
"""

import argparse
import json
import math
import re
import runpy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from undrift_bench.bench import Benchmark, Cell, MethodRow, Request, Store, about, find, in_its_precision
from undrift_bench.bench.harness.measure import RISKS
from undrift_bench.bench.harness.notes import not_source_free
from undrift_bench.bench.harness.store import Record
from undrift_bench.bench.harness.table import DAGGER, NOT_MEASURED, NOT_RUN, Column, footnotes, in_use, marked
from undrift_bench.bench.harness.table import markdown as table
from undrift_bench.bench.offline.benchmark import benchmark as offline
from undrift_bench.bench.offline.page import Page, title
from undrift_bench.bench.offline.sets import SETS, Task
from undrift_bench.bench.online import report
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.speed import page as speed
from undrift_bench.bench.speed import predict_page as predict
from undrift_bench.bench.speed.benchmark import GPU

ROOT = Path(__file__).parents[1]
MOST = 16  # lines of a table; with more, those of the first tier, and whatever leads a column
COLUMNS = report.COLUMNS[:6]  # error, NLL, ECE, AURC, AUGRC, clean error after
STREAMS = ("online-c10", "online-c100", "online-imagenet")
CERTAIN = (
    "source",
    "norm-stats",
    "tent",
    "roid",
    "cotta",
    "shot",
    "nrc",
    "undrift",
    "undrift-light",
    "undrift-sigma-0",
)
# Of the page on noise: a method with noise, and the row that differs from it in nothing but the variance.
TWINS = {
    "undrift": "undrift-sigma-0",
    "undrift-light": "undrift-light-sigma-0",
    "undrift-spare": "undrift-spare-sigma-0",
    "vmp:paper": "vmp-sigma-0",
    "vmp-shot:paper": "vmp-shot-sigma-0",
    "vmp-roid": "roid",
    "undrift-five-neighbours": "undrift-five-neighbours-sigma-0",
}
SHORT = 2_000  # images of each corruption that the ablation was run on
ON_TWINS = {"error %": ("error", 100.0, 2), "NLL": ("nll", 1.0, 3), "ECE %": ("ece", 100.0, 1)}
OUTSIDE = "../../../benchmarks/results"  # the records, seen from docs/explanation/results


SUMMARY = ("undrift", "undrift-light", "roid", "roid-views", "cotta", "tent", "norm-stats", "vmp:paper", "source")
"""README's rows; those that were not run are left out."""
BRIEFLY = [column for column in report.COLUMNS if column.title in ("error %", "ECE %", "clean error after %")]


def summary(request: Request) -> str:
    """Return README's table: a few rows of one stream, and three numbers of each."""
    part = _stream("online-c10", request, "wrn40_2")
    rows = {row.name: row for row in part.rows if part.records(row)}
    heading = f"**{part.bench.title}, {part.network.title}, {part.setting.title}.**"
    if not rows:
        return f"{heading} Not run yet."
    shown = [rows[name] for name in SUMMARY if name in rows]
    found = [record for row in shown for record in part.records(row)]
    lines = [[title(row), *(column.text(part.records(row)) for column in BRIEFLY)] for row in shown]
    text = table(["method", *(column.title for column in BRIEFLY)], lines)
    return _block(
        heading,
        about(found),
        text,
        "All rows, likelihoods and times: [benchmarks/results/online-c10.md](benchmarks/results/online-c10.md).",
    )


def online(name: str, request: Request, network: str = "") -> str:
    """Return the main table of a stream, one corruption after another: the first tier, and whatever leads a column.

    Args:
        name: of the benchmark.
        request: where its cells are.
        network: the source network; "" is the first one.
    """
    part = _stream(name, request, network)
    heading = f"**{part.bench.title}, {part.network.title}, {part.setting.title}.**"
    run = [row for row in part.rows if part.records(row)]
    if not run:
        return f"{heading} Not run yet."
    lines = []
    leading = in_use(COLUMNS[:5], [record for row in run for record in part.records(row)])
    leaders = {_leader(column, run, part).name for column in leading}
    shown = [row for row in run if row in main_rows(run) or row.name in leaders]
    all_found = [record for row in shown for record in part.records(row)]
    error, *others = in_use(COLUMNS, all_found)
    published = any(part.said(row) for row in shown)
    for row in shown:
        found, said = part.records(row), part.said(row)
        values = [column.text(found) for column in others]
        beside = [str(said[0]) if said else "–"] * published
        lines.append([marked(title(row), found), error.text(found), *beside, *values])
    header = ["method", error.title, *["published %"] * published, *(column.title for column in others)]
    below = footnotes({row.label: part.records(row) for row in shown})
    note = part.bench.note
    below += [f"- {note}"] if note and published else []  # what the published values beside ours are of
    left = _left(len(part.rows), run, shown, [name])
    return _block(heading, about(all_found), table(header, lines), _below(shown, below, left))


def _stream(name: str, request: Request, network: str) -> report.StreamTable:
    """Return the table of a stream in its first setting, with a network, or with its first one."""
    bench = find(name)
    assert isinstance(bench, OnlineBenchmark)
    store = Store(request.results / name)
    source = next(n for n in bench.networks if network in ("", n.name))
    return report.StreamTable(bench, store, in_its_precision(bench, store, request), source, bench.settings[0])


def pacs(request: Request) -> str:
    """Return what each finished task of PACS has: accuracy on the target, on the held-out source, and both."""
    store = Store(request.results / offline.name)
    page = Page(offline, store, in_its_precision(offline, store, request), SETS["pacs"])
    heading = "**PACS, whole domains, ResNet-50.** Accuracy %: target / held-out source afterwards / harmonic mean."
    run = [row for row in offline.rows if page.done(row, page.main)]
    if not run:
        return f"{heading} Not run yet."
    # All of them, however many: rivals that are ahead on a task or two must not be left out.
    tasks = [task for task in page.main if any(page.records(row, task) for row in run)]
    lines = [
        [
            marked(title(row), page.of_row(row, tasks)),
            *(_three(page, row, task) for task in tasks),
            page.text(row, tasks, "accuracy", digits=1),
            len({record["seed"] for record in page.of_row(row, tasks)}),
        ]
        for row in run
    ]
    records = [record for row in run for task in tasks for record in page.records(row, task)]
    left = _left(len(offline.rows), run, run, [offline.name, "generalized"])
    untouched = sum(not any(page.records(row, task) for row in offline.rows) for task in page.tasks)
    left += f" {untouched} of {len(page.tasks)} tasks are not run yet." if untouched else ""
    header = ["method", *(task.title for task in tasks), "mean, target", "seeds"]
    below = footnotes({row.label: page.of_row(row, tasks) for row in run})
    return _block(heading, about(records), table(header, lines), _below(run, below, left))


def cycles(request: Request) -> str:
    """Return the error of each row in some cycles of the corruptions of CIFAR-10-C."""
    bench = find("online-c10")
    assert isinstance(bench, OnlineBenchmark)
    request = in_its_precision(bench, Store(request.results / bench.name), request)
    setting = next(setting for setting in bench.settings if setting.cycles > 1)
    parts = (
        report.StreamTable(bench, Store(request.results / bench.name), request, n, setting) for n in bench.networks
    )
    run = [part for part in parts if part.all()]
    heading = f"**CIFAR-10-C, {setting.title}, batches of {setting.batch}.** Error %."
    if not run:
        return f"{heading} Not run yet."
    return "\n".join(f"{heading} {p.network.title}. {about(p.all())}\n\n{report.by_cycle(p)}" for p in run).rstrip("\n")


def stream_tables(request: Request) -> list[report.StreamTable]:
    """Return the main table of each network of each stream."""
    found = []
    for name in STREAMS:
        bench = find(name)
        assert isinstance(bench, OnlineBenchmark)
        own = in_its_precision(bench, Store(request.results / name), request)
        found += [
            report.StreamTable(bench, Store(request.results / name), own, n, bench.settings[0]) for n in bench.networks
        ]
    return found


def main_tasks(request: Request) -> Page:
    """Return the table of PACS."""
    store = Store(request.results / offline.name)
    return Page(offline, store, in_its_precision(offline, store, request), SETS["pacs"])


def place(part: report.StreamTable) -> str:
    """Return the data set and the network of a stream's table."""
    return f"{part.bench.title.split(',')[0]}, {part.network.title}"


def twins(request: Request) -> str:
    """Return each method with noise beside its twin without: means over the seeds that both have."""
    heading = "**With noise → without, on the reported data.** Severity 5, never reset; PACS: six main tasks."
    lines, found = [], list[Record]()
    for part in stream_tables(request):
        rows = {row.name: row for row in part.rows}
        for name, other in TWINS.items():
            if name in rows and other in rows:
                both = [{r["seed"]: r for r in part.records(rows[each])} for each in (name, other)]
                shared = sorted(set(both[0]) & set(both[1]))
                pair = [[records[seed] for seed in shared] for records in both]
                lines += [[place(part), title(rows[name]), *_beside(*pair), len(shared)]] if shared else []
                found += [record for records in pair for record in records]
    page, pacs_rows = main_tasks(request), {row.name: row for row in (*offline.rows, *offline.ablation)}
    for name, other in TWINS.items():
        if name in pacs_rows and other in pacs_rows:
            pair = [[r for task in page.main for r in page.records(pacs_rows[each], task)] for each in (name, other)]
            places = [{(r["setting"], r["seed"]) for r in records} for records in pair]
            pair = [[r for r in records if (r["setting"], r["seed"]) in places[0] & places[1]] for records in pair]
            seeds = len({r["seed"] for r in pair[0]})
            lines += [["PACS, ResNet-50", title(pacs_rows[name]), *_beside(*pair), seeds]] if pair[0] else []
            found += [record for records in pair for record in records]
    if not lines:
        return f"{heading} Not run yet."
    return f"{heading} {about(found)}\n\n{table(['', 'method', *ON_TWINS, 'seeds'], lines)}".rstrip("\n")


def _beside(noisy: Sequence[Record], still: Sequence[Record]) -> list[str]:
    """Return for each number its means with noise and without; the lower one is bold."""
    cells = []
    for name, scale, digits in ON_TWINS.values():
        pair = [[_number(record, name) for record in records] for records in (noisy, still)]
        if any(n is None for numbers in pair for n in numbers):
            cells.append("–")
            continue
        means = [f"{scale * statistics.fmean(n for n in numbers if n is not None):.{digits}f}" for numbers in pair]
        lower = min(means, key=float)
        cells.append(" → ".join(f"**{mean}**" if mean == lower != max(means, key=float) else mean for mean in means))
    return cells


def _number(record: Record, name: str) -> float | None:
    """Return a number of a record; one of whole domains has an accuracy in place of an error."""
    if name == "error" and "accuracy" in record:
        return None if record["accuracy"] is None else 1 - record["accuracy"]
    return record.get(name)


def ablation(request: Request) -> str:
    """Return `undrift` with one change each: what every part of it is worth."""
    heading = "**`undrift` as it was before its trials, and with one change each.**"
    blocks = []
    for part in stream_tables(replace(request, images=SHORT)):
        rows = [row for row in part.bench.ablation if part.records(row)]
        if rows:
            found = [record for row in rows for record in part.records(row)]
            columns = in_use(COLUMNS[:4], found)
            lines = [[title(row), *(column.text(part.records(row)) for column in columns)] for row in rows]
            blocks.append(f"{place(part)}. {about(found)}\n\n{table(['', *(c.title for c in columns)], lines)}")
    return "\n".join([heading, "", *blocks]).rstrip("\n") if blocks else f"{heading} Not run yet."


def certain(request: Request) -> str:
    """Return what `certain(risk=…)` kept of its promise: of each row the errors at each risk, and the coverage."""
    heading = "**Wrong answers % (answered %) where `certain` was asked for a risk.**"
    lines, found = [], list[Record]()
    for part in stream_tables(request):
        rows = [(row, part.records(row)) for row in part.rows if row.name in CERTAIN]
        lines += [[place(part), *line] for line in _kept(rows)]
        found += [record for _, records in rows for record in records if "certain" in record]
    page = main_tasks(request)
    whole = [(row, page.of_row(row, page.main)) for row in offline.rows if row.name in CERTAIN]
    lines += [["PACS", *line] for line in _kept(whole)]
    found += [record for _, records in whole for record in records if "certain" in record]
    if not lines:
        return f"{heading} Not run yet."
    return f"{heading} {about(found)}\n\n{table(['', 'method', *map(_percent, RISKS)], lines)}".rstrip("\n")


def _kept(rows: Sequence[tuple[MethodRow, Sequence[Record]]]) -> list[list[str]]:
    """Return a line for each row whose records know it; errors are means over the records that answered anything."""
    lines = []
    for row, records in rows:
        if known := [record["certain"] for record in records if "certain" in record]:
            line = [title(row)]
            for risk in map(str, RISKS):
                errors = [100 * each[risk]["error"] for each in known if each[risk]["error"] is not None]
                coverage = 100 * statistics.fmean(each[risk]["coverage"] for each in known)
                line.append((f"{statistics.fmean(errors):.1f}" if errors else "–") + f" ({coverage:.0f})")
            lines.append(line)
    return lines


def _percent(risk: float) -> str:
    return f"risk {100 * risk:.0f} %"


def cells(request: Request) -> str:
    """Return which cells there are: a line for each place of which something is finished, with its seeds."""
    lines = []
    for name in (*STREAMS, "offline", "analysis"):
        bench, store = find(name), Store(request.results / name)
        assert isinstance(bench, Benchmark)
        places: dict[tuple[str, str], list[Cell]] = {}
        for cell in bench.shown(in_its_precision(bench, store, request)):
            places.setdefault((cell.network, cell.setting), []).append(cell)
        begun = {place: found for place, found in places.items() if store.all(found)}
        lines += [[name, ", ".join(place), *_seeds(found, store)] for place, found in begun.items()]
        if rest := len(places) - len(begun):
            lines.append([name, f"{rest} {'other ' if begun else ''}place{'s' * (rest > 1)}", "none", "everything"])
    return table(["benchmark", "where", "finished (seeds)", NOT_RUN], lines).rstrip("\n")


def saved(request: Request, name: str) -> dict[str, Any]:
    """Return what a script has measured and written, nothing where it was not run."""
    place = request.results / f"{name}.json"
    return dict(json.loads(place.read_text(encoding="utf-8"))) if place.exists() else {}


def predictions(request: Request, page: Callable[..., str]) -> str:
    """Return one of the tables of what predict.py measured, GPU first; the script knows what "fast" is at present."""
    form = runpy.run_path(str(Path(__file__).with_name("predict.py")))["FORM"]
    return page([saved(request, name) for name in ("predict", "predict-cpu")], form)


BEFORE = {"cpp": "before, from C++", "python": "before, from Python"}  # how kernels were launched before the redesign


def turns(request: Request) -> str:
    """Return steps in turns, as speed_turns_gpu.py measured them, beside the ratios before the redesign of kernels."""
    now = saved(request, "speed-turns-cuda")
    if not now:
        return "Not measured yet."
    before = {said: found for n, said in BEFORE.items() if (found := saved(request, f"speed-turns-cuda-{n}"))}
    cases = [case for case in GPU if case.network in now["networks"]]
    compiled = all("ratio, compiled, one graph" in now["networks"][case.network] for case in cases)
    header = [""]
    for how in ("", ", one graph"):
        header += [f"Tent{how}", f"VMP{how}", "ratio", *before]
    header += ["ratio, compiled, one graph"] * compiled
    lines = []
    for case in cases:
        own = now["networks"][case.network]
        line = [speed.title(case)]
        for how in ("", ", one graph"):
            line += [f"{own[kind + how]:.1f}" for kind in ("tent", "vmp")]
            line += [f"{found['networks'][case.network][f'ratio{how}']:.2f}" for found in (now, *before.values())]
        line += [f"{own['ratio, compiled, one graph']:.2f}"] if compiled else []
        lines.append(line)
    return table(header, lines).rstrip("\n")


def streams(request: Request) -> str:
    """Return what stream_captured.py measured: each rival as it is and captured, and their ratios."""
    found = saved(request, "stream-captured").get("milliseconds", {})
    if not found:
        return "Not measured yet."
    header = ["", "Tent", "Tent, captured", "VMP", "VMP, captured", "VMP over Tent", "both captured"]
    lines = []
    for name, own in found.items():
        tent, tent_captured, vmp, captured = (own[k] for k in ("tent", "tent, captured", "vmp", "vmp, captured"))
        times = [f"{ms:.1f}" for ms in (tent, tent_captured, vmp, captured)]
        ratios = (vmp / tent, captured / tent_captured, captured / tent)
        lines.append([name, *times, *(f"{ratio:.2f}" for ratio in ratios)])
    return table([*header, "VMP captured over Tent as it is"], lines).rstrip("\n")


def of_script(name: str, request: Request, part: str = "page") -> str:
    """Return the table that a script of its own, benchmarks/NAME.py, makes of its record by the function `part`."""
    place = request.results / f"{name}.json"
    if not place.is_file():
        return "Not run yet."
    page: Callable[[Any], str] = runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))[part]
    return page(json.loads(place.read_text(encoding="utf-8"))).strip()


def routing(part: str, request: Request) -> str:
    """Return what routing gives, by the records of pacs.py and of routing.py."""
    tables = runpy.run_path(str(ROOT / "benchmarks" / "routing.py"))
    page: Callable[[Path], str] = tables["page" if part == "pacs" else "page_of_cifar"]
    return page(request.results / "routing" / part)


def pack_loss(request: Request) -> str:
    """Return what the default storage costs on PACS: each network as it was adapted, and from its pack."""
    lines, exact, packed = [], list[float](), list[float]()
    for task in SETS["pacs"].tasks:
        cells = sorted((request.results / "offline").glob(f"resnet50.{task.name}.undrift-five-neighbours.*.s0.json"))
        pack = request.results / "routing" / "pacs" / f"{task.name}-ternary-s0.json"
        if cells and pack.is_file():
            record = json.loads(pack.read_text(encoding="utf-8"))
            exact.append(100 * json.loads(cells[0].read_text(encoding="utf-8"))["accuracy"])
            packed.append(100 * record["ways"]["adapted alone"]["target"])
            size = f"{record['bytes'] / 1e6:.1f}"
            lines.append([task.title, f"{exact[-1]:.1f}", f"{packed[-1]:.1f}", f"{packed[-1] - exact[-1]:+.1f}", size])
    if not lines:
        return "Not run yet."
    means = statistics.fmean(exact), statistics.fmean(packed)
    lines.append(["mean", f"{means[0]:.1f}", f"{means[1]:.1f}", f"{means[1] - means[0]:+.1f}", ""])
    return table(["target accuracy %", "as adapted", "from the pack", "difference", "MB"], lines).rstrip("\n")


def stream_cost(request: Request) -> str:
    """Return what a batch of each stream costs on two cores, over Tent's."""
    found = saved(request, "stream-cost")
    if not found:
        return "Not run yet."
    blocks = [
        f"{found['hardware']}, {found['threads']} threads; torch {found['torch']}; {found['date']}; medians of turns."
    ]
    for case in found["cases"]:
        times = {name: value["median"] for name, value in case["milliseconds"].items()}
        lines = [[name, f"{ms:.0f}", f"{ms / times['tent']:.2f}"] for name, ms in times.items()]
        blocks.append(table([f"{case['network']}, batch {case['batch']}", "ms a batch", "× Tent"], lines).rstrip("\n"))
    return "\n\n".join(blocks)


def routing_times(request: Request) -> str:
    """Return how long packs take, GPU first."""
    found = [saved(request, f"routing-times-{device}") for device in ("cuda", "cpu")]
    tables: Callable[[Any], str] = runpy.run_path(str(ROOT / "benchmarks" / "routing.py"))["page_of_times"]
    return tables([one for one in found if one])


RESULTS = "docs/explanation/results"
BLOCKS: dict[str, dict[str, Callable[[Request], str]]] = {
    "README.md": {"summary": summary},
    f"{RESULTS}/cifar-10-c.md": {
        "online-c10": partial(online, "online-c10"),
        "online-c10-wrn40_2": partial(online, "online-c10", network="wrn40_2"),
    },
    f"{RESULTS}/cifar-100-c.md": {"online-c100": partial(online, "online-c100")},
    f"{RESULTS}/imagenet-c.md": {"online-imagenet": partial(online, "online-imagenet")},
    f"{RESULTS}/pacs.md": {"pacs": pacs},
    f"{RESULTS}/other-streams.md": {"cycles": cycles},
    f"{RESULTS}/cells.md": {"cells": cells},
    "docs/how-to/use-uncertainty.md": {"certain": certain},
    "docs/explanation/is-it-helping.md": {"helping": partial(of_script, "helping")},
    "docs/how-to/serve.md": {"serving": partial(of_script, "serving")},
    f"{RESULTS}/index.md": {"certain": certain},
    "docs/explanation/noise.md": {"twins": twins, "ablation": ablation},
    "docs/explanation/defaults.md": {
        "recipe-trials": partial(of_script, "recipe_trials"),
        "small-networks": partial(of_script, "small_networks"),
        "step-views": partial(of_script, "step_views"),
    },
    "docs/explanation/unattended.md": {
        "unattended": partial(of_script, "unattended"),
        "runs-answers": partial(of_script, "runs_by_views", part="answers_table"),
        "runs-signs": partial(of_script, "runs_by_views", part="signs_table"),
        "small-streams": partial(of_script, "small_streams"),
    },
    "docs/how-to/segment.md": {"segmentation": partial(of_script, "segmentation")},
    "docs/explanation/packs.md": {
        "compression": partial(of_script, "compression"),
        "pack-loss": pack_loss,
        "routing-times": routing_times,
    },
    "docs/explanation/routing.md": {
        "router-trials": partial(of_script, "router_trials"),
        "routing": partial(routing, "pacs"),
        "routing-cifar": partial(routing, "cifar"),
        "stream-domains": partial(of_script, "stream_domains"),
        "revisits": partial(of_script, "revisits"),
    },
    "docs/explanation/speed.md": {
        "stream-cost": stream_cost,
        "speed-cuda": lambda request: speed.gpu(saved(request, "speed-cuda")),
        "speed-cpu": lambda request: speed.cpu(saved(request, "speed-cpu")),
        "speed-kernels": lambda request: speed.kernels(saved(request, "speed-cuda")),
        "speed-turns": turns,
        "stream-captured": streams,
    },
    "docs/explanation/uncertainty.md": {
        "predict-choice": lambda request: predict.choice(saved(request, "predict_choice")),
        "predict-quality": lambda request: predictions(request, predict.quality),
        "predict-time": lambda request: predictions(request, predict.times),
    },
}


def written(page: str, text: str, request: Request) -> str:
    """Return the text of a page with the present tables between its markers."""
    for name, block in BLOCKS[page].items():
        marked = re.compile(f"<!-- {name} -->\n.*?<!-- /{name} -->", re.DOTALL)
        if len(marked.findall(text)) != 1:
            raise SystemExit(f"{page} has no place for {name}; needed: <!-- {name} --> and <!-- /{name} -->, once.")
        inside = block(request)
        new = "\n".join([f"<!-- {name} -->", *([inside] if inside else []), f"<!-- /{name} -->"])
        text = marked.sub(lambda _, new=new: new, text)
    return text


def _seeds(found: list[Cell], store: Store) -> tuple[str, str]:
    """Return the rows that are finished, with how many seeds (a dagger: to be run again), and the others' names."""
    done = {cell.row.name: 0 for cell in found}
    old = {cell.row.name for cell in found if store.shown(cell) and store.state(cell) == "stale"}
    for cell in found:
        done[cell.row.name] += store.shown(cell) is not None
    finished = [f"{name} ({count}{DAGGER * (name in old)})" for name, count in done.items() if count]
    return ", ".join(finished), ", ".join(name for name, count in done.items() if not count) or "–"


def main_rows(rows: list[MethodRow]) -> list[MethodRow]:
    """Return all rows where a table has room for them, else those of the first tier."""
    return rows if len(rows) <= MOST else [row for row in rows if row.tier == "A"][:MOST]


def _leader(column: Column, rows: list[MethodRow], part: report.StreamTable) -> MethodRow:
    """Return the row with the least number in a column: whoever leads is shown, of whatever tier."""

    def mean(row: MethodRow) -> float:
        numbers = [n for record in part.records(row) if (n := column.take(record)) is not None]
        return statistics.fmean(numbers) if numbers else math.inf

    return min(rows, key=mean)


def _three(page: Page, row: MethodRow, task: Task) -> str:
    records = page.records(row, task)
    if not records:
        return NOT_RUN
    known = {name: page.measured(row, [task], name) for name in ("accuracy", "source_accuracy", "harmonic")}
    return " / ".join(
        f"{100 * page.of_any_seed(row, there, name):.1f}" if there else NOT_MEASURED for name, there in known.items()
    )


def _left(rows: int, run: list[MethodRow], shown: list[MethodRow], pages: list[str]) -> str:
    """Return a line that says what the table does not show."""
    links = " and ".join(f"[{name}.md]({OUTSIDE}/{name}.md)" for name in pages)
    more = f"{len(run) - len(shown)} more rows that were run: {links}." if len(run) > len(shown) else f"Whole: {links}."
    return f"{rows - len(run)} of {rows} rows are not run yet. {more}" if rows > len(run) else more


def _below(shown: list[MethodRow], lines: list[str], left: str) -> str:
    """Return what stands under a table: lines of its own, which rows are not purely source-free, what is not shown."""
    lines = lines + [f"- {line}" for line in not_source_free(shown)]
    return "\n".join([*lines, "", left] if lines else [left])


def _block(heading: str, how: str, lines: str, left: str) -> str:
    return f"{heading} {how}\n\n{lines}\n{left}"


def main(words: list[str]) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description="The tables of the pages, from what was measured.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is not current")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the pages lie")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args(words)
    stale = []
    for page in BLOCKS:
        place = asked.root / page
        text = place.read_text(encoding="utf-8")
        new = written(page, text, Request(results=asked.results))
        if new != text and asked.check:
            stale.append(page)
        elif new != text:
            place.write_text(new, encoding="utf-8")
    if stale:
        print(f"not what was measured: {', '.join(stale)}; needed: their tables. Run python benchmarks/readme.py.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
