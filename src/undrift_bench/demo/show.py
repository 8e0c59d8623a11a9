"""The tables that the demo prints."""

from statistics import fmean

from rich.console import Console
from rich.table import Table

from undrift_bench.demo.finding import spread
from undrift_bench.demo.results import Results
from undrift_bench.demo.setting import DemoSetting


def show_beginning(console: Console, setting: DemoSetting) -> None:
    """Say what is compared."""
    console.print(
        "\n[bold]undrift demo[/bold]: a network that learned from MNIST's digits adapts to scans of another kind, "
        f"without a label.\nHeld-out MNIST digits tell what it forgets. {setting.seeds} seeds, mean ± deviation.\n"
    )


def show_results(console: Console, results: Results) -> None:
    """Print both tables, the domain file and the findings."""
    console.print(_table(results))
    console.print(_streams(results))
    file = results.file
    answers = "bit for bit the same" if file.equal else "[bold red]DIFFERENTLY[/bold red]"
    network = "is the source again, bit for bit" if file.restored else "[bold red]IS CHANGED[/bold red]"
    console.print(
        f"\nThe domain file: {file.size:,} bytes beside the network's {file.network:,}. Loaded into a fresh network it "
        f"answers {answers}; taken off, the network {network}.\n"
    )
    for found in results.findings:
        console.print(f"[bold]{found}[/bold]")


def _table(results: Results) -> Table:
    table = _plain("MNIST → scans", "row", "scans, acc. %", "NLL", "ECE %", "MNIST, acc. %", "NLL", "ECE %")
    for name, seeds in results.table.items():
        cells = []
        for scores in ([s.target for s in seeds], [s.source for s in seeds]):
            cells += [
                spread([s.accuracy for s in scores], 100),
                spread([s.nll for s in scores], 1, 3),
                spread([s.ece for s in scores], 100),
            ]
        table.add_row(name, *cells, style="bold" if name == "VMP" else None)
    return table


def _streams(results: Results) -> Table:
    first = next(iter(results.streams.values()))[0]
    names = [name.replace("_", " ") for name in first.domains]
    severity = results.setting.severity
    table = _plain(f"Stream, severity {severity}: accuracy % by domain", "row", *names, "mean", "clean after")
    for name, seeds in results.streams.items():
        # The deviation of the mean is enough; nine of them side by side are not read.
        by_domain = [f"{100 * fmean(s.domains[d].accuracy for s in seeds):.1f}" for d in first.domains]
        after = spread([s.after.accuracy for s in seeds], 100)
        mean = spread([s.mean for s in seeds], 100)
        table.add_row(name, *by_domain, mean, after, style="bold" if name == "VMP" else None)
    before = spread([first.before.accuracy], 100)
    table.caption = f"clean after: other clean images when the stream is over; the source network has {before} on them"
    return table


def _plain(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", title_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
