"""Load what other installed packages add to the command line: commands, data sets and networks by name.

A package registers a module with the attributes of `Extension` under the entry point group "undrift.extensions".
`undrift_bench` does.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from undrift.images import Domain, Preprocess


class Extension(Protocol):
    """The attributes of a module that extends the command line.

    Attributes:
        COMMANDS: help line and module of each command; the module's `run` is the command.
        DATA_SETS: its data sets, as a user writes them.
        NETWORKS: the names of its networks.
    """

    COMMANDS: Mapping[str, tuple[str, str]]
    DATA_SETS: str
    NETWORKS: Sequence[str]

    data_set: Callable[[str, Path, bool], "Domain | None"]
    """Return a data set by name below a folder (its training part, if asked); None for an unknown name."""

    load_network: Callable[[str, Path, int | None], "tuple[nn.Module, Preprocess]"]
    """Return a network with the weights of a file, and its preprocessing."""

    describe_file: Callable[[Path], dict[str, Any]]
    """Return what one of its files holds; raise `DataError` for any other file."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the installed extensions."""
    return tuple(point.load() for point in entry_points(group="undrift.extensions"))


def data_sets() -> str:
    """Return the known data sets, as a user writes them."""
    return ", ".join(extension.DATA_SETS for extension in extensions()) or "none (they come with undrift_bench)"


def known_networks() -> str:
    """Return the known networks as a sentence part."""
    return ", ".join(networks()) or "none (they come with undrift_bench)"


def networks() -> tuple[str, ...]:
    """Return the names of the known networks."""
    return tuple(sorted(name for extension in extensions() for name in extension.NETWORKS))
