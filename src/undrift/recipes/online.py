"""Methods that adapt batch by batch: EATA, SAR, CoTTA, ROID, and VMP with ROID's likelihood.

Values are the authors' for ImageNet. For CIFAR, if they give none, they are those of the common benchmark.
"""

from collections.abc import Sequence
from functools import partial

from undrift.keep import Ensemble, Fisher, Recovery, Restore, Still
from undrift.likelihood import Cotta, ReliableEntropy, Roid
from undrift.options import PAPER, RELEASED
from undrift.posterior.scheme import AFFINE, WEIGHTS
from undrift.recipes.method import Method

_SGD: dict[str, object] = {"stream_optimiser": "sgd", "stream_lr": 2.5e-4, "stream_batch": 64}
_ETA: dict[str, dict[str, object]] = {"cifar100": {"redundancy": 0.1}, "imagenet": {**_SGD, "redundancy": 0.05}}
_ADAM = AFFINE.replace(stream_lr=1e-3)
_NOT_DRAWN = {"norm_statistics": "batch", "stream_lr": 1e-3, "train_samples": 0, "answer": "before"}


# By name: a ResNet's last stage, and a ViT-Base's last three blocks and its last norm layer (called "norm"). Networks
# without such names train all their norm layers.
_LAST = ("*layer4*", "*blocks.9", "*blocks.10", "*blocks.11", "norm")


def _sar_still(still: str | Sequence[str] = _LAST) -> Still:
    return Still(still)


ROWS = (
    Method("eta", "ETA", "Niu et al. 2022", ("stream",), _ADAM, ReliableEntropy, variants=_ETA),
    Method(
        "eata",
        "EATA",
        "Niu et al. 2022",
        ("stream",),
        _ADAM,
        ReliableEntropy,
        (Fisher,),
        needs="source samples for its Fisher term",
        source_free=False,
        variants={**_ETA, "imagenet": {**_ETA["imagenet"], "beta": 2000.0, "fisher_batch": 64}},
    ),
    Method(
        "sar",
        "SAR",
        "Niu et al. 2023",
        ("stream",),
        AFFINE.replace(climb=0.05, stream_optimiser="sgd", stream_lr=1e-3),
        partial(ReliableEntropy, redundancy=None, weighted=False),
        (_sar_still, Recovery),
        variants={"imagenet": _SGD},
    ),
    Method(
        "cotta",
        "CoTTA",
        "Wang et al. 2022",
        ("stream",),
        WEIGHTS.replace(stream_lr=1e-3),
        Cotta,
        (Restore,),
        variants={
            "cifar100": {"threshold": 0.72},
            "imagenet": {
                **_SGD,
                "stream_lr": 0.01,
                "nesterov": True,
                "threshold": 0.1,
                "restore": 0.001,
                "symmetric": True,
            },
        },
    ),
    Method(
        "roid",
        "ROID",
        "Marsden et al. 2024",
        ("stream",),
        _ADAM,
        Roid,
        (Ensemble,),
        variants={"imagenet": {**_SGD, "nesterov": True}},
    ),
    Method(
        "vmp-roid",
        "VMP + ROID",
        "Jing et al. 2022; Marsden et al. 2024",
        ("stream",),
        PAPER.replace(**_NOT_DRAWN),
        partial(Roid, noisy=True),
        (Ensemble,),
        variants={
            "paper": {"preset": PAPER.replace(**_NOT_DRAWN)},
            "released": {"preset": RELEASED.replace(**_NOT_DRAWN)},
            "imagenet": {**_SGD, "nesterov": True},
        },
    ),
)
