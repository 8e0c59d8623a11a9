"""Methods that consist of a scheme and a likelihood only: the controls, Tent, SHOT, Bayes by backprop, VMP."""

from undrift.likelihood import Shot, entropy
from undrift.options import PAPER, RELEASED
from undrift.posterior.scheme import AFFINE, BAYES, DOMAIN, NOTHING, STATISTICS, WEIGHTS
from undrift.recipes.method import Method

_SHOT = {
    "frozen": ("@classifier",),
    "fast": ("@bottleneck",),
    "norm_statistics": "train",
    "adapt_lr": 1e-3,
    "weight_decay": 1e-3,
    "nesterov": True,
}
# The paper's offline setting: SGD 2e-3, bottleneck 2e-2, classifier frozen.
_OFFLINE = {"frozen": ("@classifier",), "fast": ("@bottleneck",)}
_PRESETS_OFFLINE = {
    "paper": {"preset": PAPER.replace(**_OFFLINE)},
    "released": {"preset": RELEASED.replace(**_OFFLINE, norm_statistics="train")},
}
_VMP = "Jing, Zhen, Li, Snoek 2022"


ROWS = (
    Method("source", "Source model", "–", ("stream", "adapt"), NOTHING, lambda: entropy, epochs=1),
    Method(
        "norm-stats",
        "Norm statistics (AdaBN, test-time BN)",
        "Li et al. 2017; Nado et al. 2020",
        ("stream", "adapt"),
        STATISTICS,
        lambda: entropy,
        epochs=1,
        variants={"domain": {"preset": DOMAIN}},
    ),
    Method(
        "tent",
        "Tent",
        "Wang et al. 2021",
        ("stream", "adapt"),
        AFFINE.replace(stream_lr=1e-3, adapt_optimiser="adam", adapt_lr=1e-3, adapt_schedule="constant"),
        lambda: entropy,
        epochs=1,
        batch_size=200,
        variants={
            "cifar100": {},
            "imagenet": {"stream_optimiser": "sgd", "stream_lr": 2.5e-4, "stream_batch": 64},
        },
    ),
    Method(
        "tent-ft",
        "Tent-FT (all weights)",
        "Wang et al. 2021; Jing et al. 2022",
        ("stream", "adapt"),
        WEIGHTS.replace(stream_lr=1e-5, adapt_optimiser="adam", adapt_lr=1e-5, adapt_schedule="constant"),
        lambda: entropy,
        epochs=1,
        batch_size=200,
    ),
    Method("shot", "SHOT", "Liang et al. 2020", ("adapt",), WEIGHTS.replace(**_SHOT), Shot),
    Method("shot-bn", "SHOT-BN", "Liang et al. 2020; Jing et al. 2022", ("adapt",), AFFINE.replace(**_SHOT), Shot),
    Method(
        "bbb",
        "Bayes by backprop",
        "Blundell et al. 2015",
        ("stream", "adapt"),
        BAYES.replace(stream_lr=1e-4),  # searched, as no paper gives one (benchmarks/rates.py); VMP's ruins a network
        lambda: entropy,
    ),
    # As in SHOT and VMP + SHOT the classifier is frozen, because pseudo-labels rest on it.
    Method(
        "bbb-shot",
        "Bayes by backprop + SHOT",
        "Blundell et al. 2015; Liang et al. 2020",
        ("adapt",),
        BAYES.replace(**_OFFLINE),
        Shot,
    ),
    Method(
        "vmp",
        "VMP",
        _VMP,
        ("stream", "adapt"),
        PAPER,
        lambda: entropy,
        variants={
            "paper": {"preset": PAPER},
            "released": {"preset": RELEASED, "stream_batch": 120},
            # The paper's rates: 5e-4 is CIFAR-10-C's.
            "cifar100": {"stream_lr": 7e-5},
            "imagenet": {"stream_optimiser": "sgd", "stream_lr": 1e-4, "stream_batch": 64},
        },
    ),
    Method("vmp-shot", "VMP + SHOT", _VMP, ("adapt",), PAPER.replace(**_OFFLINE), Shot, variants=_PRESETS_OFFLINE),
)
