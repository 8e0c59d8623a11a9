"""What other installed packages add to the command line: commands, data sets and networks by name.

A package joins in by an entry point of the group "undrift.extensions" that names a module with the attributes of
`Extension`. `undrift_bench` is one.
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
    """What a module that extends the command line has.

    Attributes:
        COMMANDS: help line and module of each command; the module's `run` is the command.
        DATA_SETS: the data sets that it knows, as a user writes them.
        NETWORKS: the names of its networks.
    """

    COMMANDS: Mapping[str, tuple[str, str]]
    DATA_SETS: str
    NETWORKS: Sequence[str]

    data_set: Callable[[str, Path, bool], "Domain | None"]
    """Return a data set by its name below a folder, its training part or not; None where it has no such name."""

    load_network: Callable[[str, Path, int | None], "tuple[nn.Module, Preprocess]"]
    """Return a network with the weights of a file, and what its images must look like."""

    describe_file: Callable[[Path], dict[str, Any]]
    """Return what a file of its own holds; raises `DataError` where it is none."""


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions that are installed."""
    return tuple(point.load() for point in entry_points(group="undrift.extensions"))


def data_sets() -> str:
    """Return the data sets that can be named, as a user writes them."""
    return ", ".join(extension.DATA_SETS for extension in extensions()) or "none (they come with undrift_bench)"


def known_networks() -> str:
    """Return the networks that can be named, in words."""
    return ", ".join(networks()) or "none (they come with undrift_bench)"


def networks() -> tuple[str, ...]:
    """Return the networks that can be named."""
    return tuple(sorted(name for extension in extensions() for name in extension.NETWORKS))
