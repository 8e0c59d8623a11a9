"""Say below a table how its times were measured."""

from collections.abc import Mapping, Sequence

from undrift_bench.bench.harness.store import Record


def how_timed(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the lines under a table that say which times were measured afterwards, and how.

    Args:
        records: of each row, by the name that the table calls it.

    Examples:
        >>> timed = {"batches": 17, "hardware": "H", "torch": "2.8", "date": "2030-01-02"}
        >>> how_timed({"tent": [{"milliseconds": 5.0, "timed": timed}], "eata": [{"milliseconds": None}]})
        ['- Times were measured alone on H (torch 2.8, 2030-01-02), over 17 batches.']
    """
    rows: dict[str, list[str]] = {}
    with_time = 0
    for name, of_row in records.items():
        timed = [record for record in of_row if record.get("milliseconds") is not None]
        with_time += bool(timed)
        for text in dict.fromkeys(_told(record["timed"]) for record in timed if "timed" in record):
            rows.setdefault(text, []).append(name)
    return [
        f"- Times{'' if len(names) == with_time else ' of ' + ', '.join(names)} were measured alone on {text}."
        for text, names in rows.items()
    ]


def _told(timed: Mapping[str, object]) -> str:
    note = f"; {timed['note']}" if "note" in timed else ""
    where = f"{timed['hardware']} (torch {timed['torch']}, {timed['date']})"
    return f"{where}, over {timed['batches']} batch{'' if timed['batches'] == 1 else 'es'}{note}"
