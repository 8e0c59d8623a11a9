"""undrift's own methods: a posterior with a trained mean, and likelihoods without labels to train it.

In a stream a teacher averages the network's past and predicts over several views of every image. Over epochs, norm
statistics of the domain are collected first; then each image learns to agree with its nearest neighbours, with a frozen
classifier.

Values of streams were chosen on development corruptions (speckle noise, Gaussian blur, saturate; severity 5) with
WRN-40-2 on CIFAR-10, ResNeXt-29 on CIFAR-100 and ResNet-50 on ImageNet; those over epochs on one development task,
PACS's cartoon → art painting, and those of small networks on digits and CIFAR-10: benchmarks/NOTES.md, "The undrift
recipe", and benchmarks/small_networks.py.
"""

from functools import partial

from undrift.likelihood import Nrc, Teacher, entropy
from undrift.options import PAPER
from undrift.recipes.method import Method
from undrift.recipes.plain import _SHOT

# σ is a fixed fraction of Var(kernel): a rate of 0 keeps it where it starts. The KL holds the mean to the source's
# weights, tempered; a stream's answers are those from before the step.
_POSTERIOR = PAPER.replace(
    kl_weight=0.01,
    log_var_lr_scale=0.0,
    answer="before",
    stream_lr=1e-3,
    stream_lr_images=200,
)
_PRIOR_IMAGES = 16  # benchmarks/unattended.py says how it was chosen
# SHOT's optimiser and schedule, and its classifier, which stays; no noise in front of the first layer. The KL has its
# full weight; under SGD its gradient diverges, so its part about the mean is solved in closed form.
_OVER_EPOCHS: dict[str, object] = {
    **_SHOT,
    "likelihood": partial(Nrc, statistics_first=True),
    "kl_weight": 1.0,
    "kl_mean": "closed",
    "skip_first": 1,
    "weights_lr": None,
    "init_fraction": 0.04,
    "answer": "samples",
    "answer_views": "auto",
    "step_views": "auto",
    "keep": "safe",
    # SHOT's rate for networks that were trained from scratch; 1e-3 is for those that began with ImageNet's weights. A
    # small network may be too weak to learn from itself: benchmarks/small_networks.py chose the agreement.
    "small": {"adapt_lr": 1e-2, "likelihood": partial(Nrc, statistics_first=True, least_agreement=0.75)},
}

# Where each pixel or label has an answer: neighbours are whole images, so steps lower the entropy of the answers. Maps
# are large, so a step is on 16 images. benchmarks/NOTES.md, "Dense predictions", compares this with a teacher.
_OVER_EPOCHS["positions"] = {
    "likelihood": lambda: entropy,
    "frozen": (),
    "fast": (),
    "adapt_lr": 1e-3,
    "norm_momentum": 0.3,  # few maps tell the statistics of a domain, and few steps have to bring them to predictions
    "epochs": 5,
    "batch_size": 16,
    "note": "The network answers each pixel or label: steps lowered the entropy of its answers, as the neighbours that "
    "undrift compares otherwise are whole images.",
}

# Batch norm divides out what noise adds to a layer's inputs, and what a step moves too far. Networks without it have
# no noise in a stream, and smaller steps. Chosen on digits by benchmarks/small_streams.py.
_UNNORMED: dict[str, object] = {"init_fraction": 0.0, "weights_lr": 0.01}

ROWS = (
    Method(
        "undrift",
        "undrift",
        "undrift 2026",
        ("stream", "adapt"),
        _POSTERIOR.replace(train="*", init_fraction=0.1, weights_lr=0.03),
        partial(Teacher, replay=1000, prior_images=_PRIOR_IMAGES),
        by_loop={"adapt": _OVER_EPOCHS, "stream": {"unnormed": _UNNORMED}},
    ),
    Method(
        "undrift-light",
        "undrift, norm layers only",
        "undrift 2026",
        ("stream", "adapt"),
        _POSTERIOR.replace(init_fraction=0.1),
        partial(
            Teacher,
            memory=4000,
            most_views=1,
            other=False,
            share=0.0,
            certainty=0.3,
            prior_images=_PRIOR_IMAGES,
        ),
        by_loop={"adapt": _OVER_EPOCHS},
    ),
)
