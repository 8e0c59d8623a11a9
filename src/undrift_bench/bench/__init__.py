"""Benchmarks: every method on the same footing, one command each.

    undrift bench                                      # the names
    undrift bench online-c10 --data FOLDER --list      # its cells, and which are finished
    undrift bench online-c10 --data FOLDER --fast --deadline 600

A **cell** is one method on one network in one setting with one seed in one precision. Its numbers are a small JSON file
under `--results`. A finished cell is not run again unless its method changes, so a benchmark grows over days and
machines, and merging is copying files. Tables and figures are written from the existing cells; missing ones are "not
run".

**Writing one.** Give the rows of the table (`MethodRow`), the cells of a request, and a function that runs one cell;
`run` does the rest: order, deadline, errors, files.

    class Flips:                                                   # satisfies `Benchmark`
        name = "flips"
        rows = [MethodRow("source", "source"), MethodRow("tent", "tent")]

        def cells(self, request):                                  # in the table's order
            rows = chosen(self.rows, request.only, request.tier)
            return [Cell("flips", "wrn40_2", "upside down", row, seed, 1000, request.precision)
                    for row in rows for seed in seeds_of(row, request.seeds)]

        shown = cells                                              # what tables and JSON show

        def prepare(self, request):                                # data and networks: once, not timed
            images, labels, net = load(request.data)
            def run_cell(cell, bar):
                stream = undrift.stream(copy.deepcopy(net), images.split(200), method=cell.row.method)
                ...
                return {"error": error}                            # any plain values; machine and date are added
            return run_cell

        def markdown(self, store, request):                        # `store.all(cells)` gives finished records
            records = store.all(self.cells(request))
            return about(records) + markdown(["method", "error %"], ...)

        def figures(self, store, request):
            return {"": lambda path: overview(path, title, marks)}

    benchmark = Flips()                                            # what `NAMES` leads to

Then add it to `NAMES`. `online/` is a complete example; `table1.py` is a plain function without cells.

**How hyper-parameters are chosen,** without the target's labels:

1. A method runs with its authors' values, for the data set at hand where they give some ("eata:cifar100").
2. What authors left open is chosen on the three development corruptions (speckle noise, Gaussian blur, saturate), which
   are never among the reported ones, by mean error at severity 5.
3. Every method has the same budget for that: one value changed at a time, at most six values of it, on WRN-40-2.
4. What does not land where it was published is explained, not tuned.

`tent-ft`'s rate was found in another way and later confirmed by this rule (docs/explanation/how-numbers-are-made.md).
"""

import importlib
from collections.abc import Callable

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift_bench.bench.harness.cell import Cell, MethodRow, chosen, in_order, seeds_of
from undrift_bench.bench.harness.request import CannotRun, Request
from undrift_bench.bench.harness.run import Benchmark, Outcome, Say, about, in_its_precision, listing, row_notes, run
from undrift_bench.bench.harness.store import Record, Store

NAMES: dict[str, tuple[str, str]] = {
    "online-c10": ("online.c10", "CIFAR-10-C streams: WRN-28-10 and WRN-40-2; continual, episodic, gradual, mixed, …"),
    "online-c100": ("online.c100", "CIFAR-100-C streams: ResNeXt-29"),
    "online-imagenet": ("online.imagenet", "ImageNet-C streams: ResNet-50, 5,000 images per corruption"),
    "offline": ("offline.benchmark", "PACS, Office-31 or Office-Home over epochs: ResNet-50, all tasks"),
    "generalized": ("offline.generalized", "the same cells: target, held-out source, harmonic mean"),
    "analysis": ("analysis.benchmark", "σ against A-distance, prior, sharing, layers, schemes, draws, β"),
    "speed": (
        "speed.benchmark",
        "what a step costs beside Tent's: time, memory, launches, growth, predictions, start-up",
    ),
    "table1": ("table1", "what each method can do and needs, from its own attributes"),
}
"""Each benchmark's module here, which has a `benchmark`, and what it is in one line."""


Plain = Callable[[Request, Say], Outcome]
"""A benchmark without cells: does what was asked, writes the files, and says what was done."""


def find(name: str) -> Benchmark | Plain:
    """Return a benchmark by its name; its module is imported only now."""
    if name not in NAMES:
        raise OptionError(f"there is no benchmark {name!r}{_suggest(name, NAMES)}; needed: one of {', '.join(NAMES)}.")
    found: Benchmark | Plain = importlib.import_module(f"undrift_bench.bench.{NAMES[name][0]}").benchmark
    return found


__all__ = [
    "NAMES",
    "Benchmark",
    "CannotRun",
    "Cell",
    "MethodRow",
    "Outcome",
    "Plain",
    "Record",
    "Request",
    "Say",
    "Store",
    "about",
    "chosen",
    "find",
    "in_its_precision",
    "in_order",
    "listing",
    "row_notes",
    "run",
    "seeds_of",
]
