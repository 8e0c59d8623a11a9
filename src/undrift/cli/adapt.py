"""`undrift adapt`: unlabelled images in, a domain file out."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift import methods
from undrift._errors import OptionError
from undrift.cli.app import HURT
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root, hold_if_small, skipped_of
from undrift.cli.likelihood_arguments import LikelihoodFlags
from undrift.cli.method_arguments import METHOD_PANEL, MethodName, Settings, choose
from undrift.cli.model_arguments import ModelFlags
from undrift.cli.open_inputs import open_both, perturbed_afresh
from undrift.cli.output_paths import Force, alone, beside, check_pack
from undrift.cli.page_arguments import EventsFolder, PageFile, check_page, events_in
from undrift.cli.session import Session, command
from undrift.cli.shared_arguments import Images, MethodBatchSize, PackMean, Preset, Seed
from undrift.options import Options

if TYPE_CHECKING:
    from undrift.loop.setup import Keep


@command
@takes(
    Options,
    "options",
    METHOD_PANEL,
    names={"adapt_lr": "--lr"},
    hidden=("stream_lr", "answer"),
    defaults=methods.get("undrift", "adapt").options,
)
@takes(LikelihoodFlags, "likelihood", METHOD_PANEL)
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    images: Images,
    out: Annotated[Path, typer.Option(help="Domain file, NAME.safetensors.", metavar="FILE")],
    model: dict[str, Any],
    likelihood: dict[str, Any],
    options: dict[str, Any],
    method: MethodName = None,
    settings: Settings = None,
    preset: Preset = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; default 15 or the method's.", min=1, metavar="N")] = None,
    batch_size: MethodBatchSize = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="The epoch to keep: last; best by the label-free verdict; or safe: the last, but the source network "
            "where adaptation hurt. Default: safe with undrift, else last.",
            metavar="NAME",
            hidden=True,
        ),
    ] = None,
    pack_mean: PackMean = None,
    seed: Seed = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Saved every epoch; resume from it.", metavar="FILE")] = None,
    report: PageFile = None,
    tensorboard: EventsFolder = None,
    plot: Annotated[bool, typer.Option("--plot", help="Also draw the history: NAME.history.png.", hidden=True)] = False,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Adapt a network to unlabelled images and write a domain file.

    Example: undrift adapt images/ --weights net.pt --out b.safetensors
    """
    import torch

    from undrift.adapt import adapt
    from undrift.packs.compression import DEFAULT, compressor
    from undrift.packs.file import save

    which = _keep(keep)
    check_pack(out)
    check_page(report)
    stored_mean = pack_mean or DEFAULT
    compressor(stored_mean)  # raises now, not after hours of work
    chosen = choose("adapt", method, settings, preset, options, likelihood, seed)
    history_path, plot_path = beside(out, ".history.json"), beside(out, ".history.png") if plot else None
    outputs = (out, history_path, plot_path, report)
    opened, domain = open_both(session, model, images, root, outputs, force, chosen.files(), going_on=(checkpoint,))
    chosen = chosen.fitted(opened.source.network, domain)
    parts = chosen.parts(opened.reader)
    held = hold_if_small(domain, opened.device)
    perturbed = perturbed_afresh(opened, parts.options, seed)
    session.kept = _kept(checkpoint)
    crew = session.crew
    first = crew.first  # the process that writes files
    with (
        alone(checkpoint if first else None),
        events_in(tensorboard if first else None) as events,
        crew.together(opened.device),
    ):
        history = adapt(
            perturbed,
            held,
            parts.likelihood,
            epochs if chosen.recipe is None or epochs else chosen.recipe.epochs,
            batch_size=batch_size if chosen.recipe is None or batch_size else chosen.recipe.batch_size,
            keep=which if which is not None or chosen.recipe is None else chosen.recipe.keep,
            checkpoint=checkpoint,
            keepers=parts.keepers,
            generator=torch.Generator().manual_seed(seed),
            progress=False if session.quiet else None,
        )
        if chosen.recipe is not None and chosen.recipe.note:
            history = dataclasses.replace(history, note=chosen.recipe.note)
        skipped = crew.all_of(skipped_of(domain, held))
        if events is not None:
            events.history(history)
    if not first:
        return {}
    # Write every file before printing, so that a closed stdout costs no result.
    save(perturbed, out, source=opened.source.name, mean=stored_mean)
    session.kept = f"{out} was written whole."
    history.save(history_path)
    if plot_path is not None:
        history.plot(plot_path)
    if report is not None:
        history.page(report, held)
    session.say(str(dataclasses.replace(history, verdict=None)))
    wrote = [session.wrote(path) for path in outputs if path is not None]
    if (verdict := history.verdict) is not None:
        session.code = HURT if verdict.hurt else session.code
        session.say(f"{history.kept} kept; {verdict}", "bold" if verdict.hurt else "")
    return {
        "domain_file": str(out),
        "wrote": wrote,
        "images": len(domain) - len(skipped),
        "skipped": skipped,
        "verdict": None if verdict is None else verdict.as_dict(),
        "kept_epoch": history.kept_epoch,
        "epochs": history.as_dict()["epochs"],
        "method": chosen.name,
        "options": perturbed.options.as_dict(),
    }


def _keep(text: str | None) -> "Keep | None":
    if text not in (None, "last", "best", "safe"):
        raise OptionError(f"--keep {text!r} is not one of last, best, safe; needed: which epoch to keep. Choose one.")
    return text  # type: ignore[return-value]


def _kept(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "Nothing was written. With --checkpoint FILE, the same command resumes a stopped run."
    return f"{checkpoint} holds the run so far; the same command resumes it. The domain file is not written yet."
