"""Refuse networks that cannot be perturbed, before anything is touched; warn of unsound ones."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from undrift._errors import CannotPerturb
from undrift.options import Options
from undrift.posterior import layers, norm
from undrift.posterior.attached import attached_to
from undrift.posterior.noise import Noise, Rerun
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.seeds import Key
from undrift.posterior.select import Choice
from undrift.system.private import is_fake
from undrift.system.validate import a_type, instead_of
from undrift.system.warning import warn


def refuse_network(net: nn.Module) -> None:
    """Raise if this is no network, cannot be hooked, or is perturbed already."""
    if not isinstance(net, nn.Module):
        raise CannotPerturb(
            f"got {a_type(net)}; undrift.perturb needs a torch.nn.Module. {instead_of(net, 'Give it the network.')}"
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


def refuse_crosswise(choices: Iterable[Choice], options: Options) -> None:
    """Raise if one variance per kernel would have to serve two layers that cut one weight into different kernels.

    A convolution's kernel is a row of the weight, a transposed convolution's a column; an autoencoder may tie them.
    """
    first: dict[int, tuple[str, nn.Module]] = {}
    refusals = []
    for choice in choices:
        if choice.why_not is not None:
            continue
        for _, module, attribute, number in layers.held_weights(choice.layer):
            other, before = first.setdefault(number, (choice.name, module))
            if before is module or _sharing(before, options) == "weight":
                continue
            weight = layers.effective_weight(module, attribute)
            ours, theirs = _kernel_of_each(module, weight), _kernel_of_each(before, weight)
            if not torch.equal(ours, theirs):
                refusals.append(
                    f"{choice.name} ({_counted(module, ours)}) shares its weight with {other} "
                    f"({_counted(before, theirs)}), which cuts it into kernels another way; one variance per kernel "
                    f"cannot serve both. Leave one out: exclude={choice.name!r}; or take one variance per weight: "
                    "conv_sharing='weight'."
                )
    if refusals:
        raise CannotPerturb("\n".join(refusals))


def warn_if_unsound(norms: Sequence[norm.Norm]) -> None:
    """Warn of kept statistics that are not finite, such as a variance above 65,504 that was stored in float16.

    The network answers with them without an error, and every average that starts there is lost.
    """
    kept = {
        f"{policy.name}.{name}": tensor
        for policy in norms
        for name in ("running_mean", "running_var")
        if (tensor := getattr(policy.layer, name, None)) is not None and not tensor.is_meta
    }
    if not kept:
        return
    place = next(iter(kept.values())).device  # one transfer, not one per layer
    sound = torch.stack([tensor.isfinite().all().to(place) for tensor in kept.values()]).tolist()
    bad = [name for name, good in zip(kept, sound, strict=True) if not good]
    if bad:
        warn(
            f"{', '.join(bad[:5])}{f' and {len(bad) - 5} more' * (len(bad) > 5)} hold values that are not finite; "
            "needed: finite statistics, as adaptation starts from them. Load the weights again, in float32, or "
            'perturb with norm_statistics="batch", which does not use them.'
        )


def _sharing(module: nn.Module, options: Options) -> str:
    return options.conv_sharing if layers.kind(module) in {"conv", "conv_transpose"} else options.linear_sharing


def _kernel_of_each(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the number of the kernel that each weight belongs to."""
    numbers = torch.arange(len(layers.kernels(layer, weight)))
    return layers.per_weight(layer, numbers, weight).expand(weight.shape)


def _counted(layer: nn.Module, numbers: Tensor) -> str:
    return f"{type(layer).__name__}, {int(numbers.max()) + 1} kernels"
