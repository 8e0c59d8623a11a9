"""`undrift stream`: images in, answers out at once, while the network adapts."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from undrift import methods
from undrift._errors import OptionError
from undrift.cli.answers import check_threshold, rows_of
from undrift.cli.flags import takes
from undrift.cli.image_arguments import InOrder, Root
from undrift.cli.likelihood_arguments import LikelihoodFlags
from undrift.cli.method_arguments import METHOD_PANEL, MethodName, Settings, choose
from undrift.cli.model_arguments import ModelFlags
from undrift.cli.open_inputs import open_both, open_perturbed, perturbed_afresh
from undrift.cli.output_paths import Force, check_pack
from undrift.cli.page_arguments import EventsFolder, PageFile, check_page, events_in
from undrift.cli.session import Session, command
from undrift.cli.shared_arguments import Images, MethodBatchSize, PackMean, Preset, Seed
from undrift.cli.signals import stopping_between_batches
from undrift.options import Options, resolve

EVENTS_EVERY = 10
"""Batches between two TensorBoard events."""


@command
@takes(
    Options,
    "options",
    METHOD_PANEL,
    names={"stream_lr": "--lr"},
    hidden=("adapt_lr",),
    defaults=methods.get("undrift", "stream").options,
)
@takes(LikelihoodFlags, "likelihood", METHOD_PANEL)
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    images: Images,
    answers: Annotated[Path, typer.Option(help="The .csv to append to.", metavar="FILE")],
    model: dict[str, Any],
    likelihood: dict[str, Any],
    options: dict[str, Any],
    domain: Annotated[Path | None, typer.Option(help="Domain file to start from.", metavar="FILE")] = None,
    out: Annotated[Path | None, typer.Option(help="Domain file to write at the end.", metavar="FILE")] = None,
    state: Annotated[Path | None, typer.Option(help="State to save, and to resume from.", metavar="FILE")] = None,
    state_every: Annotated[
        int | None,
        typer.Option(help="Batches between two states. Default: 10, or as --gather.", min=1, metavar="N", hidden=True),
    ] = None,
    report: PageFile = None,
    tensorboard: EventsFolder = None,
    method: MethodName = None,
    settings: Settings = None,
    preset: Preset = None,
    episodic: Annotated[
        bool | None,
        typer.Option(help="Reset the network before every batch. Default: no, or as the method.", hidden=True),
    ] = None,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            help="Go back when the network has become worse than its source. Default: with undrift.",
            hidden=True,
        ),
    ] = None,
    captured: Annotated[
        bool, typer.Option("--captured", help="Run the gradient as one CUDA graph (GPU only).", hidden=True)
    ] = False,
    gather: Annotated[
        int | None,
        typer.Option(help="Force a step every N images.", min=1, metavar="N"),
    ] = None,
    balanced: Annotated[
        bool,
        typer.Option(
            "--balanced",
            help="With --gather N: step on equally many images of each predicted class, for classes in runs.",
            hidden=True,
        ),
    ] = False,
    abstain_below: Annotated[
        float | None, typer.Option(help="Below this probability, say 'abstain'.", metavar="P", hidden=True)
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(help="JSON file that says how the stream is doing, every 10 s.", metavar="FILE", hidden=True),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve the same to Prometheus on this port.", min=0, max=65535, metavar="PORT", hidden=True),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address of --metrics-port; the default is this machine alone.", hidden=True)
    ] = "127.0.0.1",
    rotate_mb: Annotated[
        float | None,
        typer.Option(help="Move answers aside when they are so large, as a.000001.csv.", min=0, hidden=True),
    ] = None,
    pack_mean: PackMean = None,
    seed: Seed = 0,
    batch_size: MethodBatchSize = None,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Adapt and answer batch by batch, as images arrive.

    With --state FILE, the same command resumes a stopped stream.

    Example: undrift stream images/ --weights net.pt --answers a.csv
    """
    from undrift.cli.heartbeat import beating
    from undrift.cli.metrics import serving
    from undrift.cli.page_arguments import LivePage
    from undrift.cli.resumable import files_of, unread
    from undrift.cli.stream_state import identity_of
    from undrift.loop.gather import with_kept_statistics
    from undrift.packs.compression import DEFAULT, compressor
    from undrift.packs.file import save
    from undrift.stream import stream

    check_pack(out)
    check_page(report)
    stored_mean = pack_mean or DEFAULT
    compressor(stored_mean)  # raises now, not after hours of work
    chosen = choose("stream", method, settings, preset, options, likelihood, seed, ready=domain is not None)
    if method is not None and domain is not None:
        raise OptionError(
            f"--method {method} was given beside --domain, whose file has options of its own; needed: one of the two. "
            "Leave one out."
        )
    if answers.suffix != ".csv":
        raise OptionError(f"--answers {answers} does not end in .csv; needed: a .csv file. Rename it.")
    most = None if rotate_mb is None else max(1, int(rotate_mb * 1e6))
    with files_of(session, answers, state, out, force, most, report) as files, events_in(tensorboard) as events:
        may_exist = (*files.going_on, health)  # a heartbeat is nobody's work
        opened, pictures = open_both(session, model, images, root, files.new, force, chosen.files(), domain, may_exist)
        check_threshold(abstain_below, opened.classes)
        parts = chosen.parts(opened.reader)
        if chosen.recipe is None:
            if gather is not None and domain is None:
                options = {
                    "norm_statistics": with_kept_statistics(resolve(preset or "paper", {})).norm_statistics,
                    **options,
                }
            perturbed = open_perturbed(opened, domain, preset, options, seed)
        else:
            scheme = parts.options if gather is None else with_kept_statistics(parts.options)
            perturbed = perturbed_afresh(opened, scheme, seed)
        episodic = bool(chosen.recipe and chosen.recipe.episodic) if episodic is None else episodic
        batch_size = batch_size or (chosen.recipe.stream_batch if chosen.recipe else 64)
        every = state_every or gather or 10  # images that wait for a step are part of the state
        identity = identity_of(perturbed, pictures, domain) | {
            "options": perturbed.options.as_dict() | {k: options[k] for k in ("answer", "stream_lr") if k in options},
            "method": chosen.name,
            "settings": sorted(settings or ()),
            "likelihood": sorted(likelihood.items()),
            "batch_size": batch_size,
            "seed": seed,
            "episodic": episodic,
            "guard": guard,
            "abstain_below": abstain_below,
            **({} if gather is None else {"gather": gather}),
            **({"balanced": True} if balanced else {}),
        }
        saved = files.find(identity, pictures)
        place = 0 if saved is None else saved.position
        left = InOrder(pictures, batch_size, place, opened.device, goes_on=state is not None)
        going = stream(
            perturbed,
            left,
            parts.likelihood,
            answer=options.get("answer"),
            lr=options.get("stream_lr"),
            episodic=episodic,
            guard=guard,
            captured=captured,
            gather=gather,
            balanced=balanced,
            keepers=parts.keepers,
            progress=not session.quiet,
        )
        page = None
        if report is not None:
            going.record(names=lambda: left.names)
            page = LivePage(session, going, report)
        if saved is not None:
            going.load_state_dict(saved.stream)
        files.open(saved, pictures)
        try:
            files.note(left, going, saved, write=True)  # find out at once whether the disk takes it
            with (
                beating(session, health) as heart,
                serving(metrics_port, metrics_host, lambda: heart.now),
                stopping_between_batches() as pressed,
            ):
                for number, prediction in enumerate(going, 1):
                    files.log.add(rows_of(left.names, prediction, opened.classes, abstain_below))
                    files.note(left, going, saved, number % every == 0)
                    heart.answered(going, time.perf_counter() - left.ready, len(prediction), unread(saved, left)[1])
                    if page is not None:
                        page.write_if_due()
                    if events is not None and number % EVENTS_EVERY == 0:
                        events.scalars({f"stream/{k}": v for k, v in going.latest.items()}, going.report.images)
                    if pressed:
                        break
                files.note(left, going, saved, write=True)
                heart.look(going, unread(saved, left)[1], last=True)
        finally:
            going.close()
        if out is not None:  # before printing, as in adapt
            with going.answering() as answered:
                save(answered, out, source=opened.source.name, mean=stored_mean)
        if report is not None:
            going.page(report)
    if left.unfinished:
        session.note(
            f"left for the next run, as it was written to just now and cannot be read yet: {left.unfinished[0]}"
            + (f" and {len(left.unfinished) - 1} after it" if len(left.unfinished) > 1 else "")
        )
    session.say(str(going.report))
    helping = heart.now["helping"]
    if helping is not None:
        session.say(helping["sentence"])
    skipped, unreadable = unread(saved, left)
    wrote = [session.wrote(path) for path in (*files.parts, answers, out, report, health) if path is not None]
    return {
        "wrote": wrote,
        "method": chosen.name,
        "state": state,
        "skipped": skipped,
        "unreadable": unreadable,
        "unfinished": left.unfinished,
        "helping": helping,
        "report": going.report.state_dict(),
    }
