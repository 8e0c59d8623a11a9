"""Compare σ per layer with A-distance per layer: the figure, and their rank correlation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from undrift.judge.plots import COLOURS, GREY, MOST_NAMES, _figure, _save
from undrift_bench.bench.harness.store import Record


def sigma(path: Path, by_task: Mapping[str, Record]) -> int:
    """Draw Σσ, σ over its kernel's deviation, and A-distance, layer by layer, a line a task; return the file's size."""
    figure = _figure(path, 9.5, 9)
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    first = next(iter(by_task.values()))
    layers = list(first["sigma"])
    places = range(len(layers))
    for axes, name in ((upper, "start_l1"), (middle, "start_relative")):
        axes.plot(places, _column(first, name), "--", color=GREY, zorder=3, label="before the first step")
    for number, (task, record) in enumerate(by_task.items()):
        colour = COLOURS[number % len(COLOURS)]
        upper.plot(places, _column(record, "l1"), color=colour, label=task)
        middle.plot(places, _column(record, "relative"), color=colour)
        lower.plot(places, [record["a_distance"][layer] for layer in layers], color=colour)
    upper.set_ylabel("Σσ (ℓ1, as in the paper)")
    upper.set_yscale("log")  # a linear layer with a σ for every weight has a thousand times as much as the others
    middle.set_ylabel("σ / standard deviation\nof its kernel (mean)")
    lower.set_ylabel("A-distance of the\nsource network")
    lower.set_ylim(0, 2.05)
    step = -(-len(layers) // MOST_NAMES)
    lower.set_xticks(places[::step], layers[::step], rotation=90, fontsize=6)
    names = upper.get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(by_task) + 1, frameon=False, fontsize=9)
    moved = "\n".join(
        f"{task}: rank correlation of A-distance with Σσ {l1:+.2f}, with the change of σ {change:+.2f}"
        for task, record in by_task.items()
        for l1, _, change in (correlations(record),)
    )
    figure.suptitle(f"Does σ grow where the domains differ?\n{moved}", fontsize=10, fontweight="bold")
    return _save(figure, path)


def correlations(record: Record) -> tuple[float, float, float]:
    """Return Spearman's rank correlation, over layers, of A-distance with Σσ, with σ/std, and with how far σ moved."""
    distances = [record["a_distance"][layer] for layer in record["sigma"]]
    l1, relative, start = (_column(record, name) for name in ("l1", "relative", "start_relative"))
    change = [after / before if before else 0.0 for before, after in zip(start, relative, strict=True)]
    return spearman(distances, l1), spearman(distances, relative), spearman(distances, change)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks, equal values sharing theirs; 0 where one of the two never changes.

    Examples:
        >>> spearman([1, 2, 3], [10, 100, 1000]), spearman([1, 2, 3], [5, 5, 5])
        (1.0, 0.0)
    """
    first, second = _ranks(one), _ranks(other)
    centre = (len(first) - 1) / 2
    products = [sum((a - centre) * (b - centre) for a, b in zip(x, y, strict=True)) for x, y in _pairs(first, second)]
    both, mine, theirs = products
    return both / (mine * theirs) ** 0.5 if mine > 0 and theirs > 0 else 0.0


def _pairs(first: list[float], second: list[float]) -> list[tuple[list[float], list[float]]]:
    return [(first, second), (first, first), (second, second)]


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _column(record: Record, name: str) -> list[float]:
    return [row[name] for row in record["sigma"].values()]
