"""`undrift bench`: run missing cells of a benchmark, write its tables and figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from undrift._errors import DataError, OptionError
from undrift.cli.page_arguments import PageFile, check_page
from undrift.cli.session import Session, command
from undrift.system.atomic import check

if TYPE_CHECKING:
    from undrift_bench.bench import Outcome, Request

Names = list[str] | None
TINY = "tiny"  # the folder below --results that trials with --tiny go to


@command
def run(
    session: Session,
    name: Annotated[str | None, typer.Argument(help="The benchmark. Default, or list: their names.")] = None,
    data: Annotated[Path, typer.Option(help="Where data sets and source networks lie.", metavar="FOLDER")] = Path(),
    results: Annotated[
        Path, typer.Option(help="Where finished cells, tables and figures go.", metavar="FOLDER")
    ] = Path("benchmarks/results"),
    cache: Annotated[
        Path | None, typer.Option(help="Keep corrupted and decoded images and sources here.", metavar="FOLDER")
    ] = None,
    only: Annotated[Names, typer.Option(help="A row or method; repeat it, or use commas. Default: all.")] = None,
    tier: Annotated[str | None, typer.Option(help="A: the main methods; B: the others. Default: both.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many, from 0 up. Default: 3.", min=1)] = None,
    networks: Annotated[Names, typer.Option(help="A source network; repeat it, or use commas.")] = None,
    settings: Annotated[
        Names, typer.Option(help="A setting, or all; repeat it, or use commas. Default: the main one.")
    ] = None,
    images: Annotated[int | None, typer.Option(help="At most so many of each domain.", min=2)] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds: start no cell that would end later.", min=0, metavar="SECONDS")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Channels-last and bfloat16.")] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny random network and a few random images: does everything run?")
    ] = False,
    wrn2810: Annotated[Path | None, typer.Option(help="The WRN-28-10 that you trained.", metavar="FILE")] = None,
    resnet50: Annotated[Path | None, typer.Option(help="ImageNet's ResNet-50.", metavar="FILE")] = None,
    weights: Annotated[Names, typer.Option(help="NETWORK=FILE; repeat it.")] = None,
    values: Annotated[
        Names, typer.Option("--set", help="NAME=VALUE of this benchmark's own; repeat it.", metavar="NAME=VALUE")
    ] = None,
    frost: Annotated[Path | None, typer.Option(help="Folder of frost pictures.", metavar="FOLDER")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    report: PageFile = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Say which cells are finished or stale, and run none.")
    ] = False,
    tables_only: Annotated[
        bool, typer.Option("--tables", help="Write tables and figures from the finished cells, and run none.")
    ] = False,
    times_only: Annotated[
        bool, typer.Option("--times", help="Time a few batches of each finished row, alone on the machine; run none.")
    ] = False,
) -> dict[str, Any]:
    """Run a benchmark: every method on the same footing, published numbers beside ours.

    A finished cell (a method, network, setting, seed and precision) is run again only where the method or a default of
    it changed since ("stale"): stopped, the same command goes on.

    Example: undrift bench table1
    """
    from undrift_bench import bench
    from undrift_bench.bench.harness.request import check_options
    from undrift_bench.bench.harness.run import check_selection, with_cells
    from undrift_bench.bench.harness.web_page import write_page

    check_page(report)
    if report is not None:
        check(report)
    if name == "list":
        name = None
    _one_thing(name, {"--list": list_only, "--tables": tables_only, "--times": times_only})
    if report is not None and (name is None or list_only):
        raise OptionError(
            f"--report {report} was given and nothing that has a page; needed: a benchmark, and no --list. Write "
            f"`undrift bench NAME --report {report}`."
        )
    if name is None:
        width = max(map(len, bench.NAMES))
        for known, (_, line) in bench.NAMES.items():
            session.say(f"{known.ljust(width)}  {line}")
        return {"benchmarks": {known: line for known, (_, line) in bench.NAMES.items()}}
    found = bench.find(name)
    options = {
        "--only": only,
        "--tier": tier,
        "--seeds": seeds,
        "--networks": networks,
        "--settings": settings,
        "--images": images,
        "--deadline": deadline,
        "--fast": fast or None,
        "--tiny": tiny or None,
        "--weights": weights,
        "--wrn2810": wrn2810,
        "--resnet50": resnet50,
    }
    check_options(name, [option for option, value in options.items() if value is not None], _pairs(weights))
    files = {"wrn28_10": wrn2810, "resnet50_v1": resnet50}
    request = bench.Request(
        data=data,
        # A stand-in on random images must not stand where measurements are: its cells, pages and figures lie apart.
        results=results / TINY if tiny else results,
        cache=cache,
        only=_split(only),
        tier=_tier(tier),
        seeds=bench.Request.seeds if seeds is None else seeds,
        networks=_split(networks),
        settings=_split(settings),
        images=images,
        tiny=tiny,
        deadline=deadline,
        device=device,
        fast=fast,
        weights={n: f for n, f in files.items() if f} | {n: Path(f) for n, f in _pairs(weights).items()},
        frost=frost,
        extra=_pairs(values),
    )
    request.check_read_by(name)
    if (cells := with_cells(found)) is not None:
        check_selection(cells, request)
    if list_only:
        return _list(session, name, found, request)
    session.kept = f"Finished cells stay in {request.results}; the same command goes on from there."
    if times_only:
        outcome = _times(session, name, found, request)
    elif tables_only:
        outcome = _tables(name, found, request)
    elif isinstance(found, bench.Benchmark):
        outcome = bench.run(found, request, session.say, session.quiet)
    else:
        outcome = found(request, session.say)
    session.say(outcome.text)
    if report is not None:
        write_page(report, name, with_cells(found), request, outcome)
        outcome.wrote.append(report)
    wrote = [session.wrote(path) for path in outcome.wrote]
    counts = {
        "timed" if times_only else "ran": outcome.ran,
        "failed": outcome.failed,
        "kept": outcome.kept,
        "left": outcome.left,
    }
    session.say("cells: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    if not wrote:
        session.say("No page was written: nothing of it is finished, and the one that is there has cells.")
    if outcome.trouble:
        raise DataError(outcome.trouble)
    return {**counts, "wrote": wrote}


def _one_thing(name: str | None, instead: dict[str, bool]) -> None:
    """Refuse flags that would be ignored: each is done in place of a run, so two exclude one another."""
    given = [flag for flag, asked in instead.items() if asked]
    if len(given) > 1:
        first = f"{', '.join(given[:-1])} and {given[-1]}"
        raise OptionError(
            f"{first} were given together; needed: at most one of {', '.join(instead)}, as each is done in place of a "
            "run. Give them in a command each; --times writes the tables, too."
        )
    # `undrift bench --list` has an answer: the names.
    if name is None and given and given != ["--list"]:
        raise OptionError(
            f"{given[0]} was given and no benchmark; needed: the name of one. Write `undrift bench NAME {given[0]}`; "
            "`undrift bench` says the names."
        )


def _list(session: Session, name: str, found: object, request: "Request") -> dict[str, Any]:
    """Say the state of a benchmark's cells, or of those that it reads, and return them."""
    from undrift_bench.bench.harness.run import in_other_precision, listing, row_notes, with_cells

    made_of = with_cells(found)
    if made_of is None:
        raise OptionError(f"{name} has no cells to list; needed: a benchmark with cells. Leave --list out.")
    cells, notes = listing(made_of, request), row_notes(made_of, request)
    for key, state in cells:
        session.say(f"{state:<8}  {key}")
    precision, finished = in_other_precision(made_of, request)
    if finished:
        how = "leave --fast out" if request.fast else "give --fast"
        session.say(f"{finished} of these cells are finished in {precision}; {how} to list them.")
    for row, note in notes.items():
        session.say(f"{row}: {note}")
    return {"cells": dict(cells), "finished_elsewhere": {precision: finished}, "notes": notes}


def _tables(name: str, found: object, request: "Request") -> "Outcome":
    """Return what was written from the finished cells of a benchmark, or of the one whose cells it reads."""
    from undrift_bench.bench.harness.run import Benchmark, Tabled, tables

    if isinstance(found, Benchmark):
        return tables(found, request)
    if isinstance(found, Tabled):
        return found.tables(request)
    raise OptionError(f"{name} has no cells to make tables of; needed: a benchmark with cells. Leave --tables out.")


def _times(session: Session, name: str, found: object, request: "Request") -> "Outcome":
    """Return what was timed of a benchmark's finished cells."""
    from undrift_bench.bench.harness.run import Benchmark
    from undrift_bench.bench.times.take import take_times

    if isinstance(found, Benchmark):
        return take_times(found, request, session.say, session.quiet)
    raise OptionError(f"{name} has no cells of its own to time; needed: a benchmark with cells. Leave --times out.")


def _split(given: Names) -> tuple[str, ...]:
    return tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())


def _pairs(given: Names) -> dict[str, str]:
    wrong = [text for text in given or () if "=" not in text]
    if wrong:
        raise OptionError(f"{wrong[0]!r} has no '='; needed: NAME=VALUE. Write it so.")
    return {text.partition("=")[0]: text.partition("=")[2] for text in given or ()}


def _tier(text: str | None) -> Literal["A", "B"] | None:
    if text is None or text in ("A", "B"):
        return text  # type: ignore[return-value]
    raise OptionError(f"there is no tier {text!r}; needed: A or B. Leave it out for both.")
