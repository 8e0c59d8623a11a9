"""The table that the demo prints."""

from rich.console import Console
from rich.table import Table

from undrift_bench.demo.finding import spread
from undrift_bench.demo.results import Results
from undrift_bench.demo.rows import OURS
from undrift_bench.demo.setting import DemoSetting


def show_beginning(console: Console, setting: DemoSetting) -> None:
    """Say what is compared."""
    console.print(
        "\n[bold]undrift demo[/bold]: a network that learned MNIST's digits meets scans of other digits, and then a "
        f"stream of damaged ones. No labels.\n{setting.seeds} seeds, mean ± deviation.\n"
    )


def show_results(console: Console, results: Results) -> None:
    """Print the table, the pack and the findings."""
    console.print(_table(results))
    file = results.file
    answers = "bit for bit the same" if file.equal else "[bold red]DIFFERENTLY[/bold red]"
    network = "is the source again, bit for bit" if file.restored else "[bold red]IS CHANGED[/bold red]"
    console.print(
        f"\nThe pack: {file.size:,} bytes beside the network's {file.network:,}. Loaded into a fresh network it gives "
        f"{100 * file.same:.1f} % of the labels that were given before;\nan exact pack ({file.exact:,} bytes) answers "
        f"{answers}. Taken off, the network {network}.\n",
        highlight=False,
    )
    for found in results.findings:
        console.print(f"[bold]{found}[/bold]", highlight=False)


def _table(results: Results) -> Table:
    table = Table()
    table.add_column("")
    for name in ("scans, % right", "ECE %", "MNIST after, % right", "stream, % right", "ECE %"):
        table.add_column(name, justify="right")
    for name, seeds in results.table.items():
        streams = results.streams.get(name, [])
        cells = [
            spread(results.accuracy(name)),
            spread([s.target.ece for s in seeds], 100),
            spread([s.source.accuracy for s in seeds], 100),
            spread(results.accuracy(name, online=True)) if streams else "–",
            spread([s.whole.ece for s in streams], 100) if streams else "–",
        ]
        table.add_row(name, *cells, style="bold" if name == OURS.name else None)
    return table
