"""Every option of a method by name: what it does, its default, and the values it takes.

The API, the command line and the domain file share one frozen dataclass, `Options`. Its fields come in six groups,
and ten of them matter first. Two presets fill it: `PAPER` (the defaults) and `RELEASED` (the values of the paper's
released online code). docs/reference/options.md is generated from here.
"""

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from undrift._errors import OptionError
from undrift.system.validate import a_type

Sharing = Literal["kernel", "weight"]
Prior = Literal["adaptive", "isotropic"]
Initial = Literal["fraction", "prior"]
Estimator = Literal["local", "drawn"]
Energy = Literal["square", "offset", "centred"]
Statistics = Literal["source", "batch", "moving", "domain", "train"]
Reduction = Literal["bound", "mean"]
Pull = Literal["gradient", "closed"]
Start = Literal["kernel", "gradient"]
Answer = Literal["samples", "before", "after"]
Outputs = Literal["softmax", "sigmoid"]
Optimiser = Literal["adam", "sgd"]
Schedule = Literal["shot", "constant"]

T = TypeVar("T", bound="Changeable")
BOUNDS = {"least": (operator.lt, "below"), "above": (operator.le, "not above"), "most": (operator.gt, "above")}
TYPES = ("conv", "conv_transpose", "linear", "attention")
VIEW_NAMES = ("mirror", "shift")

GROUPS = {
    "layers": "which layers are perturbed",
    "noise": "variances, their prior, and how noise is drawn",
    "norm": "norm layers; 'train' normalises steps by the batch, predictions by a moving average",
    "objective": "what a step minimises",
    "answer": "how predictions are made",
    "optimiser": "when and how fast parameters change",
}
"""The groups of options, in the order of the fields, each with what it is about."""


def _option(
    default: Any,
    help: str,  # noqa: A002
    *,
    group: str = "",
    main: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a field with its help line and bounds; `main` marks the options that matter first."""
    metadata = {"help": help, "group": group, "main": main, "least": least, "above": above, "most": most}
    return field(default=default, metadata=metadata)


_layers, _noise, _norm, _objective, _answer, _optimiser = (partial(_option, group=name) for name in GROUPS)


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


@dataclass(frozen=True, repr=False)
class Options(Changeable):
    """How a network is perturbed and adapted. `repr` shows what differs from the defaults, `print` all groups.

    Examples:
        >>> Options(estimator="drawn")
        Options(estimator='drawn')
        >>> preset("released").replace(init_fraction=0.01).kl_reduction
        'mean'
    """

    # Patterns are shell-style (`layer4.*`) and match the name of a module or of any module that contains it.
    layers: tuple[str, ...] = _layers(("*",), "name patterns of the layers to perturb; empty: no noise")
    exclude: tuple[str, ...] = _layers((), "name patterns of layers without noise", main=True)
    frozen: tuple[str, ...] = _layers((), "name patterns of parts left as they are", main=True)
    train: tuple[str, ...] = _layers((), "name patterns of layers whose weights are trained too (the paper: none)")
    mean_rank: int | None = _layers(
        None, "rank of the change of trained kernels; None: free, 0: nothing of them moves", least=0
    )
    mean_start: Start = _layers(
        "kernel", "directions a low-rank change starts from: the kernel's singular vectors, or the first gradient's"
    )
    types: tuple[str, ...] = _layers(TYPES, "kinds of layer to perturb: conv, conv_transpose, linear, attention")
    first: int | None = _layers(None, "perturb only the first k of these layers", least=1)
    last: int | None = _layers(None, "perturb only the last k of these layers", least=1)
    skip_first: int = _layers(0, "do not perturb the first k of these layers", least=0)
    skip_last: int = _layers(0, "do not perturb the last k of these layers", least=0)

    conv_sharing: Sharing = _noise("kernel", "one variance per convolution kernel (output channel), or per weight")
    linear_sharing: Sharing = _noise("weight", "one variance per row of a linear layer ('kernel'), or per weight")
    prior: Prior = _noise("adaptive", "prior variance: prior_scale × Var(kernel), or prior_scale for all weights")
    prior_scale: float = _noise(1.0, "scale λ of the prior variance", above=0)
    init: Initial = _noise("fraction", "initial variance: init_fraction × Var(kernel), or the prior variance")
    init_fraction: float = _noise(0.01, "initial variance / Var(kernel)", least=0, main=True)
    init_offset: float = _noise(0.0, "constant added to the initial variance", least=0)
    variance_floor: float = _noise(1e-10, "lower bound of Var(kernel); constant kernels have none", above=0)
    estimator: Estimator = _noise("local", "local reparameterisation, or weights drawn per batch", main=True)
    energy: Energy = _noise("square", "input energy of the local estimator: x², x² + energy_offset, or (x − mean)²")
    first_energy: Energy = _noise("centred", "input energy of the network's first layer, which sees raw images")
    energy_offset: float = _noise(1e-2, "the constant of energy 'offset'", least=0)

    norm_statistics: Statistics = _norm("train", "statistics of norm layers", main=True)
    norm_momentum: float = _norm(0.1, "weight of a new batch in the moving average", above=0, most=1)
    stream_norm_momentum: float = _norm(1.0, "the same in a stream; 1 keeps only the latest batch", above=0, most=1)
    norm_affine: bool = _norm(True, "train scale and shift of the norm layers")

    kl_reduction: Reduction = _objective("bound", "KL summed over weights and divided by the data size, or its mean")
    kl_weight: float = _objective(1.0, "factor of the KL", least=0, main=True)
    kl_mean: Pull = _objective(
        "gradient", "the KL moves trained weights by its gradient, or in closed form after the step (steady under SGD)"
    )
    train_samples: int = _objective(1, "draws of the noise per step; 0: the mean network", least=0)
    step_views: tuple[str, ...] = _objective(
        (), "views that steps over epochs draw for each image: mirror, shift; auto: those of answers"
    )

    test_samples: int = _answer(10, "draws per prediction; 0: the mean network", least=0, main=True)
    answer: Answer = _answer("samples", "draws, or one pass before or after a stream's step", main=True)
    outputs: Outputs = _answer("softmax", "one class per image or pixel, or any number of labels (one logit each)")
    answer_views: tuple[str, ...] = _answer((), "views to average answers over: mirror, shift; auto: those found safe")

    stream_optimiser: Optimiser = _optimiser("adam", "optimiser of a stream")
    stream_lr: float = _optimiser(5e-4, "learning rate of a stream", least=0, main=True)
    stream_lr_images: int | None = _optimiser(
        None, "images per step that the rates of a stream are for; fewer take smaller steps", least=1
    )
    weights_lr: float | None = _optimiser(
        None, "rate of trained weights, in deviations of their source values; None: as norm layers", least=0
    )
    stream_steps: int = _optimiser(1, "steps per batch of a stream", least=1)
    stream_split: int | None = _optimiser(None, "images per step of a stream; None: the whole batch", least=1)
    adapt_optimiser: Optimiser = _optimiser("sgd", "optimiser over epochs")
    adapt_lr: float = _optimiser(2e-3, "learning rate over epochs", least=0, main=True)
    adapt_schedule: Schedule = _optimiser("shot", "over epochs, rates fall as (1 + 10·progress)^−0.75 or stay constant")
    log_var_lr_scale: float = _optimiser(1.0, "learning rate of log-variances relative to norm layers", least=0)
    fast: tuple[str, ...] = _optimiser((), "name patterns of layers that learn faster (a new bottleneck)")
    fast_lr_scale: float = _optimiser(10.0, "learning rate of those layers relative to the others", least=0)
    momentum: float = _optimiser(0.9, "momentum of SGD", least=0, most=1)
    nesterov: bool = _optimiser(False, "use Nesterov momentum in SGD")
    weight_decay: float = _optimiser(1e-3, "weight decay over epochs; never applied to log-variances", least=0)
    climb: float = _optimiser(0.0, "radius of a sharpness-aware climb before each step of a stream; 0: none", least=0)

    def __post_init__(self) -> None:
        for name in ("layers", "exclude", "frozen", "train", "types", "fast", "answer_views", "step_views"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, Iterable):
                object.__setattr__(self, name, tuple(value))
        hints = get_type_hints(type(self))
        problems = [p for f in dataclasses.fields(self) if (p := _problem(f, hints[f.name], getattr(self, f.name)))]
        if isinstance(self.types, tuple):
            problems += [f"types={t!r} is not one of {', '.join(TYPES)}" for t in self.types if t not in TYPES]
        for name in ("answer_views", "step_views"):
            views = getattr(self, name)
            if isinstance(views, tuple) and views != ("auto",):
                known = ", ".join(VIEW_NAMES)
                problems += [f"{name}={v!r} is not one of {known}, or auto alone" for v in views if v not in VIEW_NAMES]
        if problems:
            # All at once, so that a user corrects them in one go.
            raise OptionError("; ".join(problems) + ". `help(undrift.Options)` lists every option.")

    def __repr__(self) -> str:
        """Return the options that differ from the defaults, as Python."""
        every = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Options({', '.join(f'{f.name}={value!r}' for f, value in every if value != f.default)})"

    def __str__(self) -> str:
        """Return every option, one line per group."""
        return "\n".join(
            f"{group:<9}  " + "  ".join(f"{f.name}={getattr(self, f.name)!r}" for f in members)
            for group, members in fields_by_group().items()
        )


def fields_by_group() -> "dict[str, list[dataclasses.Field[Any]]]":
    """Return the fields of `Options`, group by group."""
    every = dataclasses.fields(Options)
    return {group: [f for f in every if f.metadata["group"] == group] for group in GROUPS}


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
        raise OptionError(f"options is {a_type(chosen)}; give Options(...) or one of {', '.join(PRESETS)}.")
    return chosen.replace(**changes) if changes else chosen


def _suggest(name: str, known: Any) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1) or [other for other in names if other.endswith(f"_{name}")]
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


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
    if isinstance(value, float) and not math.isfinite(value):
        return f"{f.name}={value!r} is not finite"
    for bound, (wrong, words) in BOUNDS.items():
        if (limit := f.metadata[bound]) is not None and wrong(value, limit):
            return f"{f.name}={value!r} is {words} {limit}"
    return None


# Why the defaults are what they are, where the paper leaves a value open (measured in docs/explanation/defaults.md):
# - init_fraction 0.01 is a tenth of a kernel's standard deviation. Smaller noise has no effect: the released 1e-6
#   gives Tent's results at the same learning rate. Larger noise costs accuracy on streams.
# - first_energy "centred": raw images have a large mean. In Σx² it becomes independent noise at every position, which
#   no norm layer removes.
# - norm_statistics "train": the paper's text uses a moving average, its code does not. Steps that normalise by the
#   average ("moving") do not differentiate through the normalisation, and long streams diverge.
# - norm_momentum 0.1 is PyTorch's and averages many batches over epochs. stream_norm_momentum is 1 because any average
#   lags behind a change of domain.
# - answer "samples": the paper averages ten draws and answers each batch at once.
# - weight_decay skips log-variances: it would pull σ towards 1, about a thousand times a kernel's size.
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

if Options.__doc__:  # for help(undrift.Options); python -OO has none
    Options.__doc__ += "\n" + "\n".join(
        f"    {group.capitalize()} ({GROUPS[group]}):\n"
        + "".join(f"        {f.name} (default {f.default!r}): {f.metadata['help']}\n" for f in members)
        for group, members in fields_by_group().items()
    )
