"""The tables of docs/explanation/uncertainty.md: quality of `predict(mode="fast")`, and times.

They are made from the records of benchmarks/predict.py and benchmarks/predict_choice.py. A record names its form of
"fast"; numbers of an earlier form count as not measured.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT
from undrift_bench.bench.harness.limit import ANY, NOT_MEASURED, Limit
from undrift_bench.bench.harness.table import markdown

Found = dict[str, Any]
"""What a script has written."""
FULL = "full, 10 draws"
QUALITY = {
    "samples=0": "`samples=0`",
    "full, 10 other draws": "ten other draws",
    "fast, one call": "fast, one call",
    "fast, batches of 200": "fast, batches of 200",
    "fast, batches of 8": "fast, batches of 8",
}
WAYS = {
    "full, folded": "full, ten draws folded",
    "full, one pass a draw": "full, one pass a draw",
    "fast": "fast",
    "samples=0": "`samples=0`",
}
NEAR = Limit(-0.01, 0.01)  # ΔNLL of fast, mean over the fifteen
TIMES = {  # a way and a batch: so many noise-free forward passes
    ("full, folded", 200): Limit(most=11),
    ("full, folded", 8): Limit(most=6),
    ("fast", 200): Limit(most=3),
    ("fast", 8): Limit(most=3),
}
CHOICES = {
    "samples=0": "`samples=0`",
    "2 draws, averaged": "two draws, averaged",
    "3 draws, averaged": "three draws, averaged",
    "two draws, as ten": "two draws, as sharp as ten",
    "two draws, as many": "two draws, as sharp as infinitely many",
    "third draw for 40 %, as ten (fast)": "**third draw for 40 %, as sharp as ten: fast**",
    "… half of the mean logits": "… with half of the mean logits",
    "… none of the mean logits": "… with none of the mean logits",
    "70 %, half of the mean logits, as ten (before)": "for 70 %, half of the mean logits, as ten (the form before)",
    "third draw for 70 %, as ten": "third draw for 70 %, as sharp as ten",
    "third draw for all, as ten": "third draw for all, as sharp as ten",
    "third draw for 40 %, as many": "third draw for 40 %, as sharp as infinitely many",
    "third draw where two disagree, 40 %, as ten": "third draw where two disagree, 40 %, as sharp as ten",
    "third draw where two disagree, 40 %, as many": "third draw where two disagree, 40 %, as sharp as infinitely many",
}
"""What the page calls the choices of predict_choice.py, in its order; one that is not here keeps its name."""


def choice(found: Found) -> str:
    """Return the table of choices on the development corruptions: mean ΔNLL, and the largest of a corruption."""
    settings = {name: value for name, value in found.items() if isinstance(value, dict)}
    if not settings:
        return "Not measured yet."
    named = dict.fromkeys(name for each in settings.values() for scores in each.values() for name in scores)
    order = [name for name in CHOICES if name in named]
    lines = []
    for name in dict.fromkeys((*order, *named)):
        each = [[[s[name]] if name in s else [] for s in scores.values()] for scores in settings.values()]
        lines.append([CHOICES.get(name, name), *map(_differences, each)])
    corruptions = dict.fromkeys(name.replace("_", " ") for each in settings.values() for name in each)
    how = f"On {', '.join(corruptions)}; {found['images']:,} images each; {_machine(found)}."
    return f"{how}\n\n{markdown(['choice', *settings], lines)}".rstrip("\n")


def quality(founds: Iterable[Found], form: str) -> str:
    """Return a table of ΔNLL against ten draws for each machine that measured it.

    Args:
        founds: contents of predict.json, predict-cpu.json, …
        form: what "fast" is at present.
    """
    return "\n\n".join(_quality(found, form) for found in founds if found.get("quality")) or "Not measured yet."


def times(founds: Iterable[Found], form: str) -> str:
    """Return a table of the time of each way over one noise-free forward pass, for each network and machine."""
    tables = [_times(mode, part, form) for found in founds for mode, part in found.get("time", {}).items()]
    return "\n\n".join(tables) or "Not measured yet."


def _quality(found: Found, form: str) -> str:
    done, of = found["quality"], found["quality_of"]
    lines = []
    for group, word, limit in ((CORRUPTIONS, "fifteen", NEAR), (DEVELOPMENT, "three (development)", ANY)):
        names = [name for name in group if name in done]
        title = f"{'all' if len(names) == len(group) else f'{len(names)} of'} {word}"
        for setting in dict.fromkeys(setting for name in names for setting in done[name]):
            cells = []
            for row in QUALITY:
                fast = row.startswith("fast")
                spoken_for = names if not fast or of.get("fast") == form else []
                each = [_delta(done[name].get(setting, {}), row) for name in spoken_for]
                cells.append(_differences(each, limit if fast else ANY))
            lines.append([title, setting, *cells])
    how = f"{_machine(of)}; {of['images']:,} images a corruption; {of['seeds']} seed{'s' * (of['seeds'] > 1)}."
    bar = f"Bar of fast on the fifteen: {NEAR.most:g} either way; bold: missed."
    header = ["corruptions", "initial variance", *QUALITY.values()]
    return f"{how} {bar}\n\n{markdown(header, lines)}".rstrip("\n")


def _times(mode: str, part: Found, form: str) -> str:
    network, *rest = mode.removesuffix(f", {part['machine']}").split(", ")
    return ways(part["rows"], f"{network_title(network, *rest)}; {_machine(part)}", part.get("fast") == form)


def network_title(network: str, *mode: str) -> str:
    """Return a network's name as it is written in tables, and its mode.

    Examples:
        >>> network_title("wrn28_10", "channels-last bf16")
        'WRN-28-10, channels-last bf16'
    """
    return ", ".join([network.replace("wrn", "WRN-").replace("_", "-"), *mode])


def ways(rows: Sequence[Found], how: str, present: bool, bars: bool = True) -> str:
    """Return a table of what each way to predict costs in noise-free forward passes, beside its bar.

    Args:
        rows: batch, way, ratio and forward_ms of each.
        how: the network, its mode and the machine.
        present: whether "fast" was then what it is now.
        bars: whether they speak of this machine. They are a GPU's: a CPU gains nothing by passes that are large.
    """
    batches = {row["batch"]: row["forward_ms"] for row in rows if "forward_ms" in row}
    ratios = {(row["way"], row["batch"]): row.get("ratio") for row in rows if "error" not in row}
    lines = []
    for way, title in WAYS.items():
        limits = [TIMES.get((way, batch), ANY) if bars else ANY for batch in batches]
        values = [ratios.get((way, batch)) for batch in batches]
        if way == "fast" and not present:
            lines.append(_way("fast, an earlier form", limits, values))
            values = [None] * len(limits)
        lines.append(_way(title, limits, values))
    forward = ", ".join(f"{ms:.2f} ms at batch {batch}" for batch, ms in batches.items())
    header = ["way", *(cell for batch in batches for cell in (f"batch {batch}", "bar"))]
    about = f"{how}. One noise-free forward pass takes {forward}. Bold: missed."
    return f"{about}\n\n{markdown(header, lines)}".rstrip("\n")


def _way(title: str, limits: Sequence[Limit], values: Sequence[float | None]) -> list[str]:
    pairs = zip(limits, values, strict=True)
    return [title, *(cell for limit, value in pairs for cell in (limit.shown(value), str(limit)))]


def _delta(scores: Found, row: str) -> list[float]:
    """Return NLL minus that of ten draws, one number per seed; none where the row is absent."""
    if row not in scores or FULL not in scores:
        return []
    return [own - full for own, full in zip(scores[row]["nll"], scores[FULL]["nll"], strict=True)]


def _differences(each: Sequence[Sequence[float]], limit: Limit = ANY) -> str:
    """Return the mean over corruptions (± its error over seeds), and in brackets the largest of one of them."""
    if not each or not all(each):
        return NOT_MEASURED
    seeds = [statistics.fmean(several) for several in zip(*each, strict=True)]
    spread = f" ± {statistics.stdev(seeds) / len(seeds) ** 0.5:.3f}" if len(seeds) > 1 else ""
    largest = max((statistics.fmean(several) for several in each), key=abs)
    return f"{limit.shown(statistics.fmean(seeds), 3, '+')}{spread} ({ANY.shown(largest, 3, '+')})"


def _machine(about: Found) -> str:
    """Return machine and torch, and the date where it was written down."""
    count = about.get("threads") if about["machine"] == "CPU" else None
    threads = f", {count} thread{'s' * (count > 1)}" if count else ""
    return "; ".join([f"{about['machine']}{threads}", f"torch {about['torch']}", *filter(None, [about.get("date")])])
