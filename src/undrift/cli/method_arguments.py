"""Choose the method of a run: by name with its settings, or as a preset with a likelihood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from undrift._errors import OptionError
from undrift.cli.likelihood_arguments import make_likelihood, read_settings
from undrift.options import Options, resolve

if TYPE_CHECKING:
    from torch import nn

    from undrift.cli.image_arguments import Reader
    from undrift.recipes.method import Method, Parts

METHOD_PANEL = "The method; defaults are those of undrift (every option: --help-all)"
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method", help="One of `undrift methods` (default undrift).", metavar="NAME", rich_help_panel=METHOD_PANEL
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of --method; repeat it. source=FOLDER opens images.",
        metavar="NAME=VALUE",
        hidden=True,
        rich_help_panel=METHOD_PANEL,
    ),
]
IMAGES = ("source",)
"""Settings that are images: the command opens them as it opens its own."""


@dataclass(frozen=True)
class Chosen:
    """A choice of method.

    Attributes:
        recipe: the method, or None if options and a likelihood were given instead.
        settings: its changed options and the settings of its likelihood and keepers.
        ready: its parts, if they can be made without images.
    """

    recipe: "Method | None"
    settings: Mapping[str, Any]
    ready: "Parts | None"

    @property
    def name(self) -> str | None:
        """The method's name; None where there is none."""
        return None if self.recipe is None else self.recipe.name

    def fitted(self, net: "nn.Module", images: Any) -> "Chosen":
        """Return the choice with the method's values for this network, as `undrift.adapt` takes them."""
        from undrift.recipes.named import for_outputs

        if self.recipe is None:
            return self
        recipe = for_outputs(self.recipe.for_network(net), net, images, self.settings)
        return Chosen(recipe, self.settings, self.ready and recipe.build(self.settings))

    def parts(self, reader: "Reader") -> "Parts":
        """Return options, likelihood and keepers; settings that are images are opened here."""
        if self.ready is not None:
            return self.ready
        assert self.recipe is not None, "only a method has settings that are images"
        opened = {name: reader.images(str(self.settings[name])) for name in IMAGES if name in self.settings}
        return self.recipe.build({**self.settings, **opened})

    def files(self) -> list[Path]:
        """Return the files among the settings, which no output may replace."""
        return [Path(value) for value in self.settings.values() if isinstance(value, str) and Path(value).exists()]


def choose(
    loop: Literal["stream", "adapt"],
    method: str | None,
    sets: Sequence[str] | None,
    preset: str | None,
    options: Mapping[str, Any],
    likelihood: Mapping[str, Any],
    seed: int,
    ready: bool = False,
) -> Chosen:
    """Return what the flags choose; raise on a contradiction before any file is opened.

    Without a method, a preset and a likelihood it is the default method.

    Args:
        seed: the command's seed; methods with random parts of their own (augmented views) get it too.
        ready: whether the network comes perturbed, from a domain file.
    """
    from undrift import methods
    from undrift.cli.models import parse_arguments
    from undrift.recipes.method import Parts

    given = parse_arguments(tuple(sets or ()))
    if method is None and preset is None and "likelihood" not in likelihood and not ready:
        method = methods.DEFAULT
    if method is None:
        if given:
            raise OptionError(
                f"--set {next(iter(given))}=… was given without --method; needed: its method. Name that, or use "
                "the option of that name (`--help-all` lists them)."
            )
        if loop == "stream" and likelihood.get("likelihood") == "shot":
            raise OptionError(
                "--likelihood shot needs a pass over a whole domain before each epoch, and a stream has none; needed: "
                "information, entropy or consistency. Choose one."
            )
        asked = make_likelihood(dict(likelihood), usual="entropy" if loop == "stream" else "shot")
        return Chosen(None, {}, Parts(resolve(preset or "paper", options), asked))
    if loop not in (recipe := methods.get(method)).loops:
        raise OptionError(
            f"{method} does not run in `undrift {loop}`; needed: its own command. Use `undrift {recipe.loops[0]} … "
            f"--method {method}`."
        )
    recipe = methods.get(method, loop)
    if "likelihood" in likelihood or preset is not None:
        other = f"--likelihood {likelihood['likelihood']}" if "likelihood" in likelihood else f"--preset {preset}"
        raise OptionError(
            f"{other} was given beside --method {method}, which has its own; needed: one of the two. Leave one out"
            + (f", or name a variant: --method {method.partition(':')[0]}:{preset}." if preset is not None else ".")
        )
    settings = _settings_of(recipe, options, likelihood, given)
    if "seed" in recipe.settings():
        settings.setdefault("seed", seed)
    if any(name in settings for name in IMAGES):
        # The method is built when its images are open, but wrong options raise here.
        known = {f.name for f in fields(Options)}
        recipe.options.replace(**{name: value for name, value in settings.items() if name in known})
        return Chosen(recipe, settings, None)
    return Chosen(recipe, settings, recipe.build(settings))


def _settings_of(
    recipe: "Method", options: Mapping[str, Any], likelihood: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings of a method: from options, flags of likelihoods, and --set."""
    foreign = [f"--{name.replace('_', '-')}" for name in likelihood if name not in recipe.settings()]
    if foreign:
        raise OptionError(
            f"{', '.join(foreign)} does not belong to {recipe.name}; needed: an option, or a setting "
            f"({', '.join(recipe.settings()) or 'it has none'}) with --set NAME=VALUE. Leave it out, or name "
            "the method or likelihood that it belongs to."
        )
    twice = [name for name in given if name in options or name in likelihood]
    if twice:
        raise OptionError(
            f"{twice[0]} was given twice, as --{twice[0].replace('_', '-')} and with --set; needed: one value. Leave "
            "one out."
        )
    return {**options, **read_settings(likelihood), **given}
