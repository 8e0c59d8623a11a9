"""Source networks by name, with the parameter names of the checkpoints that people have.

`build` makes one, `load` fills it from a checkpoint, `transfer` starts a new domain from ImageNet's weights, and
`preprocess` says what its images must look like.

    >>> from undrift_bench import zoo
    >>> ", ".join(zoo.names())
    'digits, resnet26_gn, resnet50, resnet50_v1, resnext29, shot_resnet50, shot_resnet50_v1, wrn28_10, wrn40_2'
    >>> network = zoo.build("wrn40_2", classes=10)
"""

from undrift.likelihood.masks import Masks, masks_of
from undrift_bench.zoo.digits_net import digits
from undrift_bench.zoo.gsfda import compensate, mask_scale, masked, masked_loss
from undrift_bench.zoo.registry import build, load, names, preprocess, transfer
from undrift_bench.zoo.resnet import resnet50
from undrift_bench.zoo.resnext import resnext29
from undrift_bench.zoo.shot import shot_resnet50
from undrift_bench.zoo.ttt import resnet26_gn
from undrift_bench.zoo.wideresnet import wrn28_10, wrn40_2

__all__ = [
    "Masks",
    "build",
    "compensate",
    "digits",
    "load",
    "mask_scale",
    "masked",
    "masked_loss",
    "masks_of",
    "names",
    "preprocess",
    "resnet26_gn",
    "resnet50",
    "resnext29",
    "shot_resnet50",
    "transfer",
    "wrn28_10",
    "wrn40_2",
]
