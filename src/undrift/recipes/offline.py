"""Methods over epochs with neighbours or the network's own past: NRC, AaD, G-SFDA, HCL, VMP + NRC.

Schedules, batch sizes and weight decay are the authors'; only label-free parts are used. On VisDA the authors of NRC,
AaD and G-SFDA keep the checkpoint that is best on the target's labels; we keep the last. Their banks are filled on
random crops; give `clean` to fill them on others. G-SFDA's Office-Home code reshuffles before every step of its 32
epochs; we go through the whole domain in each.

If the bottleneck has another name: G-SFDA trains the module that `features="neck"` names, ten times as fast. For the
others `features` only says where to look; name new layers with `fast=("neck", "@classifier")`.
"""

from undrift.keep.masks import MaskedGradients
from undrift.likelihood.gsfda import Gsfda
from undrift.likelihood.historical import Hcl
from undrift.likelihood.neighbours import Aad, Nrc
from undrift.options import PAPER
from undrift.posterior.scheme import AFFINE, WEIGHTS
from undrift.recipes.method import Method
from undrift.recipes.plain import _OFFLINE, _PRESETS_OFFLINE, _VMP

# Everything is trained, the classifier included; new layers ten times as fast as the backbone.
_ALL = WEIGHTS.replace(
    norm_statistics="train",
    fast=("@bottleneck", "@classifier"),
    adapt_lr=1e-4,
    adapt_schedule="constant",
    nesterov=True,
    weight_decay=5e-4,
)
_FALLING = {"adapt_schedule": "shot", "weight_decay": 1e-3}
_SAME_ALL_ALONG = {"late_neighbours": None, "late_second_neighbours": None}
_MASKED = AFFINE.replace(
    train=("@bottleneck", "@classifier"),
    norm_statistics="train",
    fast=("@bottleneck", "@classifier"),
    adapt_lr=1e-3,
    nesterov=True,
    weight_decay=1e-3,
)

ROWS = (
    Method(
        "nrc",
        "NRC",
        "Yang et al. 2021 (NeurIPS)",
        ("adapt",),
        _ALL,
        Nrc,
        epochs=40,
        variants={
            "office-home": {},
            # Amazon → Webcam alone has neighbours=3, second_neighbours=2 (in undrift_bench).
            "office31": {
                "epochs": 50,
                "neighbours": 2,
                "second_neighbours": 3,
                **_SAME_ALL_ALONG,
                **_FALLING,
            },
            "visda": {"epochs": 15, "neighbours": 5, "second_neighbours": 5, **_SAME_ALL_ALONG, **_FALLING},
        },
    ),
    Method(
        "aad",
        "AaD",
        "Yang et al. 2022",
        ("adapt",),
        _ALL,
        Aad,
        epochs=40,
        variants={
            "office-home": {},
            "office31": {"epochs": 50, "late_neighbours": None, "alpha_decay": 1.0},
            "visda": {"epochs": 15, "neighbours": 5, "late_neighbours": None, "alpha_decay": 5.0, **_FALLING},
        },
    ),
    Method(
        "gsfda",
        "G-SFDA",
        "Yang et al. 2021 (ICCV)",
        ("adapt",),
        _MASKED,
        Gsfda,
        (MaskedGradients,),
        epochs=32,
        needs="two feature masks trained with the source",
        source_free=False,
        variants={
            "office-home": {},
            "visda": {"epochs": 15, "neighbours": 10, "adapt_lr": 1e-4, "train_masks": True},
        },
    ),
    # A segmentation method; its warm-up of 5,000 steps and its decay over 100,000 are left out.
    Method("hcl", "HCL (transferred to classification)", "Huang et al. 2021", ("adapt",), _ALL, Hcl),
    Method(
        "vmp-nrc",
        "VMP + NRC",
        _VMP,
        ("adapt",),
        PAPER.replace(**_OFFLINE),
        Nrc,
        epochs=40,
        variants=_PRESETS_OFFLINE,
    ),
)
