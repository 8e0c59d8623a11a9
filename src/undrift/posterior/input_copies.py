"""Copy the images for networks that write into them (`x.sub_(mean)`), so that every draw sees the same input.

The first pass runs on copies to find out whether the network writes into its input. Later passes are checked too,
because some networks write only sometimes. Images are the first tensor argument; other tensors may be meant as outputs,
and are passed on unchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn

from undrift.posterior.norm import capturing
from undrift.system.private import write_count
from undrift.system.warning import warn


class Inputs:
    """What is known of a network and its images.

    Attributes:
        copied: whether each pass gets copies: the network writes into them.
        known: whether a pass has been checked.
    """

    def __init__(self) -> None:
        self.copied, self.known = False, False

    def call(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the network makes of its inputs, which stay what they are."""
        if self.copied:
            args, kwargs = copies(args, kwargs)
            return net(*args, **kwargs)
        # The step that a CUDA graph records has been made before, and if not, a copy would be made in every replay.
        images = _images(args, kwargs)
        if images is None:
            return net(*args, **kwargs)
        first = not self.known and not capturing(images)
        if first:
            args, kwargs = copies(args, kwargs)
            images = _images(args, kwargs)
        before = write_count(images)
        output = net(*args, **kwargs)
        self.copied = before != write_count(images)
        self.known = self.known or first
        if self.copied and not first:
            warn(
                f"a pass of {type(net).__name__} wrote into its input, which the passes before it did not; needed: the "
                "same images for each draw. From now on it gets copies, but this batch was changed: give it again "
                "from where it came, or let the network write elsewhere (x = x - mean for x.sub_(mean))."
            )
        return output


def copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a pass with a copy of the images, through which gradients go on to the caller's.

    What was one tensor stays one: attention computes otherwise where key and value are the same.
    """
    images = _images(args, kwargs)
    if images is None:
        return args, kwargs
    copy = _copy(images)
    return tuple(copy if x is images else x for x in args), {n: copy if x is images else x for n, x in kwargs.items()}


def _copy(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not x.is_inference():
        return x.clone()
    with torch.inference_mode(False):  # tensors that are made in inference mode do not count what is written to them
        return x.clone()


def _images(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
