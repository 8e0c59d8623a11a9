"""Validate arguments."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from undrift._errors import OptionError


def a_type(value: object) -> str:
    """Return the name of a value's type with its article.

    Examples:
        >>> a_type("text"), a_type(5)
        ('a str', 'an int')
    """
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def instead_of(given: object, do: str) -> str:
    """Return what to do about a value that was given as a network and is none: `do`, if no better advice is known."""
    if isinstance(getattr(given, "model", None), torch.nn.Module):  # a History, a Stream
        return f"Give the network in it: {type(given).__name__.lower()}.model."
    if isinstance(given, type) and issubclass(given, torch.nn.Module):
        return f"Make one of the class: {given.__name__}(…)."
    if isinstance(given, Mapping) and any(isinstance(value, torch.Tensor) for value in given.values()):
        return "Load these weights into the network, net.load_state_dict(…), and give that."
    return do


def generator_or_seed(given: Any) -> torch.Generator | int | None:
    """Return a generator, a seed, or None, unchanged."""
    if given is None or isinstance(given, torch.Generator):
        return given
    try:
        seed = operator.index(given)  # also NumPy's integers
    except TypeError:
        seed = 2**64
    if not -(2**63) <= seed < 2**64:
        raise OptionError(
            f"generator={given!r} is {a_type(given)}; needed: a torch.Generator, or a seed, a whole number of "
            "64 bits. Give generator=0, or leave it out."
        )
    return seed


def not_negative(given: Any, name: str, to_do: str) -> None:
    """Raise unless the value is a finite number of at least 0."""
    if not _is_number(given) or not 0 <= given < float("inf"):
        raise OptionError(f"{name}={given!r} is not a number from 0 up. {to_do}")


def positive(given: Any, name: str, to_do: str) -> None:
    """Raise unless the value is a finite number above 0."""
    if not _is_number(given) or not 0 < given < float("inf"):
        raise OptionError(f"{name}={given!r} is not a number above 0. {to_do}")


def is_share(given: Any) -> bool:
    """Return whether the value is a number from 0 to 1."""
    return not isinstance(given, bool) and _is_number(given) and bool(0 <= given <= 1)


def _is_number(given: Any) -> bool:
    """Return whether this is one number: of Python, of NumPy, or a tensor with one element."""
    try:
        return not isinstance(given, str | bytes) and bool(0 * float(given) == 0)
    except (TypeError, ValueError, RuntimeError):
        return False


def count_or_none(given: Any, name: str, to_do: str) -> int | None:
    """Return a whole number of at least 1, or None, unchanged."""
    if given is None:
        return None
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise OptionError(f"{name}={given!r} is not a whole number from 1 up. {to_do}")
    return count


def pick_device(device: torch.device | str) -> torch.device:
    """Return the device; raise if it is a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"there is no device {device!r}; needed: auto, cpu or cuda. Use device='auto'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {device} was asked for and PyTorch sees no GPU; needed: a GPU with its driver. Use device='cpu'."
        )
    return place


def class_names(given: Any) -> tuple[str, ...] | None:
    """Return the names of classes as a tuple, or None, unchanged."""
    if given is None:
        return None
    names = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"classes={given!r} is not a list of names; needed: the name of each class, in the order of the network's "
            'outputs. Give classes=["cat", "dog"], or leave it out.'
        )
    return names
