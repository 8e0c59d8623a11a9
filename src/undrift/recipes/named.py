"""Choose what a verb runs: the parts of a named method on a plain network, or the caller's on a perturbed one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from undrift._errors import OptionError, UndriftError
from undrift._types import Keeper
from undrift.loop.positions import answers_positions
from undrift.loop.setup import require_perturbed
from undrift.options import Options
from undrift.perturb import perturb
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.roles import CLASSIFIER_NAMES, find_classifier, resolve_roles
from undrift.posterior.select import candidates, matching, plain_name
from undrift.recipes.method import Method, Parts
from undrift.system.warning import warn

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def parts_of(
    recipe: Method | None,
    verb: str,
    model: nn.Module,
    settings: Mapping[str, object],
    likelihood: object,
    keepers: Sequence[Keeper],
    preprocess: Any,
    classes: Sequence[str] | None,
) -> Parts:
    """Return options, likelihood and keepers of a run: the method's, or the caller's where no method was named.

    Args:
        settings: options, and arguments of the method's likelihood and keepers, by name.
        likelihood: as the caller gave it, like `keepers`; a method brings its own.
        preprocess: as the caller gave it, like `classes`; both only go with a method.
    """
    if recipe is None:
        described = {"preprocess": preprocess, "classes": classes}
        if alone := [*settings, *(name for name, value in described.items() if value is not None)]:
            raise OptionError(
                f"{', '.join(alone)}: settings belong to a method, and none was named. Give method=…, or the options "
                "to undrift.perturb."
            )
        return Parts(require_perturbed(model, verb).options, likelihood, keepers)
    if likelihood is not None or keepers:
        raise OptionError(
            f"method={recipe.name!r} brings its own likelihood and keepers, and others were given. Give one of the two."
        )
    if preprocess is not None and "preprocess" in recipe.settings():
        settings = {**settings, "preprocess": preprocess}  # one value for the file and for augmentations
    return recipe.build(settings)


def for_outputs(recipe: Method, net: nn.Module, images: Any, settings: Mapping[str, Any]) -> Method:
    """Return the method with the values for what the network returns: an answer per image, per pixel or per label."""
    outputs = settings.get("outputs", recipe.options.outputs)
    return recipe.for_positions() if recipe.positions and answers_positions(net, images, outputs) else recipe


@contextmanager
def scheme_on(
    net: nn.Module,
    recipe: Method | None,
    scheme: Options,
    generator: torch.Generator | None,
    preprocess: Any,
    classes: Sequence[str] | None,
) -> Iterator[Perturbed]:
    """Put a method's scheme on a plain network for a `with` block to adapt; without a method it is perturbed already.

    If the block fails, the plain network is restored: its caller has no model to remove.
    """
    if recipe is None:
        assert isinstance(net, Perturbed), "`parts_of` refuses others"
        yield net
        return
    model = perturb_plain(net, scheme, generator, preprocess, classes)
    try:
        yield model
    except BaseException:
        model.remove()
        raise


def perturb_plain(
    net: nn.Module,
    options: Options,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
    classes: Sequence[str] | None = None,
) -> Perturbed:
    """Perturb a plain network by a scheme; roles such as "@classifier" become names in this network.

    Of a compiled network it is the one inside: a step runs it in many modes, and each would be compiled anew.
    """
    net = root_of(net)
    if isinstance(net, Perturbed):
        raise UndriftError(
            "the network is perturbed already, and a method puts its own scheme on a plain one. Give the network "
            "itself: model.remove(), or leave method= out and give a likelihood."
        )
    # Not a module: perturb says what is wrong.
    chosen = _with_a_layer(net, resolve_roles(net, options)) if hasattr(net, "named_modules") else options
    model = perturb(net, chosen, generator=generator, preprocess=preprocess, classes=classes)
    try:
        for said in (_guessed(net, options), _inert(model)):
            if said is not None:
                warn(said)
    except BaseException:  # warnings may be errors
        model.remove()
        raise
    return model


def _with_a_layer(net: nn.Module, options: Options) -> Options:
    """Return the options so that they fit a network that they would leave no layer with noise.

    A shallow one gets noise in its first layer, too; one whose other layers have none (an LSTM) has its weights trained
    without.
    """
    if not options.layers or any(c.why_not is None for c in candidates(net, options)):
        return options
    if options.skip_first:
        return _with_a_layer(net, options.replace(skip_first=0))
    names = [plain_name(name) for name, module in net.named_modules() if module._parameters]
    trains = any(matching(name, options.train) and not matching(name, options.frozen) for name in names)
    return options.replace(layers=()) if trains else options


def _guessed(net: nn.Module, options: Options) -> str | None:
    """Return a warning if a method needs the classifier and we had to guess it, else None."""
    asking = [o for o in ("frozen", "train", "fast") if "@classifier" in getattr(options, o)]
    name, sure = find_classifier(net)
    if not asking or sure:
        return None
    found = "none was found" if name is None else f"{name!r} was taken, the last one registered"
    do = "Name it" if name is None else "If it is another, name it"
    return (
        f"which layer of {type(net).__name__} is its classifier cannot be told for sure: {found}. The method needs it "
        f"(option {asking[0]}). {do}: {asking[0]}=…, or call the module {CLASSIFIER_NAMES[0]!r}."
    )


def _inert(model: Perturbed) -> str | None:
    """Return a warning if a scheme changes norm layers only and the network has none that can change, else None."""
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
