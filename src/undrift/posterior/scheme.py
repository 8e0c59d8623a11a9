"""What may change of a network while it adapts: one axis of every method, as `Options`.

    NOTHING        the source network as it is
    STATISTICS     norm layers use the statistics of each batch
    DOMAIN         … or their mean over the domain
    AFFINE         batch statistics, and scale and shift of the norm layers are trained (Tent)
    WEIGHTS        … and every weight is
    PERTURBATION   the paper's: norm layers, and a variance a kernel
    BAYES          mean and variance of every weight; no weight decay, as the prior says where a mean is drawn to

Names that begin with "@" mean a part of whichever network it is: `@classifier`, the last layer of the module called so
(or fc, head, …), else the last one registered with a weight matrix; and `@bottleneck`, the module of that name
(SHOT's); where there is none, it means nothing.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from undrift._errors import UndriftError, UndriftWarning
from undrift.options import PAPER, Options
from undrift.perturb import perturb
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

# Deterministic schemes have no draws, and answer with the forward pass that gave the gradient.
_PLAIN = Options(layers=(), kl_weight=0.0, test_samples=0, answer="before", weight_decay=0.0)

NOTHING = _PLAIN.replace(norm_statistics="source", norm_affine=False)
STATISTICS = _PLAIN.replace(norm_statistics="batch", norm_affine=False)
DOMAIN = _PLAIN.replace(norm_statistics="domain", norm_affine=False)
AFFINE = _PLAIN.replace(norm_statistics="batch")
WEIGHTS = AFFINE.replace(train="*")
PERTURBATION = PAPER
# The KL holds a mean to the source's weight; weight decay would pull it to 0 as well, which is no part of that prior.
BAYES = PAPER.replace(train="*", conv_sharing="weight", linear_sharing="weight", weight_decay=0.0)

ROLES = ("@classifier", "@bottleneck")


_CALLED = ("classifier", "fc", "head", "last", "logits")  # what people call a classifier; fc2 is one too


def perturb_plain(
    net: nn.Module,
    options: Options,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
) -> Perturbed:
    """Return the plain network under a scheme; patterns such as "@classifier" get the names that this network has."""
    if isinstance(net, Perturbed):
        raise UndriftError(
            "the network is perturbed already, and a method puts its own scheme on a plain one. Give the network "
            "itself: model.remove(), or leave method= out and give a likelihood."
        )
    # What is no module has no names; perturb says what is wrong with it.
    chosen = resolved(net, options) if hasattr(net, "named_modules") else options
    model = perturb(net, chosen, generator=generator, preprocess=preprocess, classes=classes)
    try:
        for said in (_guessed(net, options), _inert(model)):
            if said is not None:
                warnings.warn(said, UndriftWarning, stacklevel=3)
    except BaseException:  # a user may have made warnings errors
        model.remove()
        raise
    return model


def resolved(net: nn.Module, options: Options) -> Options:
    """Return the options with every role replaced by the name of the module that has it."""
    changes = {}
    for option in ("frozen", "fast", "train", "exclude"):
        patterns = getattr(options, option)
        if any(p in ROLES for p in patterns):
            names = [name for p in patterns if (name := (_role(net, p, True) if p in ROLES else p)) is not None]
            changes[option] = tuple(names)
    return options.replace(**changes) if changes else options


def _role(net: nn.Module, role: str, convolutions: bool = False) -> str | None:
    """Return the name of the module that has a role; a classifier that is a convolution only where that is asked."""
    if role == "@bottleneck":
        names = (plain_name(name) for name, _ in net.named_modules())
        return next((name for name in names if name == "bottleneck"), None)
    return _classifier(net, convolutions)[0]


def _classifier(net: nn.Module, convolutions: bool = True) -> tuple[str | None, bool]:
    """Return the name of the classifier, and whether that is more than a guess."""
    modules = {plain_name(name): module for name, module in net.named_modules() if plain_name(name)}
    sizes: dict[str, int] = {}  # the dimensions of each module's own weights
    for name, module in modules.items():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            # A parametrized layer keeps its matrix in a child; the layer itself is meant.
            layer = name.split(".parametrizations")[0]
            own = [p.ndim for p in module._parameters.values() if p is not None]
            sizes[layer] = max([*own, sizes.get(layer, 0)])
    matrices = [name for name, size in sizes.items() if size == 2]
    # Not deeper than backbone.head: blocks have an "fc" of their own. A convolution may be one, if it is called so.
    called = [found for name, size in sizes.items() if size == 2 and (found := _called(name))]
    if not called and convolutions:
        called = [found for name, size in sizes.items() if size > 2 and (found := _called(name))]
    if called:
        top = min(depth for depth, _, _ in called)
        names = [(stem, name) for depth, stem, name in called if depth == top]
        return names[-1][1], len({stem for stem, _ in names}) == 1
    if not matrices:
        return None, False
    parts = matrices[-1].split(".")
    parents = [net, *(modules[".".join(parts[:i])] for i in range(1, len(parts)))]
    # In a Sequential the last layer is called last; elsewhere only the network's own code knows.
    return matrices[-1], len(matrices) == 1 or all(isinstance(m, nn.Sequential) for m in parents)


def _called(name: str) -> tuple[int, str, str] | None:
    """Return how deep in a module's path a classifier's name stands, that name, and the path; None without one."""
    for depth, part in enumerate(name.split(".")[:2]):
        if (stem := part.lower().rstrip("0123456789")) in _CALLED:
            return depth, stem, name
    return None


def _guessed(net: nn.Module, options: Options) -> str | None:
    """Return what to say where a method needs the classifier, and which layer that is was guessed."""
    asking = [o for o in ("frozen", "train", "fast") if "@classifier" in getattr(options, o)]
    name, sure = _classifier(net)
    if not asking or sure:
        return None
    found = "none was found" if name is None else f"{name!r} was taken, the last one registered"
    return (
        f"which layer of {type(net).__name__} is its classifier cannot be told for sure: {found}. The method needs it "
        f"(option {asking[0]}). If it is another, name it: {asking[0]}=…, or call the module {_CALLED[0]!r}."
    )


def _inert(model: Perturbed) -> str | None:
    """Return what to say where a scheme asks for norm layers only, and the network has none that could change."""
    options = model.options
    parts = {"statistics": options.norm_statistics != "source", "scale and shift": options.norm_affine}
    asked = [name for name, on in parts.items() if on]
    moving = any(policy.statistics not in (None, "source") for policy in model.norms)
    if not asked or options.layers or options.train or moving or any(p.requires_grad for p in model.parameters()):
        return None
    has = "no norm layer" if not model.norms else "no norm layer that has them"
    return (
        f"{type(model.net).__name__} has {has}; this method changes the {' and the '.join(asked)} of norm layers and "
        "nothing else, so every answer will be the source network's. Choose a method that changes weights or perturbs "
        "them, such as vmp or tent-ft (undrift.methods.table())."
    )
