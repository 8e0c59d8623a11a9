"""Open any number of packs on one network; a bad one among good ones is left out."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from undrift._errors import OptionError, UndriftError
from undrift.packs.collection import Packs
from undrift.packs.compatible import check_compatible, check_path, check_source
from undrift.packs.domain_file import DomainFile, inspect
from undrift.packs.fingerprint import fingerprint
from undrift.packs.folder import read_folder
from undrift.packs.router import LIMIT, SOURCE
from undrift.posterior.perturbed import Perturbed
from undrift.system.warning import warn

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

Place = str | os.PathLike[str]


def packs(net: nn.Module, *files: Place, preprocess: "Preprocess | None" = None, limit: float = LIMIT) -> "Packs":
    """Return a network with any number of packs, and a router that gives each image to the pack that knows it.

    The source network is always among them. The network is in memory once; packs are kept as small as their files, and
    the network is the plain source network between two calls.

    A file that cannot be used (damaged, of another network, …) is left out with a warning, and the others are used;
    `Packs.refused` says why. Without a single good file it raises.

    Args:
        net: the source network that the packs were learned on.
        files: packs, or folders of them.
        preprocess: what you do to images; a pack that was learned with other preprocessing is refused.
        limit: standard deviations beyond which a pack does not know an image.

    Examples:
        >>> import tempfile, torch, undrift
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> dark = torch.rand(64, 3, 8, 8) / 10
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = undrift.adapt(net, dark, method="undrift-light", epochs=1).model
        ...     _ = undrift.save(model, folder + "/night.safetensors")
        ...     packs = undrift.packs(model.remove(), folder)
        >>> packs.names
        ('source', 'night')
        >>> packs.predict(dark[:2]).pack
        ('night', 'night')
    """
    if not files or any(isinstance(place, list | tuple) for place in files):
        given = "a list" if files else "no pack"
        raise OptionError(
            f"{given} was given; needed: files of undrift.save, or folders of them, at least one. Give their paths one "
            'by one: undrift.packs(net, "night.safetensors", "fog.safetensors").'
        )
    made = Packs(net, preprocess, limit)
    found, made.refused = _read(files)
    _take(found, made.add, made.refused)
    if len(made.names) == 1:
        raise next(iter(made.refused.values()))
    _warn(made.refused)
    return made


def files_for(model: Perturbed, packs: "Packs | Place | Sequence[Place]", episodic: bool) -> list[DomainFile]:
    """Return the packs that a stream is given, read and checked; a bad one among them is left out with a warning."""
    if episodic:
        raise OptionError(
            "packs were given to an episodic stream, which forgets each batch; needed: one that goes on. Leave out "
            "episodic, or packs."
        )
    if isinstance(packs, Packs):
        given: list[Place] = [pack.path for pack in packs]
    else:
        given = list(packs) if isinstance(packs, Iterable) and not isinstance(packs, str) else [packs]
    found, refused = _read(given, some=False)
    own, chosen = fingerprint(model), dict[str, DomainFile]()
    preprocess, classes = model.preprocess, model.classes

    def take(file: DomainFile) -> None:
        nonlocal preprocess, classes
        check_source(model, file, own)
        check_compatible(file, file.name, (SOURCE, *chosen), preprocess, classes)
        chosen[file.name] = file
        preprocess, classes = preprocess or file.preprocess, classes or file.classes

    _take(found, take, refused)
    if refused and not chosen:
        raise next(iter(refused.values()))
    _warn(refused)
    return list(chosen.values())


def _read(places: Sequence[Place], some: bool = True) -> tuple[list[DomainFile], dict[str, UndriftError]]:
    """Return the packs at some places (files, or folders of them), and why others cannot be read.

    Args:
        some: whether a folder has to hold one; a stream may put the first there.
    """
    found, refused = list[DomainFile](), dict[str, UndriftError]()
    for place in places:
        check_path(place)
        path = Path(place)
        if path.is_dir():
            if some or any(path.glob("*.safetensors")):
                folder = read_folder(path)
                found += folder.packs
                refused |= {str(path / name): error for name, error in folder.damaged.items()}
        else:
            _tried(str(path), partial(_inspect, path, found), refused)
    return found, refused


def _inspect(path: Path, found: list[DomainFile]) -> None:
    found.append(inspect(path))


def _take(files: Sequence[DomainFile], take: Callable[[DomainFile], object], refused: dict[str, UndriftError]) -> None:
    for file in files:
        _tried(str(file.path), partial(take, file), refused)


def _tried(name: str, call: Callable[[], object], refused: dict[str, UndriftError]) -> None:
    try:
        call()
    except UndriftError as error:
        refused[name] = error


def _warn(refused: Mapping[str, UndriftError]) -> None:
    for error in refused.values():
        warn(f"{error} The other packs are used.")
