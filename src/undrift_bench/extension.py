"""What this package adds to undrift's command line (see `undrift.cli.extensions`)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from undrift._errors import OptionError
from undrift.images import Domain, Preprocess
from undrift_bench import data, zoo

COMMANDS = {
    "train": ("Train a source model.", "undrift_bench.cli.train"),
    "bench": ("Compare methods: a benchmark's cells, tables and figures.", "undrift_bench.cli.bench"),
}
DATA_SETS = (
    "cifar10, cifar100, cifar10_c:CORRUPTION:SEVERITY, cifar100_c:…, imagenet, imagenet_c:…, pacs:DOMAIN, "
    "office31:DOMAIN, office_home:DOMAIN, digits:mnist, digits:optdigits"
)
NETWORKS = zoo.names()


def data_set(text: str, root: Path, train: bool = False) -> Domain | None:
    """Return a data set by its name, or None where the text names none."""
    name, *parts = text.split(":")
    loaders: dict[str, Callable[..., Domain]] = {
        "cifar10": lambda: data.cifar10(root, train=train),
        "cifar100": lambda: data.cifar100(root, train=train),
        "cifar10_c": lambda corruption, severity="5": data.cifar10_c(root, corruption, _severity(severity)),
        "cifar100_c": lambda corruption, severity="5": data.cifar100_c(root, corruption, _severity(severity)),
        "imagenet": lambda: data.imagenet(root),
        "imagenet_c": lambda corruption, severity="5": data.imagenet_c(root, corruption, _severity(severity)),
        "pacs": lambda domain: data.pacs(root, domain),
        "office31": lambda domain: data.office31(root, domain),
        "office_home": lambda domain: data.office_home(root, domain),
        "digits": lambda domain="mnist": data.digits(domain),
    }
    if name not in loaders:
        return None
    try:
        return loaders[name](*parts)
    except TypeError as error:  # too few or too many parts: the loaders themselves raise nothing of the kind
        raise OptionError(f"{text!r} is no data set; needed: one of {DATA_SETS}. Write it so.") from error


def load_network(name: str, path: Path, classes: int | None) -> tuple[nn.Module, Preprocess]:
    """Return a network of the zoo with the weights of a file, and what its images must look like."""
    return zoo.load(name, path, classes), zoo.preprocess(name)


def describe_file(path: Path) -> dict[str, Any]:
    """Return what a source model's file says of itself."""
    from undrift_bench.train import read_header

    header = read_header(path)
    return {**dataclasses.asdict(header), "preprocess": header.preprocess.to_dict()}


def _severity(text: str) -> int:
    if not text.isdecimal():
        raise OptionError(f"severity {text!r} is no number; needed: 1 (mild) to 5 (severe). Choose one of these.")
    return int(text)
