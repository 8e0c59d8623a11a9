"""A layer's own gradient of its input, computed by the noise's node of autograd instead of beside it.

Left to autograd, the layer and its noise each write a gradient of x, and a third kernel reads both and adds them: five
passes over memory of x's size. Where the noise's node runs the layer's itself, the kernel that makes the noise's part
adds it to what the layer wrote: three passes, and a launch a layer less. The layer's node is then no part of the graph
that autograd goes through: it belongs to the noise's, and is let go with it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import _global_forward_hooks

# The nodes of a layer's product, and which of their inputs is the layer's: a bias comes before it.
_INPUTS = {"ConvolutionBackward0": 0, "AddmmBackward0": 1, "MmBackward0": 0}
# A linear layer makes a matrix of its vectors first, and vectors of the product.
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_VIEW = -1
_places: dict[type, int | None] = {}  # by class, which is found quicker than its name is compared


def alone(layer: nn.Module, noise: object) -> bool:
    """Return whether a layer's output is what the layer made of its input, seen by nobody before its noise's hook.

    A hook that comes first may have put something else in its place, or wait for its gradient, and so may a forward
    method of the layer's own; weights that are trained, or made of others (a parametrization), want a gradient too.
    """
    own = layer._parameters
    weight = own.get("weight")
    if weight is None or weight.requires_grad or "bias" not in own or _global_forward_hooks or "forward" in vars(layer):
        return False
    bias, first = own["bias"], next(iter(layer._forward_hooks.values()), None)
    return (bias is None or not bias.requires_grad) and getattr(first, "__self__", None) is noise


def own_of(y: Tensor) -> Any:
    """Return the node of a layer's product y, None where y is something else. Its weights must want no gradient."""
    node: Any = y.grad_fn
    kind = type(node)
    place = _places[kind] if kind in _places else _place(kind)
    # Somebody who waits for the gradient of y itself would never hear of it.
    if place is None or y._backward_hooks is not None or y.retains_grad:
        return None
    if place == _VIEW:
        node = node.next_functions[0][0]
        kind = type(node)
        place = _places[kind] if kind in _places else _place(kind)
    return None if place is None or place == _VIEW else node


def own_gradient(node: Any, grad: Tensor, x: Tensor, last: bool) -> Tensor | None:
    """Return the gradient of x by its layer's node, None where this backward pass wants none.

    `last`: channels are the last dimension, and all others one of a matrix.
    """
    found: Tensor | None
    if not last or x.ndim == 2:
        found = node(grad)[_places[type(node)]]
        return asked(node, grad, x) if found is None else found
    grad = grad.view(-1, grad.shape[-1])
    found = node(grad)[_places[type(node)]]
    # By the tensor, not by its sizes: PyTorch takes three times as long to read those.
    return asked(node, grad, x) if found is None else found.view_as(x)


def asked(node: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the gradient of x where a backward pass is for some tensors only (torch.autograd.grad).

    Autograd then asks of each node whether it was met on the way to them. Between a layer's product and its x may be a
    view and a cast, which it has not met.
    """
    producer = torch.autograd.graph.get_gradient_edge(x).node
    try:
        wanted = torch._C._will_engine_execute_node(producer)
    except RuntimeError:  # a leaf that autograd.grad is for
        wanted = True
    if not wanted:
        return None
    # Of what the product was made of, not of x: hooks on x are called by the pass itself, once.
    edge = GradientEdge(*node.next_functions[_places[type(node)]])
    (found,) = torch.autograd.grad(GradientEdge(node, 0), edge, grad, retain_graph=True)
    return found.view_as(x)


def _place(kind: type) -> int | None:
    place = _places[kind] = _VIEW if kind.__name__ in _VIEWS else _INPUTS.get(kind.__name__)
    return place
