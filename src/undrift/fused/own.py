"""A layer's own gradient of its input, computed by the noise's node of autograd instead of beside it.

Left to autograd, the layer and its noise each write a gradient of x, and a third kernel reads both and adds them: five
passes over memory of x's size. Where the noise's node runs the layer's itself, the kernel that makes the noise's part
adds it to what the layer wrote: three passes, and a launch a layer less. Autograd then gives the layer's node no
gradient, which it hands on as none.
"""

from typing import Any

import torch
from torch import Tensor

# The nodes of a layer's product, and which of their inputs is the layer's: a bias comes before it.
_INPUTS = {"ConvolutionBackward0": 0, "AddmmBackward0": 1, "MmBackward0": 0}
# A linear layer makes a matrix of its vectors first, and vectors of the product.
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_VIEW = -1
_places: dict[type, int | None] = {}  # by class, which is found quicker than its name is compared


def own_of(y: Tensor) -> Any:
    """Return the node of a layer's product y, None where y is something else. Its weights must want no gradient."""
    node: Any = y.grad_fn
    place = _place(node)
    # Somebody who waits for the gradient of y itself would never hear of it.
    if place is None or y._backward_hooks is not None or y.retains_grad:
        return None
    if place == _VIEW:
        node = node.next_functions[0][0]
        place = _place(node)
    return None if place is None or place == _VIEW else node


def own_gradient(node: Any, grad: Tensor, shape: torch.Size, last: bool) -> Tensor | None:
    """Return the gradient of an input of that shape by its layer's node, None where this backward pass wants none.

    `last`: channels are the last dimension, and all others one of a matrix.
    """
    place = _places[type(node)]
    found: Tensor | None
    if not last or len(shape) == 2:
        found = node(grad)[place]
        return found
    found = node(grad.view(-1, grad.shape[-1]))[place]
    return None if found is None else found.view(shape)


def _place(node: Any) -> int | None:
    kind = type(node)
    try:
        return _places[kind]
    except KeyError:
        place = _places[kind] = _VIEW if kind.__name__ in _VIEWS else _INPUTS.get(kind.__name__)
        return place
