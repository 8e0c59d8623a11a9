"""`undrift evaluate`: labelled images in, a report out."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift._errors import OptionError
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root, skipped_of
from undrift.cli.likelihood_arguments import LikelihoodFlags, make_likelihood
from undrift.cli.model_arguments import ModelFlags, open_adapted, open_source, try_out
from undrift.cli.open_inputs import open_perturbed
from undrift.cli.output_paths import Force, claim
from undrift.cli.page_arguments import EventsFolder, PageFile, check_page, events_in
from undrift.cli.predict import read_temperature
from undrift.cli.session import Session, command
from undrift.cli.shared_arguments import BatchSize, DomainFile, ModeName, Preset, Samples, Seed, Temperature
from undrift.options import Options

if TYPE_CHECKING:
    from torch import nn

    from undrift.images import Batches
    from undrift.judge.report import Report
    from undrift.posterior.perturbed import Perturbed
    from undrift.predict import Mode

SETTINGS = ("offline", "generalized", "continual")
CONTINUAL_PANEL = "The method of a continual evaluation (every option: --help-all)"
HIDDEN = [field.name for field in fields(Options)]  # most evaluations do not adapt


@command
@takes(Options, "options", CONTINUAL_PANEL, names={"stream_lr": "--lr"}, hidden=HIDDEN)
@takes(LikelihoodFlags, "likelihood", CONTINUAL_PANEL)
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    target: Annotated[list[str], typer.Option(help="Tree, .tar, .npy, data set; repeat it.", metavar="PATH")],
    model: dict[str, Any],
    likelihood: dict[str, Any],
    options: dict[str, Any],
    source: Annotated[str | None, typer.Option(help="Held-out source images, labelled.", metavar="PATH")] = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option(help="Labels of an .npy; repeat it in order.", metavar="FILE.npy"),
    ] = None,
    source_labels: Annotated[
        Path | None, typer.Option(help="Labels of an .npy source.", metavar="FILE.npy", hidden=True)
    ] = None,
    domain: DomainFile = None,
    setting: Annotated[str | None, typer.Option(help="offline, generalized or continual.", metavar="NAME")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.", metavar="FILE.json")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report.", metavar="FILE.png")] = None,
    report_page: PageFile = None,
    tensorboard: EventsFolder = None,
    preset: Preset = None,
    samples: Samples = None,
    mode: ModeName = "full",
    temperature: Temperature = "1",
    seed: Seed = 0,
    batch_size: BatchSize = 64,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Score a network on labelled images: error, NLL, Brier, ECE, AURC.

    One --target is offline; with --source, generalized. Several --target are one continual stream.

    Example: undrift evaluate --target images/ --weights net.pt
    """
    from undrift.cli.label_arguments import check_label_range, labelled_images
    from undrift.evaluate import evaluate, evaluate_continual, evaluate_generalized
    from undrift.judge.page.recording import Recording
    from undrift.posterior.perturbed import Perturbed
    from undrift.stream import stream

    chosen = _setting(setting, target, source, options, likelihood)
    check_page(report_page)
    claim((out, plot, report_page), force, (domain, *(Path(t) for t in target)))
    names = _names(target)
    label_files = _label_files(target, labels)
    asked = make_likelihood(likelihood, usual="entropy")
    opened = open_source(session, model, root, domain)
    domains = {
        name: labelled_images(text, opened.reader, opened.classes, path)
        for name, text, path in zip(names, target, label_files, strict=True)
    }
    held = None if source is None else labelled_images(source, opened.reader, opened.classes, source_labels)
    every = [*domains.values(), *([] if held is None else [held])]
    outputs = try_out(opened, every[0])
    for each in every:
        check_label_range(each, outputs)
    loaders = {name: each.batches(batch_size) for name, each in domains.items()}
    clean: Batches[Any] | None = None if held is None else held.batches(batch_size)
    how: Mode = mode  # type: ignore[assignment]  # predict says what is wrong with it
    seen = None if report_page is None else Recording(opened.preprocess, opened.classes)
    watch = None if seen is None else seen.add
    adapted: nn.Module | None = None
    if chosen == "continual":
        perturbed = open_perturbed(opened, domain, preset, options, seed)
        report = evaluate_continual(
            perturbed,
            loaders,
            lambda batches: stream(
                perturbed,
                batches,
                asked,
                answer=options.get("answer"),
                lr=options.get("stream_lr"),
                progress=not session.quiet,
            ),
            source=clean,
            samples=samples,
            mode=how,
            generator=seed,
            watch=watch,
        )
        adapted = perturbed
    else:
        network = opened.source.network if domain is None else open_adapted(opened, domain, seed)
        adapted = None if domain is None else network
        heat = read_temperature(session, temperature, network, every[0])
        if clean is not None and chosen == "generalized":
            task = f"{Path(str(source)).name} → {names[0]}"
            (loader,) = loaders.values()
            report = evaluate_generalized(
                network,
                loader,
                clean,
                task=task,
                samples=samples,
                temperature=heat,
                generator=seed,
                mode=how,
                watch=watch,
            )
        else:
            report = evaluate(
                network, loaders, samples=samples, temperature=heat, generator=seed, mode=how, watch=watch
            )
    written: list[Path] = []
    page = None
    if report_page is not None:
        before = None
        if isinstance(adapted, Perturbed):
            tasks = {(r.task, r.domain) for r in report.of("target")}
            before = _of_source(adapted, loaders, next(iter(tasks)) if chosen == "generalized" else None)
        page = partial(report.page, seen=seen, source=before)
    for path, write in ((out, report.save), (plot, report.plot), (report_page, page)):  # before printing, as in adapt
        if path is not None and write is not None:
            write(path)
            written.append(path)
            session.kept = f"{', '.join(map(str, written))} written whole."
    with events_in(tensorboard) as events:
        if events is not None:
            events.report(report)
    session.say(str(report))
    wrote = [session.wrote(path) for path in written]
    return {**report.to_dict(), "wrote": wrote, "skipped": skipped_of(*every)}


def _of_source(model: "Perturbed", loaders: "Mapping[str, Batches[Any]]", task: tuple[str, str] | None) -> "Report":
    """Return the report of the source network on the same images, to compare with."""
    from undrift.evaluate import evaluate

    with model.off() as net:
        found = evaluate(net, dict(loaders))
    if task is None:
        return found
    return replace(found, results=tuple(replace(r, task=task[0], domain=task[1]) for r in found.results))


def _setting(
    setting: str | None, target: list[str], source: str | None, options: dict[str, Any], likelihood: dict[str, Any]
) -> str:
    """Return the evaluation's setting; raise where other flags do not fit it."""
    usual = "continual" if len(target) > 1 else "offline" if source is None else "generalized"
    chosen = setting or usual
    if chosen not in SETTINGS:
        raise OptionError(
            f"--setting {chosen!r} is not one of {', '.join(SETTINGS)}; needed: one of these. Choose one."
        )
    if chosen == "generalized" and (source is None or len(target) != 1):
        raise OptionError(
            f"generalized has {len(target)} targets and {'no' if source is None else 'a'} source; needed: one --target "
            "and --source."
        )
    if chosen == "offline" and source is not None:
        raise OptionError(
            "--source was given with --setting offline; needed: target images only. Leave it out, or choose another "
            "--setting."
        )
    if chosen != "continual" and (options or likelihood):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in (*options, *likelihood))
        raise OptionError(
            f"{names} was given, but only a continual evaluation adapts. Leave it out, or add --setting continual."
        )
    return chosen


def _names(target: list[str]) -> list[str]:
    """Return the last part of each target's path, or the whole paths where two would be equal."""
    short = [Path(text).name.removesuffix(".tar").removesuffix(".npy") for text in target]
    names = short if len(set(short)) == len(short) else target
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(f"--target {twice} was given twice; needed: each target once. Leave one out.")
    return names


def _label_files(target: list[str], labels: list[Path] | None) -> list[Path | None]:
    """Return one file of labels per target, None for those that are no array."""
    arrays = [text for text in target if text.endswith(".npy")]
    given = labels or []
    if len(given) != len(arrays):
        raise OptionError(
            f"{len(given)} --labels for {len(arrays)} targets that are an .npy; needed: one each, in the same order. "
            "Other targets have one folder per class."
        )
    left = iter(given)
    return [next(left) if text.endswith(".npy") else None for text in target]
