"""Resolve every default of a row and hash it, so that a changed default makes a new run."""

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from undrift import methods
from undrift._errors import OptionError
from undrift.options import Options
from undrift.recipes.method import Loop

# What a method has beside its options, and which options the other loop alone looks at.
OWN: dict[Loop, tuple[str, ...]] = {"stream": ("episodic",), "adapt": ("epochs", "batch_size")}
IDLE: dict[Loop, tuple[str, ...]] = {
    "stream": ("adapt_optimiser", "adapt_lr", "adapt_schedule", "weight_decay", "norm_momentum", "step_views"),
    "adapt": (
        *("stream_optimiser", "stream_lr", "stream_steps", "stream_split", "stream_norm_momentum"),
        *("answer", "climb", "stream_lr_images", "step_views"),  # benchmarks augment images themselves
    ),
}
# Options that came later, with the value at which runs are what they were before.
OFF: dict[str, object] = {
    "stream_lr_images": None,
    "weights_lr": None,
    "answer_views": (),
    "kl_mean": "gradient",
    "outputs": "softmax",
}
# Arguments that came later, of parts that were there before; off where they are False or 0.
LATER = {"Nrc": ("statistics_first", "least_agreement"), "Aad": ("statistics_first",), "Gsfda": ("statistics_first",)}
AVERAGED = ("moving", "train")  # statistics that have a momentum
MOMENTUM = ("norm_momentum", "stream_norm_momentum")
NOISE = (
    *("conv_sharing", "linear_sharing", "prior", "prior_scale", "init", "init_fraction", "init_offset"),
    *("variance_floor", "estimator", "energy", "first_energy", "energy_offset", "kl_reduction", "kl_weight"),
    "log_var_lr_scale",
)


def resolved(name: str, settings: Mapping[str, Any], loop: Loop) -> dict[str, Any]:
    """Return a method's options and the arguments of its likelihood and keepers, as a run with these settings has them.

    Options without an effect are left out: the noise's values do not matter to Tent. Parts that the benchmark provides
    (source images, preprocessing, trained heads) are no settings of a row and keep the method's defaults here.

    Examples:
        >>> resolved("tent", {}, "stream")["options"]["stream_lr"]
        0.001
        >>> resolved("shot", {"beta": 0.5}, "adapt")["parts"]["Shot"]["beta"]
        0.5
    """
    method = methods.get(name, loop)
    given = {**method.given, **settings}
    known = {field.name for field in dataclasses.fields(Options)}
    options = method.options.replace(**{key: value for key, value in settings.items() if key in known})
    # Nothing is built, as a keeper may need source images.
    return {
        "options": effective(options, loop),
        "parts": {_maker(make): _arguments(make, given) for make in (method.likelihood, *method.keepers)},
        **{field: getattr(method, field) for field in OWN[loop]},
    }


def effective(options: Options, loop: Loop) -> dict[str, Any]:
    """Return the options that this loop looks at, with these very options."""
    idle = {*IDLE[loop], *(() if options.norm_statistics in AVERAGED else MOMENTUM)}
    idle |= set() if options.layers else set(NOISE)
    idle |= {name for name, off in OFF.items() if getattr(options, name) == off}
    idle |= set() if options.mean_rank is not None else {"mean_rank", "mean_start"}
    return {key: value for key, value in options.as_dict().items() if key not in idle}


def fingerprint(name: str, settings: Mapping[str, Any], loop: Loop) -> str:
    """Return twelve hexadecimal digits of what a row comes to; nothing for a method that does not exist."""
    return _fingerprint(name, canonical(settings), loop)


def canonical(value: Any) -> str:
    """Return a value as text that is the same in every process."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=_plain)


@functools.cache
def _fingerprint(name: str, settings: str, loop: Loop) -> str:
    try:
        text = canonical(resolved(name, json.loads(settings), loop))
    except OptionError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _arguments(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    taken = inspect.signature(make).parameters.values()
    found = {p.name: given.get(p.name, None if p.default is p.empty else p.default) for p in taken}
    later = LATER.get(_maker(make), ())
    return {name: value for name, value in found.items() if value or name not in later}


def _maker(make: Callable[..., Any]) -> str:
    """Return the name of what makes a likelihood or a keeper; one that is made of nothing has its own."""
    make = make.func if isinstance(make, functools.partial) else make
    return _name(make() if _name(make) == "<lambda>" else make)


def _name(value: Any) -> str:
    found: str = getattr(value, "__qualname__", type(value).__qualname__)
    return found


def _plain(value: Any) -> Any:
    # Not its repr, which may hold an address: the hash must be the same in every process.
    return sorted(value) if isinstance(value, set | frozenset) else _name(value)
