"""What may change of a network while it adapts: one axis of every method, as `Options`.

    NOTHING        the source network as it is
    STATISTICS     norm layers use the statistics of each batch
    DOMAIN         … or their mean over the domain
    AFFINE         batch statistics, and scale and shift of the norm layers are trained (Tent)
    WEIGHTS        … and every weight is
    PERTURBATION   the paper's: norm layers, and a variance a kernel
    BAYES          mean and variance of every weight

Names that begin with "@" mean a part of whichever network it is: `@classifier`, its last layer with a weight matrix,
and `@bottleneck`, the module of that name (SHOT's); where there is none, it means nothing.
"""

import torch
from torch import nn

from undrift._errors import UndriftError
from undrift.options import PAPER, Options
from undrift.perturb import Perturbed, perturb
from undrift.select import plain_name

# Deterministic schemes have no draws, and answer with the forward pass that gave the gradient.
_PLAIN = Options(layers=(), kl_weight=0.0, test_samples=0, answer="before", weight_decay=0.0)

NOTHING = _PLAIN.replace(norm_statistics="source", norm_affine=False)
STATISTICS = _PLAIN.replace(norm_statistics="batch", norm_affine=False)
DOMAIN = _PLAIN.replace(norm_statistics="domain", norm_affine=False)
AFFINE = _PLAIN.replace(norm_statistics="batch")
WEIGHTS = AFFINE.replace(train="*")
PERTURBATION = PAPER
BAYES = PAPER.replace(train="*", conv_sharing="weight", linear_sharing="weight")

ROLES = ("@classifier", "@bottleneck")


def perturb_plain(net: nn.Module, options: Options, generator: torch.Generator | None = None) -> Perturbed:
    """Return the plain network under a scheme; patterns such as "@classifier" get the names that this network has."""
    if isinstance(net, Perturbed):
        raise UndriftError(
            "the network is perturbed already, and a method puts its own scheme on a plain one. Give the network "
            "itself: model.remove(), or leave method= out and give a likelihood."
        )
    # What is no module has no names; perturb says what is wrong with it.
    chosen = resolved(net, options) if hasattr(net, "named_modules") else options
    return perturb(net, chosen, generator=generator)


def resolved(net: nn.Module, options: Options) -> Options:
    """Return the options with every role replaced by the name of the module that has it."""
    changes = {}
    for option in ("frozen", "fast", "train", "exclude"):
        patterns = getattr(options, option)
        if any(p in ROLES for p in patterns):
            names = [name for p in patterns if (name := (_role(net, p) if p in ROLES else p)) is not None]
            changes[option] = tuple(names)
    return options.replace(**changes) if changes else options


def _role(net: nn.Module, role: str) -> str | None:
    modules = [(plain_name(name), module) for name, module in net.named_modules() if plain_name(name)]
    if role == "@bottleneck":
        return next((name for name, _ in modules if name == "bottleneck"), None)
    matrices = [n for n, m in modules if any(p is not None and p.ndim == 2 for p in m._parameters.values())]
    # A parametrized layer keeps its matrix in a child; the layer itself is meant.
    return matrices[-1].split(".parametrizations")[0] if matrices else None
