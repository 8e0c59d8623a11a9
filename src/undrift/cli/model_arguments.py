"""Open the network of a command, with its preprocessing, class names and device."""

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
    """The network, its preprocessing, its class names and its device."""

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
    """An open network.

    Attributes:
        source: the network with its name.
        reader: opens its images.
        classes: the names of its classes, or None.
        device: its device.
    """

    source: "SourceModel"
    reader: "Reader"
    classes: tuple[str, ...] | None
    device: "torch.device"

    @property
    def preprocess(self) -> "Preprocess":
        """The preprocessing of its images."""
        return self.reader.preprocess


def weights_of(given: Mapping[str, Any]) -> Path | None:
    """Return the file of weights among the flags, if any."""
    return Path(given["weights"]) if "weights" in given else None


def open_source(session: Session, given: Mapping[str, Any], root: Path, domain_file: Path | None = None) -> Opened:
    """Return the source network that the flags name, on its device.

    Args:
        root: the folder of data sets given by name.
        domain_file: its preprocessing and class names take precedence over the network's own.
    """
    from undrift.cli.image_arguments import Reader
    from undrift.cli.model_packages import PROCESSOR
    from undrift.cli.models import load_model, parse_arguments
    from undrift.images.preprocess import RAW
    from undrift.packs.domain_file import inspect

    flags = ModelFlags(**given)
    device = session.crew.device(flags.device)
    file = None if domain_file is None else inspect(domain_file)
    source = load_model(flags.model, flags.weights, parse_arguments(flags.model_args))
    if source.untrained:
        session.warn(
            f"{source.name} makes other weights each time it is called, and --weights was not given: this network "
            "knows nothing yet. Give --weights FILE, or load the weights in the function."
        )
    learned = None if file is None else file.preprocess
    known = learned or source.preprocess
    preprocess = given_preprocess(flags, known)
    if learned is not None and domain_file is not None:
        said = f"{domain_file.name} was learned with other preprocessing than"
        if lines := learned.differences(preprocess):
            session.warn(
                f"{said} the one given, which is used: {'; '.join(lines)} (the file's first). Answers may be wrong."
            )
        elif source.preprocess is not None and (lines := learned.differences(source.preprocess)):
            session.note(f"{said} the network's; the file's is used: {'; '.join(lines)} (the file's first).")
    elif known is None and preprocess == RAW and flags.preprocess is None:
        folder = (flags.model or "").removeprefix("hf:")
        bare = (flags.model or "").startswith("hf:") and not Path(folder, PROCESSOR).exists()
        session.warn(
            f"the preprocessing of {source.name} is unknown{f' ({folder} has no {PROCESSOR})' if bare else ''}; images "
            "are scaled to [0, 1] and nothing else. Give it with --mean, --std, --resize and --crop, or confirm this "
            "with --preprocess none."
        )
    given_names = None if flags.classes is None else Path(flags.classes)
    learned_names, name = (None, "") if file is None else (file.classes, file.path.name)
    classes = choose_classes(session, given_names, learned_names, source.classes, name)
    source.network.to(device)
    return Opened(source, Reader(root, preprocess, flags.resize is not None), classes, device)


def open_adapted(opened: Opened, domain_file: Path, seed: int) -> "Perturbed":
    """Return the network adapted by a domain file."""
    import torch

    from undrift.packs.file import load

    model = load(opened.source.network, domain_file, generator=torch.Generator().manual_seed(seed))
    model.preprocess, model.classes = opened.preprocess, opened.classes
    return model


def given_preprocess(flags: ModelFlags, known: "Preprocess | None") -> "Preprocess":
    """Return the known preprocessing, changed by the flags."""
    from undrift.images.preprocess import RAW

    if flags.preprocess not in (None, "none"):
        raise OptionError(
            f"--preprocess {flags.preprocess} is unknown; needed: none. Or give --mean, --std, --resize, --crop."
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
    # A single mean turns colour images grey, which need a single deviation.
    if "mean" in changes and "std" not in changes and len(changes["mean"]) != len(base.std):
        changes["std"] = (1.0,) * len(changes["mean"])
    return replace(base, **changes)


def try_out(opened: Opened, domain: "Domain") -> int:
    """Return the network's number of outputs, from a pass over two images; raise if images or names do not fit."""
    import torch

    from undrift.cli.image_arguments import first_images
    from undrift.predict import predict

    images = first_images(domain, 2)
    # Two images, because norm layers of some networks take the statistics of the batch.
    images = torch.cat([images, images])[:2].to(opened.device)
    try:
        outputs = predict(opened.source.network, images).probs.shape[1]
    except RuntimeError as error:
        raise _unfit(opened.source, images, str(error).splitlines()[0]) from error
    if opened.classes is not None and len(opened.classes) != outputs:
        raise DataError(
            f"there are {len(opened.classes)} class names and {outputs} outputs of {opened.source.name}; needed: one "
            "name per output, in order. Correct --classes, or take the network that belongs to these classes."
        )
    return outputs


def _unfit(source: "SourceModel", images: "torch.Tensor", why: str) -> OutputError:
    """Return the error for a network that cannot take the images."""
    if re.search(r"\b(d?type|dtypes|types)\b", why):  # the precision is wrong, not the size
        kinds = sorted({str(t.dtype) for t in source.network.state_dict().values() if t.is_floating_point()})
        return OutputError(
            f"{source.name} cannot take images in {images.dtype} ({why}; its weights are in {', '.join(kinds)}); "
            "needed: one precision throughout the network. Convert it where it is made: network.float()."
        )
    return OutputError(
        f"{source.name} cannot take images of shape {tuple(images.shape[1:])} ({why}); needed: images as in its "
        "training. Give --resize, --crop, or --mean (one number for grey)."
    )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in re.split(r"[,\s]+", text.strip()))
    except ValueError as error:
        raise OptionError(
            f"--{name} {text!r} has a part that is no number; needed: numbers such as 0.485,0.456,0.406. Correct it."
        ) from error


def _size(name: str, text: str) -> int | tuple[int, int] | None:
    if text == "none":
        return None
    sides = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text)
    if sides is None or (name == "crop" and sides[2]):
        raise OptionError(
            f"--{name} {text!r} is no size; needed: 256{', 256x256' if name == 'resize' else ''} or none. Correct it."
        )
    return int(sides[1]) if sides[2] is None else (int(sides[1]), int(sides[2]))
