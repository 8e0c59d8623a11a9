"""Refuse networks on the meta device, whose tensors have a shape and no values."""

from collections.abc import Sequence

import torch
from torch import nn

from undrift._errors import CannotPerturb
from undrift.posterior.norm import KINDS
from undrift.system.private import is_fake


def refuse_empty(net: nn.Module, chosen: Sequence[nn.Module]) -> None:
    """Raise where a layer that gets noise, or a norm layer, has tensors without values, or would make such."""
    norms = [module for module in net.modules() if isinstance(module, KINDS)]
    looked_at = {id(t) for m in (*chosen, *norms) for t in (*m.parameters(), *m.buffers())}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if id(tensor) in looked_at and (tensor.is_meta or is_fake(tensor)):
            kind = "a fake tensor" if is_fake(tensor) else "on the meta device"
            raise CannotPerturb(
                f"{type(net).__name__}'s {name} is {kind}: it has a shape and no values. A prior needs them: it is "
                "made of the weights' variance. Load the weights first; once perturbed, a network may be called under "
                "FakeTensorMode(allow_non_fake_inputs=True)."
            )
    if is_fake(torch.empty(0)):  # what is made here would be
        raise CannotPerturb(
            f"{type(net).__name__} was to be perturbed under FakeTensorMode, where log-variances would have no values. "
            "Perturb it before; a perturbed network may be called there, with allow_non_fake_inputs=True."
        )
