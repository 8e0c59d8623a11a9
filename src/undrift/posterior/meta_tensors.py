"""Tensors that have a shape and no values: a network of them cannot be perturbed."""

from collections.abc import Sequence

from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from undrift._errors import CannotPerturb
from undrift.posterior.norm import KINDS


def refuse_empty(net: nn.Module, chosen: Sequence[nn.Module]) -> None:
    """Raise where a layer that gets noise, or a norm layer, has tensors without values, or would make such."""
    norms = [module for module in net.modules() if isinstance(module, KINDS)]
    looked_at = {id(t) for m in (*chosen, *norms) for t in (*m.parameters(), *m.buffers())}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if id(tensor) in looked_at and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            kind = "a fake tensor" if isinstance(tensor, FakeTensor) else "on the meta device"
            raise CannotPerturb(
                f"{type(net).__name__}'s {name} is {kind}: it has a shape and no values. A prior needs them: it is "
                "made of the weights' variance. Load the weights first; once perturbed, a network may be called under "
                "FakeTensorMode(allow_non_fake_inputs=True)."
            )
    if detect_fake_mode() is not None:
        raise CannotPerturb(
            f"{type(net).__name__} was to be perturbed under FakeTensorMode, where log-variances would have no values. "
            "Perturb it before; a perturbed network may be called there, with allow_non_fake_inputs=True."
        )
