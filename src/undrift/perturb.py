"""Put a variational perturbation on anybody's network, and take it off again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from undrift._errors import CannotPerturb, UndriftError
from undrift.options import Options, resolve
from undrift.posterior import norm
from undrift.posterior.attached import attached_to
from undrift.posterior.compiler import guard_hooks
from undrift.posterior.meta_tensors import refuse_empty
from undrift.posterior.noise import Noise, Rerun
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.seeds import Key
from undrift.posterior.select import choose
from undrift.posterior.tied import refuse_crosswise
from undrift.system.validate import generator_or_seed

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def perturb(
    net: nn.Module,
    options: Options | str = "paper",
    *,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
    **changes: object,
) -> "Perturbed":
    """Return the network with a zero-mean Gaussian on the weights of its layers: w_t = w_s + ε·exp(log_var / 2).

    The network itself is changed in place, reversibly: hooks add noise behind its layers, norm layers work on copies of
    their state, and all weights are frozen. Keys and weights of `net.state_dict()` stay what they are.

    Args:
        net: any module; layers may be convolutions, linear layers and attention.
        options: a preset's name ("paper", "released") or Options.
        generator: makes the noise reproducible; without it torch's global generator gives the seed.
        preprocess: what happens to an image before this network sees it; travels with the model and its file.
        classes: the names of the classes, in the order of the outputs; they travel along too.
        **changes: single options by name, such as `estimator="drawn"` or `exclude="fc"`.

    Returns:
        The perturbed network: `model(x)` is noisy, `with model.off():` is the source, `model.remove()` undoes it.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> model = perturb(net, init_fraction=0.04)
        >>> sorted(n for n, p in model.named_parameters() if p.requires_grad)
        ['net.1.bias', 'net.1.weight', 'noise.0.log_var']
    """
    if not isinstance(net, nn.Module):
        raise CannotPerturb(
            f"got a {type(net).__name__}; undrift.perturb needs a torch.nn.Module. Give it the network."
        )
    if isinstance(net, torch.jit.ScriptModule):
        raise CannotPerturb(
            f"{type(net).__name__} is TorchScript, whose layers cannot be hooked; undrift needs the Python module. "
            "Build the network from its class and load its state_dict."
        )
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CannotPerturb(
            f"{type(net).__name__} is a wrapper that does not see the log-variances; undrift needs the network inside. "
            "Perturb first, then wrap: DistributedDataParallel(undrift.perturb(net))."
        )
    seed = generator_or_seed(generator)
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    _refuse_second(net)
    chosen = resolve(options, changes)
    choices = choose(net, chosen)
    refuse_empty(net, [choice.layer for choice in choices if choice.why_not is None])
    refuse_crosswise(choices, chosen)
    guard_hooks()
    with torch.inference_mode(False):  # what is made there could never be trained
        model = Perturbed(net, chosen, choices, generator)
    if chosen.norm_statistics != "batch":
        norm.warn_if_unsound(model.norms)
    model.preprocess, model.classes = preprocess, None if classes is None else tuple(classes)
    return model


def remove(net: nn.Module) -> nn.Module:
    """Return the network as it was before it was perturbed, also where the perturbed network itself is lost.

    Examples:
        >>> net = torch.nn.Linear(3, 2)
        >>> _ = perturb(net)
        >>> remove(net) is net
        True
    """
    if isinstance(net, Perturbed):
        return net.remove()
    found = attached_to(net) if isinstance(net, nn.Module) else []
    if not found:
        raise UndriftError(
            f"this {type(net).__name__} has no perturbation on it; undrift.remove needs a network that was perturbed. "
            "If it still has noise, it is a copy of a part of one: copy the whole network, or load its weights anew."
        )
    for attached in found:
        attached.remove()
    return net


def _refuse_second(net: nn.Module) -> None:
    # A network that is off() has no hooks, and a copied part of a perturbed one has nothing but hooks.
    taken = {id(m) for attached in attached_to(net) for m in attached.net.modules()}
    for name, module in net.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        ours = any(isinstance(getattr(hook, "__self__", None), Key | Noise | Rerun | norm.Norm) for hook in hooks)
        if isinstance(module, Perturbed) or ours or id(module) in taken:
            where = f"{type(net).__name__}.{name}" if name else type(net).__name__
            raise CannotPerturb(
                f"{where} is perturbed already; a second perturbation would add its noise to the first's. "
                "Use the perturbed network you have, or take it off first: model.remove(), or undrift.remove(net) "
                "where nobody has the model any more, or where this is a copy, which carries the noise too."
            )
