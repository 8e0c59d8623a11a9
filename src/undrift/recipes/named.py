"""Choose what a verb runs: the parts of a named method on a plain network, or the caller's on a perturbed one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from undrift._errors import OptionError
from undrift._types import Keeper
from undrift.loop.setup import require_perturbed
from undrift.options import Options
from undrift.posterior.perturbed import Perturbed
from undrift.recipes.method import Method, Parts
from undrift.recipes.perturb_plain import perturb_plain


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
