"""Refuse networks that cannot be perturbed, before anything is touched."""

from collections.abc import Sequence

import torch
from torch import nn

from undrift._errors import CannotPerturb
from undrift.posterior import norm
from undrift.posterior.attached import attached_to
from undrift.posterior.noise import Noise
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.rerun import Rerun
from undrift.posterior.seeds import Key
from undrift.system.private import is_fake
from undrift.system.validate import a_type, instead_of


def refuse_network(net: nn.Module) -> None:
    """Raise if this is no network, cannot be hooked, or is perturbed already."""
    if not isinstance(net, nn.Module):
        raise CannotPerturb(
            f"got {a_type(net)}; undrift.perturb needs a torch.nn.Module. " + instead_of(net, "Give it the network.")
        )
    if isinstance(net, torch.jit.ScriptModule):
        raise CannotPerturb(
            f"{type(net).__name__} is TorchScript, whose layers cannot be hooked; undrift needs the Python module. "
            "Build the network from its class and load its state_dict."
        )
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CannotPerturb(
            f"{type(net).__name__} is a wrapper that does not see the log-variances; undrift needs the network inside. "
            "Give that: net.module. For a loop of your own, perturb first, then wrap: "
            "DistributedDataParallel(undrift.perturb(net))."
        )
    refuse_second(net)


def refuse_second(net: nn.Module) -> None:
    """Raise if a part of the network is perturbed already."""
    # A network that is off() has no hooks; a copied part of a perturbed one has only hooks.
    taken = {id(m) for attached in attached_to(net) for m in attached.net.modules()}
    for name, module in net.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        ours = any(isinstance(getattr(hook, "__self__", None), Key | Noise | Rerun | norm.Norm) for hook in hooks)
        if isinstance(module, Perturbed) or ours or id(module) in taken:
            where = f"{type(net).__name__}.{name}" if name else type(net).__name__
            raise CannotPerturb(
                f"{where} is perturbed already; a second perturbation would add its noise to the first's. "
                "Use the perturbed network you have, or take it off first: model.remove(), or undrift.remove(net) "
                "if the model is gone, or if this is a copy, which carries the noise too."
            )


def refuse_empty(net: nn.Module, chosen: Sequence[nn.Module]) -> None:
    """Raise where a layer that gets noise, or a norm layer, has tensors without values, or would make such."""
    norms = [module for module in net.modules() if isinstance(module, norm.KINDS)]
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
