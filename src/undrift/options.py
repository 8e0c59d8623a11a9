"""Every choice that the paper, its released code or a user can make, by name, in one place.

The API, the command line and the domain file share this one frozen dataclass. Two presets carry whole columns of
the comparison between the paper and its released online code: `PAPER` (the default) and `RELEASED`. docs/options.md is
written from here.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from undrift._errors import OptionError

Sharing = Literal["kernel", "weight"]
Prior = Literal["adaptive", "isotropic"]
Initial = Literal["fraction", "prior"]
Estimator = Literal["local", "drawn"]
Energy = Literal["square", "offset", "centred"]
Statistics = Literal["source", "batch", "moving", "domain", "train"]
Reduction = Literal["bound", "mean"]
Answer = Literal["samples", "before", "after"]
Optimiser = Literal["adam", "sgd"]
Schedule = Literal["shot", "constant"]

T = TypeVar("T", bound="Changeable")
TYPES = ("conv", "conv_transpose", "linear", "attention")


def _option(
    default: Any,
    help: str,  # noqa: A002
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass field that explains itself: its help line and, for numbers, the bounds they keep."""
    return field(default=default, metadata={"help": help, "least": least, "above": above, "most": most})


@dataclass(frozen=True)
class Changeable:
    """What every frozen dataclass of options can do."""

    def replace(self: T, **changes: object) -> T:
        """Return these options with some changed; a name that does not exist gets a suggestion."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise OptionError(f"there is no option {name!r}{_suggest(name, known)}. Options: {', '.join(known)}.")
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Options(Changeable):
    """What is perturbed, how strongly, how the noise is drawn, what the norm layers do, and what is asked.

    Examples:
        >>> Options(estimator="drawn").estimator
        'drawn'
        >>> preset("released").replace(init_fraction=0.01).kl_reduction
        'mean'
    """

    # Which layers. Patterns are shell-style (`layer4.*`) and match a module's name or any parent's name.
    layers: tuple[str, ...] = _option(("*",), "name patterns of the layers to perturb; none of them: no noise at all")
    exclude: tuple[str, ...] = _option((), "name patterns of layers that get no noise")
    frozen: tuple[str, ...] = _option((), "name patterns left wholly alone: no noise, source norm state (a classifier)")
    train: tuple[str, ...] = _option((), "name patterns of layers whose own weights are trained too; the paper: none")
    types: tuple[str, ...] = _option(TYPES, "kinds of layer to perturb: conv, conv_transpose, linear, attention")
    first: int | None = _option(None, "perturb only the first k of those layers", least=1)
    last: int | None = _option(None, "perturb only the last k of those layers", least=1)
    skip_first: int = _option(0, "leave the first k of those layers alone", least=0)
    skip_last: int = _option(0, "leave the last k of those layers alone", least=0)

    # How many variances.
    conv_sharing: Sharing = _option("kernel", "one log-variance a convolution kernel (output channel), or one a weight")
    linear_sharing: Sharing = _option("weight", "one log-variance a weight of a linear layer, or one a row")

    # What they start from and are pulled to.
    prior: Prior = _option("adaptive", "prior variance: prior_scale × Var(kernel), or prior_scale itself everywhere")
    prior_scale: float = _option(1.0, "λ of the prior", above=0)
    init: Initial = _option("fraction", "initial variance: init_fraction × Var(kernel), or the prior variance")
    init_fraction: float = _option(0.01, "initial variance as a fraction of the kernel's variance", least=0)
    init_offset: float = _option(0.0, "added to the initial variance", least=0)
    variance_floor: float = _option(1e-10, "least Var(kernel), for constant and one-weight kernels", above=0)

    # How the noise is drawn.
    estimator: Estimator = _option("local", "local reparameterisation, or weights drawn once a batch")
    energy: Energy = _option("square", "input energy of the local estimator: x², x² + energy_offset, or (x − mean)²")
    first_energy: Energy = _option("centred", "the same for the network's first layer, which sees raw images")
    energy_offset: float = _option(1e-2, "the constant of energy 'offset'", least=0)

    # What norm layers do.
    norm_statistics: Statistics = _option(
        "train", "source's, batch's, moving average, mean over the domain; train: batch's in steps, average at rest"
    )
    norm_momentum: float = _option(0.1, "weight of the new batch in the moving average", above=0, most=1)
    stream_norm_momentum: float = _option(1.0, "the same in a stream; 1: the latest batch's own", above=0, most=1)
    norm_affine: bool = _option(True, "train scale and shift of the norm layers")

    # What is asked.
    kl_reduction: Reduction = _option("bound", "KL summed over weights and divided by the data size, or its mean")
    kl_weight: float = _option(1.0, "factor before the KL", least=0)
    train_samples: int = _option(1, "draws of the perturbation in an adaptation step; 0 is the mean network", least=0)
    test_samples: int = _option(10, "draws averaged in a prediction; 0 is the mean network", least=0)
    answer: Answer = _option("samples", "a stream's answer: test_samples draws after the step, or its own forward pass")

    # When and how fast.
    stream_optimiser: Optimiser = _option("adam", "optimiser of a stream")
    stream_lr: float = _option(5e-4, "learning rate of a stream", least=0)
    stream_steps: int = _option(1, "steps a batch of a stream", least=1)
    stream_split: int | None = _option(
        None, "images that a stream adapts to at a time; None: the batch as it comes", least=1
    )
    adapt_optimiser: Optimiser = _option("sgd", "optimiser over epochs")
    adapt_lr: float = _option(2e-3, "learning rate over epochs", least=0)
    adapt_schedule: Schedule = _option("shot", "over epochs the rates fall as (1 + 10·progress)^−0.75, or stay")
    log_var_lr_scale: float = _option(1.0, "learning rate of log-variances over that of norm affine", least=0)
    fast: tuple[str, ...] = _option((), "name patterns of layers that learn faster (a new bottleneck)")
    fast_lr_scale: float = _option(10.0, "learning rate of those layers over the others'", least=0)
    momentum: float = _option(0.9, "momentum of SGD", least=0, most=1)
    nesterov: bool = _option(False, "SGD looks ahead (Nesterov)")
    weight_decay: float = _option(1e-3, "weight decay over epochs, never on log-variances", least=0)
    climb: float = _option(0.0, "radius of a climb before each step of a stream (sharpness-aware), 0: none", least=0)

    def __post_init__(self) -> None:
        for name in ("layers", "exclude", "frozen", "train", "types", "fast"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterable):
                object.__setattr__(self, name, tuple(value))
        hints = get_type_hints(type(self))
        problems = [p for f in dataclasses.fields(self) if (p := _problem(f, hints[f.name], getattr(self, f.name)))]
        if isinstance(self.types, tuple):
            problems += [f"types={t!r} is not one of {', '.join(TYPES)}" for t in self.types if t not in TYPES]
        if problems:
            # All at once: nobody likes to correct one option a run.
            raise OptionError("; ".join(problems) + ". `help(undrift.Options)` lists every option.")


def answering_draws(options: Options, answer: Answer | None = None) -> int:
    """Return with how many draws a stream answers, with its own kind of answer or another; 0 is the mean network.

    Examples:
        >>> answering_draws(Options(test_samples=10)), answering_draws(Options(answer="before", train_samples=0))
        (10, 0)
    """
    if not options.layers:
        return 0
    draws = {"samples": options.test_samples, "before": options.train_samples, "after": 1}
    return draws[answer or options.answer]


def preset(name: str) -> Options:
    """Return the preset of that name: "paper" or "released"."""
    if name not in PRESETS:
        raise OptionError(f"there is no preset {name!r}{_suggest(name, PRESETS)}. Presets: {', '.join(PRESETS)}.")
    return PRESETS[name]


def resolve(options: "Options | str", changes: Mapping[str, object]) -> Options:
    """Return what a call means by `options` (a preset's name or Options) and keyword changes to it."""
    chosen = preset(options) if isinstance(options, str) else options
    if not isinstance(chosen, Options):
        raise OptionError(f"options is a {type(chosen).__name__}; give Options(...) or one of {', '.join(PRESETS)}.")
    return chosen.replace(**changes) if changes else chosen


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _problem(f: "dataclasses.Field[Any]", hint: Any, value: Any) -> str | None:
    """Return what is wrong with one option's value, or None."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return None if value in choices else f"{f.name}={value!r} is not one of {', '.join(choices)}"
    if hint is bool:
        return None if isinstance(value, bool) else f"{f.name}={value!r} is neither True nor False"
    if get_origin(hint) is tuple:
        right = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
        return None if right else f"{f.name}={value!r} is not a string or several"
    if value is None and type(None) in get_args(hint):
        return None
    whole = hint is int or int in get_args(hint)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return f"{f.name}={value!r} is not {'a whole number' if whole else 'a number'}"
    least, above = f.metadata["least"], f.metadata["above"]
    if value != value or value in (float("inf"), float("-inf")):
        return f"{f.name}={value!r} is not finite"
    if least is not None and value < least:
        return f"{f.name}={value!r} is below {least}"
    if above is not None and value <= above:
        return f"{f.name}={value!r} is not above {above}"
    if (most := f.metadata.get("most")) is not None and value > most:
        return f"{f.name}={value!r} is above {most}"
    return None


# Values that the paper leaves open, and why they are what they are here (measurements: docs/method.md):
# - init_fraction 0.01: a tenth of a kernel's standard deviation. Smaller is inert (the released 1e-6 is Tent at the
#   same learning rate), larger costs accuracy on streams.
# - first_energy "centred": the constant part of a raw image enters Σx² with full weight, and local noise turns it into
#   independent noise at every position that no norm layer removes.
# - norm_statistics "train": the text has a moving average, its code none. As PyTorch trains: a step normalises by the
#   batch, predictions by the average. Steps that normalise by the average ("moving") have a gradient that does not see
#   the normalisation, and a long stream drifts away: WRN-28-10 on CIFAR-10-C ended at 57 % error, and on development
#   corruptions the fourth cycle is at 34/30/20 % where "train" is at 27/24/12 (docs/method.md).
# - norm_momentum 0.1, stream_norm_momentum 1: the paper updates "through moving average" without its rate. PyTorch's
#   0.1 averages many batches over epochs. On a stream every average lags behind a change of domain (the demo's stream:
#   80 % with 0.4, 89 % with 1); with 1 it is the latest batch's own, and stays for single images afterwards.
# - answer "samples": the text samples ten times at test and predicts batch by batch, at once.
# - weight_decay never touches a log-variance: it would pull σ towards 1, a thousand times a kernel's size.
PAPER = Options()

RELEASED = Options(
    init_fraction=1e-6,
    init_offset=1e-10,
    energy="offset",
    first_energy="offset",
    norm_statistics="batch",
    kl_reduction="mean",
    kl_weight=1e-2,
    test_samples=1,
    answer="before",
    stream_lr=7e-5,
)

PRESETS: Mapping[str, Options] = {"paper": PAPER, "released": RELEASED}
