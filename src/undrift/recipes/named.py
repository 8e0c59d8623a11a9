"""Check the arguments beside the name of a method, and build the method's parts."""

from collections.abc import Mapping, Sequence
from typing import Any

from undrift._errors import OptionError
from undrift.recipes.method import Method, Parts


def parts_of(
    recipe: Method | None,
    settings: Mapping[str, object],
    *,
    likelihood: object = None,
    keepers: Sequence[object] = (),
    preprocess: Any = None,
    classes: Sequence[str] | None = None,
) -> Parts | None:
    """Return the parts of a named method, ready to run; None where no method was named.

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
        return None
    if likelihood is not None or keepers:
        raise OptionError(
            f"method={recipe.name!r} brings its own likelihood and keepers, and others were given. Give one of the two."
        )
    if preprocess is not None and "preprocess" in recipe.settings():
        settings = {**settings, "preprocess": preprocess}  # one value for the file and for augmentations
    return recipe.build(settings)
