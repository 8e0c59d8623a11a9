"""`undrift predict`: images in, answers out, each with how sure it is."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift._errors import OptionError, UndriftWarning
from undrift.cli.answers import COLUMNS, InMemory, as_dicts, check_ending, check_threshold, csv_lines, rows_of, table_in
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root, skipped_of
from undrift.cli.model_arguments import ModelFlags, open_adapted, open_source, try_out
from undrift.cli.output_paths import Force, claim
from undrift.cli.session import Session, command

if TYPE_CHECKING:
    import torch
    from torch import nn

    from undrift.images import Domain
    from undrift.system.progress import Bar

Samples = Annotated[
    int | None, typer.Option(help="Draws averaged an answer; 0 is the mean network. Default: the file's.", min=0)
]
Temperature = Annotated[str, typer.Option(help="Divides the logits; auto chooses it without labels.", metavar="T|auto")]
DomainFile = Annotated[
    Path | None, typer.Option(help="What `undrift adapt` wrote; without it the source network answers.", metavar="FILE")
]


@command
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    images: Annotated[str, typer.Argument(help="A folder, .tar, .txt list, .npy, an image, or a data set's name.")],
    model: dict[str, Any],
    domain: DomainFile = None,
    out: Annotated[
        Path | None, typer.Option(help="A .csv or .parquet; without it the answers are printed.", metavar="FILE")
    ] = None,
    abstain_below: Annotated[
        float | None, typer.Option(help="Label answers with a lower probability 'abstain'.", metavar="P")
    ] = None,
    samples: Samples = None,
    mode: Annotated[
        str, typer.Option(help="full: all draws; fast: two or three, made as unsure as all over all images.")
    ] = "full",
    temperature: Temperature = "1",
    seed: Annotated[int, typer.Option(help="Of the noise.", min=0)] = 0,
    batch_size: Annotated[int, typer.Option(help="Images at once.", min=1)] = 64,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Answer images, with how sure the answers are.

    A row an image: path, label, probability, entropy (in nats), mutual_information (how much the draws disagree).

    Example: undrift predict clinic-b/ --weights source.safetensors --domain clinic-b.safetensors --out answers.csv
    """
    import torch

    from undrift.predict import predict
    from undrift.system.progress import Bar

    weights = model.get("weights")
    check_ending(out)
    claim((out,), force, (domain, None if weights is None else Path(weights), Path(images)))
    opened = open_source(session, model, root, domain)
    check_threshold(abstain_below, opened.classes)
    pictures = opened.reader.images(images)
    try_out(opened, pictures)
    network: nn.Module = opened.source.network if domain is None else open_adapted(opened, domain, seed)
    heat = read_temperature(session, temperature, network, pictures)
    generator = torch.Generator().manual_seed(seed)
    session.kept = "Nothing was written: answers appear whole or not at all."
    counts = {"answered": 0, "abstained": 0, "unanswered": 0}
    batches = pictures.named_batches(batch_size)
    with table_in(out) as table, Bar("predict", len(batches), False if session.quiet else None) as bar:
        # The mode fast has one temperature a call: all images are one. The others are written batch by batch.
        for call in [batches] if mode == "fast" else ([batch] for batch in batches):
            names: list[str] = []
            prediction = predict(
                network,
                _noting(call, names, opened.device, bar),
                samples,
                generator=generator,
                temperature=heat,
                mode=mode,  # type: ignore[arg-type]  # predict says what is wrong with it
            )
            rows = rows_of(names, prediction, opened.classes, abstain_below)
            table.add(rows)
            unsure = (
                0
                if abstain_below is None
                else int((~prediction.certain(abstain_below) & (prediction.label >= 0)).sum())
            )
            unknown = int((prediction.label < 0).sum())
            for key, count in zip(counts, (len(rows) - unsure - unknown, unsure, unknown), strict=True):
                counts[key] += count
    skipped = skipped_of(pictures)
    result = {**counts, "skipped": skipped, "temperature": heat, "domain_file": domain}
    if isinstance(table, InMemory):
        if not session.as_json:
            session.put(csv_lines([COLUMNS, *table.rows]).decode())
        return {**result, "answers": as_dicts(table.rows)}
    assert out is not None
    session.kept = f"{out} was written whole."
    session.say(f"{counts['answered']:,} answers, {counts['abstained']:,} abstentions, {len(skipped):,} images skipped")
    return {**result, "wrote": [session.wrote(out)]}


def _noting(
    batches: "Iterable[tuple[torch.Tensor, Sequence[str]]]", names: list[str], device: "torch.device", bar: "Bar"
) -> "Iterator[torch.Tensor]":
    """Yield images on their device, and note what they are called."""
    for batch, called in batches:
        names += called
        yield batch.to(device)
        bar.advance()


def read_temperature(session: Session, text: str, network: "nn.Module", images: "Domain", few: int = 8) -> float:
    """Return the number that is given, or the one chosen from the first few batches without labels; else 1."""
    if text == "auto":
        from undrift.answer.temperature import temperature

        first = [batch for batch, _ in itertools.islice(images.named_batches(64), few)]
        with warnings.catch_warnings():  # raised, not printed: its advice is not to use what was found
            warnings.filterwarnings("error", "no temperature between", UndriftWarning)
            try:
                chosen = temperature(network, first)
            except UndriftWarning as warning:
                found = str(warning).partition(";")[0]
                session.warn(
                    f"{found}; needed: mirrored copies that are answered otherwise now and then. "
                    "Temperature 1 is used, as without auto; give another with --temperature T."
                )
                return 1.0
        session.note(f"temperature {chosen:.3g}, chosen by mirrored copies: not for digits or letters")
        return chosen
    try:
        return float(text)
    except ValueError as error:
        raise OptionError(
            f"--temperature {text!r} is neither a number nor auto; 1 leaves the logits as they are."
        ) from error
