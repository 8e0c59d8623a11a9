"""The options of source training, and three recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from undrift._errors import OptionError
from undrift.options import Changeable, _option, _problem, _suggest

Schedule = Literal["one_cycle", "cosine", "inverse", "steps", "constant"]
Precision = Literal["auto", "float32", "bfloat16"]
Compiled = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class TrainOptions(Changeable):
    """Which network, how long, how fast, on what views of the images, and what is kept.

    Examples:
        >>> train_preset("shot").schedule
        'inverse'
        >>> train_preset("cifar").replace(network="wrn40_2", seed=1).network
        'wrn40_2'
    """

    network: str = _option("wrn28_10", "the zoo's name of the network")
    epochs: int = _option(36, "passes over the training images", least=1)
    batch_size: int = _option(256, "images per step; a last batch that is not full waits for the next epoch", least=1)
    seed: int = _option(0, "of the split, the fresh weights, the order and the augmentation", least=0, most=2**63 - 1)

    # What is held out, and what is kept.
    held_out: float = _option(0.05, "share kept for validation: SHOT's 0.1, generalized 0.2; 0 keeps the last", least=0)
    evaluate_every: int = _option(4, "epochs between validations; the last epoch always has one", least=1)

    # How fast: SGD with Nesterov momentum.
    lr: float = _option(0.2, "highest learning rate", above=0)
    schedule: Schedule = _option(
        "one_cycle", "rise and cosine fall, cosine fall, SHOT's (1 + 10p)^-0.75, TTT's steps, or none"
    )
    warmup: float = _option(0.25, "share of the steps in which 'one_cycle' rises", above=0)
    momentum: float = _option(0.9, "Nesterov momentum", above=0)
    weight_decay: float = _option(5e-4, "weight decay, on every parameter", least=0)
    slow: tuple[str, ...] = _option((), "name patterns of layers that learn slower (a trained backbone)")
    slow_lr_scale: float = _option(0.1, "learning rate of those layers over the others'", least=0)
    label_smoothing: float = _option(0.0, "share of the label spread over all classes", least=0)

    # Augmentation: a random window of the padded frame, perhaps mirrored.
    pad: int = _option(4, "black pixels added on each side before the random crop", least=0)
    flip: bool = _option(True, "mirror half of the images")

    # How it is computed.
    precision: Precision = _option("auto", "of the forward pass; auto: bfloat16 on a GPU that has it, else float32")
    compiled: Compiled = _option("auto", "torch.compile the training pass; auto: on a GPU")
    checkpoint_seconds: float = _option(30.0, "least time between two checkpoints; 0 writes one per epoch", least=0)

    def __post_init__(self) -> None:
        slow: Any = self.slow
        object.__setattr__(self, "slow", (slow,) if isinstance(slow, str) else tuple(slow))
        hints = get_type_hints(type(self))
        numbers = [f for f in dataclasses.fields(self) if hints[f.name] is not str]
        problems = [p for f in numbers if (p := _problem(f, hints[f.name], getattr(self, f.name)))]
        name: Any = self.network
        if not isinstance(name, str):
            problems.append(f"network={name!r} is not a name; pass your own module as network= of the call")
        for share in ("held_out", "label_smoothing", "momentum", "warmup"):
            value = getattr(self, share)
            if isinstance(value, int | float) and value >= 1:
                problems.append(f"{share}={value!r} is not below 1")
        if problems:
            raise OptionError("; ".join(problems) + ". `help(undrift_bench.train.TrainOptions)` lists every option.")


def train_preset(name: str) -> TrainOptions:
    """Return the recipe of that name: "cifar", "digits" or "shot"."""
    if name not in PRESETS:
        raise OptionError(f"there is no preset {name!r}{_suggest(name, PRESETS)}. Presets: {', '.join(PRESETS)}.")
    return PRESETS[name]


def resolve(options: TrainOptions | str) -> TrainOptions:
    """Return what a call means by `options`: a preset's name, or the options themselves."""
    chosen = train_preset(options) if isinstance(options, str) else options
    if not isinstance(chosen, TrainOptions):
        raise OptionError(
            f"options is a {type(chosen).__name__}; needed: TrainOptions or a preset ({', '.join(PRESETS)}). "
            "Start from one: train_preset('cifar').replace(epochs=10)."
        )
    return chosen


# cifar: no label smoothing, as the published CIFAR-10-C source models have none and it moves NLL, ECE and entropies,
# which adaptation is measured by. Large steps at a high rate: one cycle needs a fifth of the usual 200 epochs.
CIFAR = TrainOptions()

# shot: SHOT's source training. Its 100 epochs on Office (50 on Office-Home) are `epochs=100`; PACS photo needs no more
# than 20. Compiling takes longer than so short a run.
SHOT = TrainOptions(
    network="shot_resnet50",
    epochs=20,
    batch_size=64,
    held_out=0.1,
    evaluate_every=1,
    lr=1e-2,
    schedule="inverse",
    weight_decay=1e-3,
    slow=("backbone",),
    label_smoothing=0.1,
    pad=0,
    compiled="off",
)

# digits: a quarter of a minute on one core. A mirrored digit is no digit.
DIGITS = TrainOptions(
    network="digits",
    epochs=12,
    batch_size=32,
    held_out=0.1,
    evaluate_every=1,
    lr=0.1,
    pad=2,
    flip=False,
)

PRESETS: Mapping[str, TrainOptions] = {"cifar": CIFAR, "digits": DIGITS, "shot": SHOT}
