"""A method by name: all that can be wrong with its call is found before the network is touched, or the touch undone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from undrift import methods
from undrift._errors import OptionError
from undrift.posterior.perturbed import Perturbed
from undrift.recipes.method import Loop, Method, Parts


def named(
    loop: Loop, method: str | None, settings: Mapping[str, object], given: Mapping[str, Any]
) -> tuple[Method, Parts] | None:
    """Return the method and its parts, ready to run; None where no method was named.

    Args:
        settings: options, and arguments of its likelihood and keepers.
        given: the arguments of the loop that only go with a method (preprocess, classes), or only without one
            (likelihood, keepers), by name; None was not given.
    """
    there = [name for name, value in given.items() if value is not None]
    if method is None:
        if alone := [*settings, *(name for name in there if name in ("preprocess", "classes"))]:
            raise OptionError(
                f"{', '.join(alone)}: settings belong to a method, and none was named. Give method=…, or the options "
                "to undrift.perturb."
            )
        return None
    recipe = methods.get(method, loop)
    if "likelihood" in there or "keepers" in there:
        raise OptionError(
            f"method={method!r} brings its own likelihood and keepers, and others were given. Give one of the two."
        )
    if "preprocess" in there and "preprocess" in recipe.settings():
        settings = {**settings, "preprocess": given["preprocess"]}  # one value for the file and for augmentations
    return recipe, recipe.build(settings)


@contextmanager
def given_back(model: Perturbed) -> Iterator[None]:
    """Take the perturbation off where a `with` block fails: nobody else has the model of a method that failed."""
    try:
        yield
    except BaseException:
        model.remove()
        raise
