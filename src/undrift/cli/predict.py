"""`undrift predict`: images in, answers out, each with how sure it is."""

import itertools
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift._errors import OptionError, UndriftError, UndriftWarning
from undrift.cli.answer_parts import AnswerParts, check_parts
from undrift.cli.answers import (
    ABSTAIN,
    Add,
    Row,
    as_dicts,
    check_ending,
    check_threshold,
    columns_of,
    csv_lines,
    rows_in,
    rows_of,
)
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root, skipped_of
from undrift.cli.model_arguments import ModelFlags, open_adapted
from undrift.cli.open_inputs import open_both
from undrift.cli.output_paths import Force
from undrift.cli.session import Session, command
from undrift.cli.shared_arguments import (
    BatchSize,
    DomainFile,
    Images,
    ModeName,
    Samples,
    Seed,
    Temperature,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from undrift.answer.prediction import Prediction
    from undrift.images import Batches, Domain
    from undrift.packs.collection import Packs
    from undrift.system.progress import Bar

UNKNOWN = ""
"""Counted beside the names of packs, which are never empty."""


@command
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    images: Images,
    model: dict[str, Any],
    domain: DomainFile = None,
    pack: Annotated[
        list[Path] | None,
        typer.Option(help="A pack, or a folder of them; repeat it. Each image gets its own.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A .csv or .parquet. Default: print.", metavar="FILE")] = None,
    abstain_below: Annotated[
        float | None, typer.Option(help="Below this probability, say 'abstain'.", metavar="P")
    ] = None,
    samples: Samples = None,
    mode: ModeName = "full",
    temperature: Temperature = "1",
    seed: Seed = 0,
    batch_size: BatchSize = 64,
    parts: Annotated[
        int | None,
        typer.Option(help="Work in N parts; start the command as often as you like.", min=1, metavar="N"),
    ] = None,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Answer images, with how sure the answers are.

    One row per image: path, label, probability, entropy (nats) and mutual_information (how much the draws disagree).
    With --pack, each image is answered by the pack that knows it, or by the source network; the column pack says which.

    With --parts N, any number of processes of the same command share the images, on all machines that see the folder.

    Example: undrift predict images/ --weights net.pt --domain b.safetensors
    """
    import torch

    import undrift
    from undrift.cli.image_arguments import name_of
    from undrift.packs.fingerprint import fingerprint
    from undrift.packs.pack_table import table
    from undrift.predict import predict
    from undrift.system.progress import Bar

    check_ending(out)
    check_parts(parts, out, mode, force, session.crew.count)
    files = files_of(pack, domain, mode)
    first = domain if pack is None else first_readable(files)
    new, shared = ((out,), ()) if parts is None else ((), (out,))  # another process may have written it by now
    opened, pictures = open_both(session, model, images, root, new, force, files, domain=first, going_on=shared)
    check_threshold(abstain_below, opened.classes)
    packs = None if pack is None else undrift.packs(opened.source.network, *pack)
    network: nn.Module = opened.source.network if domain is None else open_adapted(opened, domain, seed)
    heat = read_temperature(session, temperature, network, pictures)
    generator = torch.Generator().manual_seed(seed)
    session.kept = "Nothing was written: answers appear whole or not at all."
    how: dict[str, Any] = {"generator": generator, "temperature": heat}
    ask: Callable[..., Prediction] = partial(predict, network, mode=mode, **how)  # type: ignore[arg-type]  # it says
    if packs is not None:
        ask = partial(packs.predict, **how)

    def answer(batches: "Batches[list[str]]", add: Add) -> Counter[str]:
        """Answer these batches, add their rows, and return how many answers of each kind there are."""
        counts = Counter(answered=0, abstained=0, unanswered=0)
        with Bar("predict", len(batches), False if session.quiet else None) as bar:
            # Fast mode has one temperature per call, so it takes all images at once. Full mode writes batch by batch.
            for call in [batches] if mode == "fast" else ([batch] for batch in batches):
                names: list[str] = []
                prediction = ask(_noting(call, names, opened.device, bar), samples)
                rows = rows_of(names, prediction, opened.classes, abstain_below)
                add(rows)
                unanswered = int((prediction.label < 0).sum())
                abstained = 0 if abstain_below is None else sum(label == ABSTAIN for _, label, *_ in rows)
                counts.update(answered=len(rows) - abstained - unanswered, abstained=abstained, unanswered=unanswered)
        return counts

    printed: list[Row] = []
    if parts is not None and out is not None:
        called = [name_of(pictures, place) for place in range(len(pictures))]
        identity = {
            "network": fingerprint(opened.source.network),
            "packs": [zlib.crc32(file.read_bytes()) for file in ([domain] if domain else files)],
            "preprocessing": pictures.preprocess.to_dict(),
            "names": zlib.crc32("\n".join(called).encode()),
            "classes": opened.classes and zlib.crc32("\n".join(opened.classes).encode()),
            "samples": samples,
            "temperature": heat,
            "seed": seed,
            "abstain_below": abstain_below,
        }
        shares = AnswerParts(out, parts, called, batch_size, identity)
        shares.open()
        if shares.finished:
            session.note(f"all parts were answered before; to answer anew, delete {out} and {shares.folder}")
        session.kept = f"The parts that are finished are in {shares.folder}; the same command goes on with the others."
        for number in shares.left():
            own = pictures.select(shares.images_of(number))
            advance(generator, seed, shares.batches_of(number)[0])
            before = answered_by(packs)
            with rows_in(shares.file(number), packs is not None) as add:
                counts = answer(readable_batches(own, batch_size), add)
            shares.close(number, counts, skipped_of(own), answered_by(packs) - before)
        counts, by_pack, skipped = shares.join()
    else:
        with nullcontext(printed.extend) if out is None else rows_in(out, packs is not None) as add:
            counts = answer(pictures.named_batches(batch_size), add)
        by_pack, skipped = answered_by(packs), skipped_of(pictures)
    result: dict[str, Any] = {**counts, "skipped": skipped, "temperature": heat, "domain_file": domain}
    if packs is not None:
        answered = {name: by_pack[name] for name in packs.names}
        result |= {"packs": answered, "unknown": by_pack[UNKNOWN], "refused": sorted(packs.refused)}
    if out is None:
        if not session.as_json:
            session.put(csv_lines([columns_of(packs is not None), *printed]).decode())
        return {**result, "answers": as_dicts(printed)}
    session.kept = f"{out} was written whole."
    session.say(f"{counts['answered']:,} answers, {counts['abstained']:,} abstentions, {len(skipped):,} images skipped")
    if packs is not None:
        session.say(table(dict(zip(packs.names[1:], packs, strict=True)), by_pack, by_pack[UNKNOWN]))
    return {**result, "wrote": [session.wrote(out)]}


def answered_by(packs: "Packs | None") -> Counter[str]:
    """Return how many images each pack answered, and how many none knew."""
    return Counter() if packs is None else Counter({**packs.answered, UNKNOWN: packs.unknown})


def readable_batches(images: "Domain", batch_size: int) -> "Batches[list[str]]":
    """Return batches of images with their names; of a part of the images, all may be unreadable."""
    from undrift.images import TensorDomain

    if isinstance(images, TensorDomain):
        return images.named_batches(batch_size)
    sources = images.sources
    return images._batches(lambda chunk: [sources[at].name for at in chunk], batch_size, None, False, "cpu", None, True)


def advance(generator: "torch.Generator", seed: int, batches: int) -> None:
    """Advance a generator by so many batches; each draws a seed for its noise."""
    from undrift.system.randomness import drawn_seed

    generator.manual_seed(seed)
    for _ in range(batches):
        drawn_seed(generator)


def files_of(packs: list[Path] | None, domain: Path | None, mode: str) -> list[Path]:
    """Return the files of the packs that were given, those of folders among them."""
    if packs is None:
        return []
    if domain is not None or mode != "full":
        found = "--domain" if domain is not None else f"--mode {mode}"
        raise OptionError(
            f"{found} was given beside --pack; needed: one of the two. --pack alone answers each image by the pack "
            "that knows it, with all draws."
        )
    return [file for path in packs for file in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]


def first_readable(files: list[Path]) -> Path | None:
    """Return the first pack that can be read, whose preprocessing counts; `undrift.packs` refuses the others."""
    from undrift.packs.domain_file import inspect

    for file in files:
        with suppress(UndriftError):
            return inspect(file).path
    return None


def _noting(
    batches: "Iterable[tuple[torch.Tensor, Sequence[str]]]", names: list[str], device: "torch.device", bar: "Bar"
) -> "Iterator[torch.Tensor]":
    """Yield images on their device, and add their names to `names`."""
    for batch, called in batches:
        names += called
        yield batch.to(device)
        bar.advance()


def read_temperature(session: Session, text: str, network: "nn.Module", images: "Domain") -> float:
    """Return the temperature that was given, or for "auto" one fitted to the first batches (1 where none fits)."""
    if text == "auto":
        from undrift.answer.temperature import temperature

        first = [batch for batch, _ in itertools.islice(images.named_batches(64), 8)]
        with warnings.catch_warnings():  # raise this warning: the temperature found is not to be used
            warnings.filterwarnings("error", "no temperature between", UndriftWarning)
            try:
                chosen = temperature(network, first)
            except UndriftWarning as warning:
                found = str(warning).partition(";")[0]
                session.warn(
                    f"{found}; needed: some mirrored images with another answer. Temperature 1 is used; give another "
                    "with --temperature T."
                )
                return 1.0
        session.note(f"temperature {chosen:.3g}, chosen by mirrored copies; do not use it for digits or letters")
        return chosen
    try:
        return float(text)
    except ValueError as error:
        raise OptionError(
            f"--temperature {text!r} is neither a number nor auto; needed: one of them. 1 changes nothing."
        ) from error
