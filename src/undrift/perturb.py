"""Perturb any network in place: put a Gaussian on its weights, and take it off again.

    w_t = w_s + Δw,   Δw ~ N(0, σ²),   σ² = exp(log_var)

The network's code is not changed. Hooks add the noise to the outputs of its layers, norm layers work on copies of their
state, and all weights are frozen. The log-variances are learned, and scale and shift of the norm layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undrift._errors import UndriftError
from undrift.images.preprocess import Preprocess, checked
from undrift.options import Options, resolve
from undrift.posterior import layers, norm
from undrift.posterior.attached import Hook, Trained, attached_to
from undrift.posterior.low_rank import add_low_rank
from undrift.posterior.noise import Noise, Rerun
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.refuse import refuse_crosswise, refuse_empty, refuse_network, warn_if_unsound
from undrift.posterior.seeds import prepare_compiler
from undrift.posterior.select import Choice, choose, matching, plain_name, slot
from undrift.system.validate import class_names, generator_or_seed


def perturb(
    net: nn.Module,
    options: Options | str = "paper",
    *,
    generator: torch.Generator | None = None,
    preprocess: Preprocess | None = None,
    classes: Sequence[str] | None = None,
    **changes: object,
) -> "Perturbed":
    """Return the network with a zero-mean Gaussian on the weights of its layers: w_t = w_s + ε·exp(log_var / 2).

    The network is changed in place, reversibly; keys and weights of `net.state_dict()` do not change.

    Args:
        net: any module; layers may be convolutions, linear layers and attention.
        options: a preset's name ("paper", "released") or Options.
        generator: makes the noise reproducible; without it, torch's global generator gives the seed.
        preprocess: the network's preprocessing of images; saved with the model.
        classes: the names of the classes, in the order of the outputs; saved with the model.
        **changes: single options by name, such as `estimator="drawn"` or `exclude="fc"`.

    Returns:
        The perturbed network: `model(x)` is noisy, `with model.off():` is the source, `model.remove()` undoes it.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> model = perturb(net, init_fraction=0.04)
        >>> sorted(n for n, p in model.named_parameters() if p.requires_grad)
        ['net.1.bias', 'net.1.weight', 'noise.0.log_var']
    """
    refuse_network(net)
    names, preprocess = class_names(classes), None if preprocess is None else checked(preprocess)
    seed = generator_or_seed(generator)
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    chosen = resolve(options, changes)
    choices = choose(net, chosen)
    perturbed = [choice for choice in choices if choice.why_not is None]
    refuse_empty(net, [choice.layer for choice in perturbed])
    refuse_crosswise(choices, chosen)
    prepare_compiler()
    with torch.inference_mode(False):  # what is made there could never be trained
        model = Perturbed(net, chosen, choices, generator)
        _add_noise(model, perturbed)
        add_low_rank(model)
        _copy_what_adapts(model)
        model.attach()
    if chosen.norm_statistics != "batch":
        warn_if_unsound(model.norms)
    model.preprocess, model.classes = preprocess, names
    return model


def _add_noise(model: Perturbed, choices: Sequence[Choice]) -> None:
    """Give each chosen layer its noise: one `Noise` per weight, shared by the layers that share the weight."""
    options = model.options
    by_weight: dict[int, Noise] = {}
    for choice in choices:
        layer = choice.layer
        # The first layer sees raw images, whose constant part calls for another energy.
        energy = options.first_energy if choice is model.choices[0] else options.energy
        convolution = layers.kind(layer) in {"conv", "conv_transpose"}
        sharing = options.conv_sharing if convolution else options.linear_sharing
        noises = {}
        for name, module, attribute, tied in layers.held_weights(layer):
            if tied not in by_weight:
                weight = layers.effective_weight(module, attribute)
                noise = Noise(module, weight, sharing, energy, options, model.key, len(by_weight))
                by_weight[tied] = noise
                model.register_noise(noise, slot(choice.name, name), choice.name, module, attribute)
            noises[name] = by_weight[tied]
        hook: Hook = Rerun(layer, noises).drawn  # attention, subclasses: run again with drawn weights
        if layers.is_standard(layer):
            hook = noises["weight"].local if options.estimator == "local" else noises["weight"].drawn
        model.add_hook(layer, hook)


def _copy_what_adapts(model: Perturbed) -> None:
    """Copy what adaptation changes of the network itself: norm layers, and weights where they are trained."""
    options, copies = model.options, dict[int, Tensor]()
    for path, layer in model.net.named_modules():
        name = plain_name(path)
        frozen = bool(matching(name, options.frozen))
        if isinstance(layer, norm.KINDS):
            policy = norm.Norm(name, layer, options, frozen, model.key)
            policy.copy(copies)
            model.norms.append(policy)
            if policy.statistics is not None:  # a layer norm has none to choose, and hooks take their time
                model.add_hook(layer, policy.after, before=policy.before)
        elif layer._parameters and matching(name, options.train) and not frozen and options.mean_rank != 0:
            model.trained.append(held := Trained(name, layer, without=[n for m, n, _ in model.changed if m is layer]))
            held.copy(copies)


def remove(net: nn.Module) -> nn.Module:
    """Return the network as it was before it was perturbed, even if the perturbed network itself is lost.

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
            "If it still has noise, it is a copy of a part of one: copy the whole network, or load its weights again."
        )
    for attached in found:
        attached.remove()
    return net
