"""Open any number of packs on one network; a bad one among good ones is left out."""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from undrift._errors import DataError, OptionError, UndriftError, UndriftWarning
from undrift.packs.collection import Packs
from undrift.packs.file import check_path
from undrift.packs.router import LIMIT

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
        >>> import tempfile, undrift
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
    if not files:
        raise OptionError(
            "no pack was given; needed: at least one file of undrift.save, or a folder of them. Give their paths: "
            'undrift.packs(net, "night.safetensors").'
        )
    made = Packs(net, preprocess, limit)
    places = [place for file in files for place in _files_in(file)]
    for place in places:
        _add(made, place)
    if len(made.names) == 1:
        raise next(iter(made.refused.values()))
    for error in made.refused.values():
        warnings.warn(f"{error} The other packs are used.", UndriftWarning, stacklevel=2)
    return made


def _add(made: Packs, place: Path) -> None:
    try:
        made.add(place)
    except UndriftError as error:
        made.refused[str(place)] = error


def _files_in(place: Place) -> list[Path]:
    check_path(place)
    path = Path(place)
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("*.safetensors")):
        return found
    raise DataError(
        f"{path} holds no .safetensors file; needed: packs, as undrift.save writes them. Name another folder."
    )
