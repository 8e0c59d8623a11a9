"""The `Method` class: scheme × likelihood × loop, and keepers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, get_args

from torch import nn

from undrift._errors import OptionError
from undrift._types import Keeper
from undrift.options import Options, _suggest, answering_draws
from undrift.system.private import BatchNorm

Loop = Literal["stream", "adapt"]
SMALL = 1_000_000  # weights; below it a network was trained from scratch, not on top of a large one

# The annotations that are checked, in words and as types (NumPy's numbers count too).
_PLAIN: dict[object, tuple[str, type]] = {
    int: ("a whole number", Integral),
    float: ("a number", Real),
    bool: ("True or False", bool),
    str: ("a text", str),
    NoneType: ("None", NoneType),
}


@dataclass(frozen=True)
class Parts:
    """A method made ready to run: its scheme, its likelihood and its keepers."""

    options: Options
    likelihood: Any
    keepers: Sequence[Keeper] = ()


@dataclass(frozen=True)
class Method:
    """One row of the table of methods.

    Attributes:
        name: what `method=` takes; with a variant, "name:variant".
        title: its name in tables.
        reference: who proposed it.
        loops: "stream" (batch by batch), "adapt" (over epochs), or both.
        options: what may change, with its authors' optimiser and rates.
        likelihood: makes the loss; its arguments are settings of the method.
        keepers: make what holds on to the source; their arguments are settings too.
        epochs: passes over the domain; `batch_size`: images per step there; `stream_batch`: the same in a stream.
        episodic: whether every batch of a stream starts from the source.
        needs: what it needs beside a source network and unlabelled images; "" is nothing.
        source_free: whether it needs neither source data nor a special source training.
        ensemble: whether several networks answer together.
        variants: settings by name, such as its authors' values for ImageNet.
        by_loop: what differs in one of its loops, as settings; the row itself is for all others.
        small: what differs for a network with fewer than `SMALL` weights, as settings.
        unnormed: what differs for a network without batch norm, as settings.
        keep: the epoch that `adapt` keeps, if the caller names none.
        positions: what differs for a network that answers each pixel or label, as settings; empty if nothing does.
        note: a sentence about a choice that was made for the network.
        given: settings that its variant or its loop names.
    """

    name: str
    title: str
    reference: str
    loops: tuple[Loop, ...]
    options: Options
    likelihood: Callable[..., Any]
    keepers: tuple[Callable[..., Keeper], ...] = ()
    epochs: int = 15
    batch_size: int = 64
    stream_batch: int = 200
    episodic: bool = False
    needs: str = ""
    source_free: bool = True
    ensemble: bool = False
    variants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    by_loop: Mapping[Loop, Mapping[str, object]] = field(default_factory=dict)
    small: Mapping[str, object] = field(default_factory=dict)
    unnormed: Mapping[str, object] = field(default_factory=dict)
    keep: Literal["last", "best", "safe"] = "last"
    positions: Mapping[str, object] = field(default_factory=dict)
    note: str = ""
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def online(self) -> bool:
        """Whether it runs in a stream."""
        return "stream" in self.loops

    @property
    def uncertainty(self) -> bool:
        """Whether it has a distribution over networks; `mutual_info` says which answers show it."""
        return bool(self.options.layers) or self.ensemble

    @property
    def mutual_info(self) -> Literal["yes", "after the stream", "with more samples", "with several members", "no"]:
        """Which answers have mutual information: all of them, or only those of a later `predict(…, samples=10)`."""
        options = self.options
        if not options.layers:
            return "with several members" if self.ensemble else "no"
        if not self.online:
            return "yes" if options.test_samples > 1 else "with more samples"
        return "yes" if answering_draws(options) > 1 else "after the stream"

    @property
    def changes(self) -> str:
        """What may change, in words."""
        options = self.options
        parts = {
            "norm statistics": options.norm_statistics != "source",
            "norm affine": options.norm_affine,
            "weights": bool(options.train),
            "perturbation": bool(options.layers),
        }
        return " + ".join(name for name, on in parts.items() if on) or "nothing"

    def variant(self, name: str) -> "Method":
        """Return the method with the settings of a variant."""
        if name not in self.variants:
            known = ", ".join(self.variants) or "none"
            raise OptionError(
                f"{self.name} has no variant {name!r}{_suggest(name, self.variants)}; it has {known}. Leave it out."
            )
        return replace(self._changed(self.variants[name]), name=f"{self.name}:{name}", variants={})

    def in_loop(self, loop: Loop) -> "Method":
        """Return the method as that loop runs it."""
        return replace(self._changed(self.by_loop.get(loop, {})), by_loop={})

    def for_network(self, net: nn.Module) -> "Method":
        """Return the method with the values for a network of that size, and with such norm layers."""
        found = self
        sized = (p for p in net.parameters() if not isinstance(p, nn.UninitializedParameter))  # lazy ones have no size
        if self.small and sum(p.numel() for p in sized) < SMALL:
            found = replace(found._changed(self.small), small={})
        if self.unnormed and not any(isinstance(module, BatchNorm) for module in net.modules()):
            found = replace(found._changed(self.unnormed), unnormed={})
        return found

    def for_positions(self) -> "Method":
        """Return the method with the values for a network that answers each pixel or label."""
        return replace(self._changed(self.positions), positions={})

    def _changed(self, settings: Mapping[str, object]) -> "Method":
        """Return the method with settings changed: its own attributes, a preset, options, and those of its parts."""
        values = dict(settings)
        own = {f.name for f in fields(self)} - {"name", "options", "variants", "by_loop", "given"}
        mine: dict[str, Any] = {key: values.pop(key) for key in list(values) if key in own}
        chosen = values.pop("preset", self.options)
        assert isinstance(chosen, Options)
        names = {f.name for f in fields(Options)}
        changes = {key: values.pop(key) for key in list(values) if key in names}
        return replace(self, **mine, options=chosen.replace(**changes), given={**self.given, **values})

    def settings(self) -> list[str]:
        """Return the names of the settings that are not options: those of its likelihood and its keepers."""
        found = (name for make in (self.likelihood, *self.keepers) for name in _arguments(make))
        return list(dict.fromkeys(found))  # parts that take the same setting share its value

    def build(self, settings: Mapping[str, object]) -> Parts:
        """Return the method ready to run, with settings (options, or arguments of likelihood and keepers) changed."""
        settings = {**self.given, **settings}
        options = {f.name for f in fields(Options)}
        known = {*options, *self.settings()}
        for name in settings:
            if name not in known:
                raise OptionError(
                    f"{self.name} has no setting {name!r}{_suggest(name, known)}; beside the options "
                    f"(docs/reference/options.md) it takes {', '.join(self.settings()) or 'none'}. Correct the name, "
                    "or leave it out."
                )
        makers = (self.likelihood, *self.keepers)
        if wrong := [problem for make in makers for problem in _wrong(make, settings)]:
            raise OptionError(
                f"{self.name}: {'; '.join(dict.fromkeys(wrong))}. Its settings, with their defaults: "
                f"{', '.join(str(p) for make in makers for p in _parameters(make))}."
            )
        scheme = _naming_the_bottleneck(self.options, settings.get("features"))
        chosen = scheme.replace(**{k: v for k, v in settings.items() if k in options})

        def made(make: Callable[..., Any]) -> Any:
            return make(**{k: v for k, v in settings.items() if k in _arguments(make)})

        return Parts(chosen, made(self.likelihood), tuple(made(make) for make in self.keepers))


def _naming_the_bottleneck(options: Options, features: object) -> Options:
    """Return the options with `features` in place of "@bottleneck", if that is trained by its role (G-SFDA).

    If everything is trained, as in SHOT, `features` only says where to look; that layer need not be new and learns no
    faster.
    """
    if features is None or "@bottleneck" not in options.train:
        return options
    patterns = {option: getattr(options, option) for option in ("train", "fast")}
    return options.replace(**{o: tuple(features if p == "@bottleneck" else p for p in v) for o, v in patterns.items()})


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(make).parameters.values() if p.kind in kinds]


def _arguments(make: Callable[..., Any]) -> list[str]:
    return [p.name for p in _parameters(make)]


def _wrong(make: Callable[..., Any], settings: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the types of settings that have a plain annotation."""
    problems = []
    for p in _parameters(make):
        kinds = get_args(p.annotation) if isinstance(p.annotation, UnionType) else (p.annotation,)
        if p.name in settings and all(kind in _PLAIN for kind in kinds):
            value = settings[p.name]
            # True is an int in Python, but not meant as one.
            fits = [bool in kinds] if isinstance(value, bool) else [isinstance(value, _PLAIN[k][1]) for k in kinds]
            if not any(fits):
                problems.append(f"{p.name}={value!r} is not {' or '.join(_PLAIN[k][0] for k in kinds)}")
    return problems
