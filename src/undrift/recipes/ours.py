"""undrift's own methods: a posterior whose mean moves, and a teacher that averages it and looks from several sides.

Values were chosen on development corruptions (speckle noise, Gaussian blur, saturate; severity 5) with WRN-40-2 on
CIFAR-10, ResNeXt-29 on CIFAR-100 and ResNet-50 on ImageNet: benchmarks/NOTES.md, "The undrift recipe".
"""

from functools import partial

from undrift.likelihood import Teacher
from undrift.options import PAPER
from undrift.recipes.method import Method

# σ is a fixed fraction of Var(kernel): a rate of 0 keeps it where it starts. The KL holds the mean to the source's
# weights, tempered; answers are those from before the step.
_POSTERIOR = PAPER.replace(
    kl_weight=0.01,
    log_var_lr_scale=0.0,
    answer="before",
    stream_lr=1e-3,
    stream_lr_images=200,
)

ROWS = (
    Method(
        "undrift",
        "undrift",
        "undrift 2026",
        ("stream",),
        _POSTERIOR.replace(train="*", init_fraction=0.04, weights_lr=0.03),
        Teacher,
    ),
    Method(
        "undrift-light",
        "undrift, norm layers only",
        "undrift 2026",
        ("stream",),
        _POSTERIOR.replace(init_fraction=0.1),
        partial(Teacher, memory=20_000, other=False, share=0.0),
    ),
)
