"""The network a command works with: how it is named on the command line, and what its images and classes are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import DataError, OptionError, OutputError
from undrift.cli.class_names import choose_classes
from undrift.cli.flags import flag
from undrift.cli.session import Session

if TYPE_CHECKING:
    import torch

    from undrift.cli.image_arguments import Reader
    from undrift.cli.models import SourceModel
    from undrift.images import Domain, Preprocess
    from undrift.posterior.perturbed import Perturbed


@dataclass(frozen=True)
class ModelFlags:
    """Which network, what its images must look like, what its classes are called, where it runs."""

    model: str | None = flag(None, "module:function, timm:…, torchvision:…, hf:…, zoo", "NAME", main=True)
    model_args: tuple[str, ...] = flag(
        (), "an argument of the function that makes the network; repeat it", "NAME=VALUE"
    )
    weights: str | None = flag(None, "safetensors, or a PyTorch file of weights", "FILE", main=True)
    classes: str | None = flag(None, "text file of class names in output order", "FILE", main=True)
    preprocess: str | None = flag(None, "'none': scale images to [0, 1] and nothing else", "none")
    mean: str | None = flag(None, "mean of images in [0, 1]: 0.485,0.456,0.406, or one number for grey", "NUMBERS")
    std: str | None = flag(None, "their standard deviation: 0.229,0.224,0.225", "NUMBERS")
    resize: str | None = flag(None, "length of the shorter side, HEIGHTxWIDTH, or none", "SIZE")
    crop: str | None = flag(None, "side of the centre crop, or none", "SIZE")
    interpolation: str | None = flag(None, "interpolation of the resize: nearest, bilinear or bicubic", "NAME")
    device: str = flag("auto", "auto, cpu or cuda; auto uses a GPU if there is one", "NAME")


@dataclass(frozen=True)
class Opened:
    """A network ready for work.

    Attributes:
        source: the network and what was known of it.
        reader: opens its images.
        classes: the names of its classes, or None.
        device: where it lies.
    """

    source: "SourceModel"
    reader: "Reader"
    classes: tuple[str, ...] | None
    device: "torch.device"

    @property
    def preprocess(self) -> "Preprocess":
        """What its images get."""
        return self.reader.preprocess


def weights_of(given: Mapping[str, Any]) -> Path | None:
    """Return the file of weights among the flags, if any."""
    return Path(given["weights"]) if "weights" in given else None


def open_source(session: Session, given: Mapping[str, Any], root: Path, domain_file: Path | None = None) -> Opened:
    """Return the source network that the flags mean, on its device.

    Args:
        root: where data sets that are named lie.
        domain_file: the file whose preprocessing and class names go before the network's own.
    """
    from undrift.cli.image_arguments import Reader
    from undrift.cli.model_packages import PROCESSOR
    from undrift.cli.models import load_model, parse_arguments
    from undrift.images.preprocess import RAW
    from undrift.packs.domain_file import inspect
    from undrift.system.device import pick_device

    flags = ModelFlags(**given)
    device = pick_device(flags.device)
    file = None if domain_file is None else inspect(domain_file)
    source = load_model(flags.model, flags.weights, parse_arguments(flags.model_args))
    learned = None if file is None else file.preprocess
    known = learned or source.preprocess
    preprocess = given_preprocess(flags, known)
    if learned is not None and domain_file is not None:
        other = preprocess if preprocess != learned else source.preprocess or learned
        if lines := learned.differences(other):
            whose = "the one given, which is used" if preprocess != learned else "the network's; the file's is used"
            session.warn(
                f"{domain_file.name} was learned with other preprocessing than {whose}: {'; '.join(lines)} (the file's "
                "first). Answers may be wrong in ways no error shows."
            )
    elif known is None and preprocess == RAW and flags.preprocess is None:
        folder = (flags.model or "").removeprefix("hf:")
        bare = (flags.model or "").startswith("hf:") and not Path(folder, PROCESSOR).exists()
        session.warn(
            f"nobody said what images {source.name} expects{f' ({folder} has no {PROCESSOR})' if bare else ''}; they "
            "are scaled to [0, 1] and otherwise left alone. Say it with --mean, --std, --resize, --crop, or that this "
            "is right with --preprocess none."
        )
    given_names = None if flags.classes is None else Path(flags.classes)
    learned_names, name = (None, "") if file is None else (file.classes, file.path.name)
    classes = choose_classes(session, given_names, learned_names, source.classes, name)
    source.network.to(device)
    return Opened(source, Reader(root, preprocess, flags.resize is not None), classes, device)


def open_adapted(opened: Opened, domain_file: Path, seed: int) -> "Perturbed":
    """Return the network adapted as a domain file says."""
    import torch

    from undrift.packs.file import load

    model = load(opened.source.network, domain_file, generator=torch.Generator().manual_seed(seed))
    model.preprocess, model.classes = opened.preprocess, opened.classes
    return model


def given_preprocess(flags: ModelFlags, known: "Preprocess | None") -> "Preprocess":
    """Return the preprocessing that is known, changed as the flags say."""
    from undrift.images.preprocess import RAW

    if flags.preprocess not in (None, "none"):
        raise OptionError(
            f"--preprocess {flags.preprocess} is not none; needed: none, or --mean, --std, --resize, --crop."
        )
    base = RAW if flags.preprocess == "none" else known or RAW
    changes: dict[str, Any] = {}
    for name in ("mean", "std"):
        if (text := getattr(flags, name)) is not None:
            changes[name] = _numbers(name, text)
    for name in ("resize", "crop"):
        if (text := getattr(flags, name)) is not None:
            changes[name] = _size(name, text)
    if flags.interpolation is not None:
        changes["interpolation"] = flags.interpolation
    # One mean alone makes grey of colour, and needs one deviation.
    if "mean" in changes and "std" not in changes and len(changes["mean"]) != len(base.std):
        changes["std"] = (1.0,) * len(changes["mean"])
    return replace(base, **changes)


def try_out(opened: Opened, domain: "Domain") -> int:
    """Return the network's number of outputs, from one pass over the first images; what does not fit shows here."""
    import torch

    from undrift.cli.image_arguments import first_images
    from undrift.predict import predict

    images = first_images(domain, 2)
    # A batch of two: norm layers in odd networks take the statistics of the batch.
    images = torch.cat([images, images])[:2].to(opened.device)
    try:
        outputs = predict(opened.source.network, images).probs.shape[1]
    except RuntimeError as error:
        raise _unfit(opened.source, images, str(error).splitlines()[0]) from error
    if opened.classes is not None and len(opened.classes) != outputs:
        raise DataError(
            f"there are {len(opened.classes)} class names and {outputs} outputs of {opened.source.name}; needed: a "
            "name an output, in their order. Correct --classes, or take the network that belongs to these classes."
        )
    return outputs


def _unfit(source: "SourceModel", images: "torch.Tensor", why: str) -> OutputError:
    """Return three facts about a network that cannot take the images it was given."""
    if re.search(r"\b(d?type|dtypes|types)\b", why):  # not their size: an advice on that would lead astray
        kinds = sorted({str(t.dtype) for t in source.network.state_dict().values() if t.is_floating_point()})
        return OutputError(
            f"{source.name} cannot take images in {images.dtype} ({why}; its weights are in {', '.join(kinds)}); "
            "needed: one precision all through the network. Convert it where it is made: network.float()."
        )
    return OutputError(
        f"{source.name} cannot take images of shape {tuple(images.shape[1:])} ({why}); needed: images as it was "
        "trained with. Say them: --resize, --crop, --mean (one number for grey)."
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in re.split(r"[,\s]+", text.strip()))
    except ValueError as error:
        raise OptionError(f"--{name} {text!r} holds something that is no number; needed: 0.485,0.456,0.406.") from error


def _size(name: str, text: str) -> int | tuple[int, int] | None:
    if text == "none":
        return None
    sides = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text)
    if sides is None or (name == "crop" and sides[2]):
        raise OptionError(
            f"--{name} {text!r} is no size; needed: 256{', 256x256' if name == 'resize' else ''} or none."
        )
    return int(sides[1]) if sides[2] is None else (int(sides[1]), int(sides[2]))
