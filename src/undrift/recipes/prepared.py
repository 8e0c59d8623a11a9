"""Methods that need something from source training: a posterior over weights, or a second head."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Step
from undrift.keep.posterior import Posterior
from undrift.likelihood.entropy import entropy
from undrift.likelihood.rotation import Rotation
from undrift.posterior.scheme import WEIGHTS
from undrift.recipes.method import Method


@dataclass(frozen=True)
class Tempered:
    """Entropy times α, the weight of the test images against the source's posterior."""

    recordable: ClassVar[bool] = True

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise OptionError(f"alpha={self.alpha!r} is not a number above 0. 1 weighs entropy as Tent does.")

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return α times the mean entropy."""
        return self.alpha * entropy(logits, step)


ROWS = (
    # There is no official code, so the posterior's values are those of PETAL, the closest method. One network is one
    # member; `undrift.together` averages several. The rate is not PETAL's 1e-3, which belongs to CoTTA's loss: with
    # entropy on all weights it ruins the network (50 % error on development corruptions). 1e-4 (19.9 %) was chosen by
    # the rule of benchmarks/rates.py on streams, and is used for epochs too.
    Method(
        "bacs",
        "BACS",
        "Zhou & Levine 2021; Brahma & Rai 2023",
        ("stream", "adapt"),
        WEIGHTS.replace(stream_lr=1e-4, adapt_optimiser="adam", adapt_lr=1e-4, adapt_schedule="constant"),
        Tempered,
        (Posterior,),
        epochs=1,
        batch_size=200,
        needs="a posterior from several source iterates",
        source_free=False,
        ensemble=True,
    ),
    # Only the shared part and the head get gradients; all other weights stay.
    Method(
        "ttt",
        "TTT",
        "Sun et al. 2020",
        ("stream",),
        WEIGHTS.replace(
            norm_statistics="source",
            stream_optimiser="sgd",
            stream_lr=1e-3,
            momentum=0.0,
            stream_split=1,
            answer="after",
        ),
        Rotation,
        needs="a rotation head trained with the source model",
        source_free=False,
        variants={"online": {}, "standard": {"stream_steps": 10, "episodic": True}},
    ),
)
