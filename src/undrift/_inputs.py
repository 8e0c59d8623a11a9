"""Networks that write into their input (`x.sub_(mean)`): each pass gets a copy, so that every draw sees the same image.

Nobody can ask a network whether it does. The first pass gets copies, and they tell; later ones are looked at for what
is written in some passes only.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import UndriftWarning
from undrift.norm import capturing


class Inputs:
    """What is known of a network and its inputs.

    Attributes:
        copied: whether each pass gets copies: the network writes into them.
        known: whether a pass has been looked at.
    """

    def __init__(self) -> None:
        self.copied, self.known = False, False

    def call(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the network makes of its inputs, which stay what they are."""
        if self.copied:
            args, kwargs = copies(args, kwargs)
            return net(*args, **kwargs)
        # The step that a CUDA graph records has been made before, and if not, a copy would be made in every replay.
        first = not self.known and not any(capturing(x) for x in _tensors(args, kwargs))
        if first:
            args, kwargs = copies(args, kwargs)
        inputs = _tensors(args, kwargs)
        before = [_writes(x) for x in inputs]
        output = net(*args, **kwargs)
        self.copied = before != [_writes(x) for x in inputs]
        self.known = self.known or first
        if self.copied and not first:
            warnings.warn(
                f"a pass of {type(net).__name__} wrote into its input, which the passes before it did not; needed: the "
                "same images for each draw. From now on it gets copies, but this batch was changed: give it again "
                "from where it came, or let the network write elsewhere (x = x - mean for x.sub_(mean)).",
                UndriftWarning,
                stacklevel=5,
            )
        return output


def copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a pass with a copy of each tensor, through which gradients go on to the caller's.

    What was one tensor stays one: attention computes otherwise where key and value are the same.
    """
    made: dict[int, Tensor] = {}
    for x in _tensors(args, kwargs):
        if id(x) not in made:
            made[id(x)] = _copy(x)
    return tuple(made.get(id(x), x) for x in args), {name: made.get(id(x), x) for name, x in kwargs.items()}


def _copy(x: Tensor) -> Tensor:
    if not x.is_inference():
        return x.clone()
    with torch.inference_mode(False):  # tensors that are made in inference mode do not count what is written to them
        return x.clone()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def _writes(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
