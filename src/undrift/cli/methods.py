"""`undrift methods`: list every method by name, with its attributes."""

from typing import Any

from undrift.cli.session import Session, command


@command
def run(session: Session) -> dict[str, Any]:
    """List every method that --method takes.

    --json adds titles and the settings that --set NAME=VALUE changes.

    Example: undrift methods
    """
    from undrift import methods

    session.say(_drawn(methods.table()))
    return {
        "methods": [
            {
                "name": m.name,
                "title": m.title,
                "reference": m.reference,
                "loops": m.loops,
                "changes": m.changes,
                "uncertainty": m.uncertainty,
                "source_free": m.source_free,
                "ensemble": m.ensemble,
                "needs": m.needs,
                "settings": m.settings(),
                "variants": list(m.variants),
            }
            for m in methods.METHODS.values()
        ]
    }


def _drawn(markdown: str) -> str:
    """Return a Markdown table as one for the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines())
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(header):
        words = " ".join([name, *(line[number] for line in lines)]).replace("`", "").split()
        table.add_column(name, min_width=max(map(len, words)))
    for line in lines:
        table.add_row(*(cell.replace("`", "") for cell in line))
    console = Console(highlight=False, markup=False, color_system=None)
    console.width = max(console.width, 110)  # a narrower table would cut words
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip()
