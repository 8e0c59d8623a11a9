"""Train source models from labelled images.

`train_source` trains a network of the zoo (or the user's own) on one domain and writes one safetensors file with its
architecture, class names and preprocessing. After a kill the same call continues from the last checkpoint.

    >>> from undrift_bench import data
    >>> from undrift_bench.train import load_source, train_preset, train_source
    >>> digits = data.digits("mnist")                                                       # doctest: +SKIP
    >>> train_source(digits, "mnist.safetensors", "digits").accuracy                        # doctest: +SKIP
    0.978
    >>> generalized = train_preset("shot").replace(held_out=0.2)
    >>> photo = data.pacs("pacs", "photo")                                                  # doctest: +SKIP
    >>> train_source(photo, "photo.safetensors", generalized, trunk="resnet50_imagenet.safetensors")  # doctest: +SKIP
    >>> network, header = load_source("photo.safetensors")                                  # doctest: +SKIP
    >>> header.class_names, header.preprocess                                               # doctest: +SKIP

Read `run.py` first, then `epoch.py`.
"""

from undrift_bench.train.epoch import Epoch
from undrift_bench.train.options import TrainOptions, train_preset
from undrift_bench.train.rotation import train_rotation
from undrift_bench.train.run import TrainedSource, train_source
from undrift_bench.train.source_file import SourceHeader, load_source, read_header
from undrift_bench.train.swag import collect_moments

__all__ = [
    "Epoch",
    "SourceHeader",
    "TrainOptions",
    "TrainedSource",
    "collect_moments",
    "load_source",
    "read_header",
    "train_preset",
    "train_rotation",
    "train_source",
]
