"""The rows of the online tables, and the values of each method on each data set.

Authors' values are the methods' own. Where authors give others for a data set, `undrift.methods` has a variant of that
name ("eata:cifar100"), which is taken where it exists.
"""

from collections.abc import Callable
from typing import Any

from undrift._errors import OptionError
from undrift_bench.bench.harness.cell import NO_NOISE, NO_VARIANCE, MethodRow

# The paper's rates of VMP, which are also those of the matched control.
VMP_RATES: dict[str, dict[str, Any]] = {
    "cifar10": {"stream_optimiser": "adam", "stream_lr": 5e-4},
    "cifar100": {"stream_optimiser": "adam", "stream_lr": 7e-5},
    "imagenet": {"stream_optimiser": "sgd", "stream_lr": 1e-4},
}

ROIDS = (
    "its labels are its authors'; its NLL and ECE are of logits × prior, the prior divided by its own mean "
    '(`correct_prior="scaled"`). The logits that its authors return are smaller by the number of classes, and say '
    "little of how sure it is."
)

RANKS = (8, 16, 32, 64)

# What `undrift` was before its trials (benchmarks/recipe_trials.py): less noise, and no image is looked at again.
SPARE: dict[str, Any] = {"init_fraction": 0.04, "replay": 0}

OVER_VIEWS = {"answer_views": ("auto",)}  # the label-free rule by which undrift takes its own

# What readers have to know of a row's values; see docs/explanation/how-numbers-are-made.md.
NOTES = {
    "tent-ft": "its rate of 1e-5 was taken from a prototype's numbers on CIFAR-10-C itself (1e-4 had 85 % error); the "
    "search on development images takes the same (benchmarks/rates.py).",
    "bbb": "no author gives a rate for adaptation; its 1e-4 is what the search on development images takes "
    "(benchmarks/rates.py). At VMP's 5e-4 it had 66.5 % error on CIFAR-10-C (WRN-40-2).",
    "roid": ROIDS,
    "cotta-8-views": "its authors average 32 views, which long streams leave no time for.",
    "vmp-roid": ROIDS,
    "ttt": "its authors start every corruption from the source; here, as every row, it is never reset between them. It "
    "runs with a head and the network that was trained together with it, not the other rows' source network, and with "
    "nothing else: `--weights NETWORK=FILE --set head=FILE`. (With --tiny an untrained head stands for it.)",
    "bacs": "its authors average several networks; this is one. It runs with a posterior that was collected at source "
    "training, and with nothing else: `--set posterior=FILE` (with --tiny two jittered copies stand for it). No author "
    "gives a rate for its entropy; at PETAL's 1e-3, "
    "which goes with another loss, it had 90 % error on CIFAR-10-C. Its 1e-4 is what the search on development images "
    "takes by its rule (benchmarks/rates.py); it cannot tell 1e-5 from it.",
}


def online_rows(data: str, get: Callable[[str], Any] | None = None) -> list[MethodRow]:
    """Return the rows for a data set ("cifar10", "cifar100", "imagenet"), in the table's order.

    Args:
        get: finds a method by name; raises `OptionError` where there is none. Default: `undrift.methods.get`.
    """
    rate = VMP_RATES[data]

    def own(name: str, cost: float = 1.0, **how: Any) -> MethodRow:
        return MethodRow(name, variant(name, data, get), cost=cost, note=NOTES.get(name, ""), **how)

    def control(name: str, title: str, method: str, why: str, cost: float, **changes: Any) -> MethodRow:
        return MethodRow(name, method, rate | changes, control=True, cost=cost, why=why, title=title)

    def twin(name: str, cost: float, **changes: Any) -> MethodRow:
        why = "is it the noise? The same prior, rates, teacher and views, and no variance."
        how: dict[str, Any] = {"control": True, "cost": cost, "why": why, "title": f"{name}, σ = 0"}
        return MethodRow(f"{name}-sigma-0", variant(name, data, get), changes, **how)

    def over_views(name: str, cost: float) -> MethodRow:
        why = "what do views add to a rival's answers? Those that pass undrift's test without labels."
        how: dict[str, Any] = {"control": True, "cost": cost, "why": why, "title": f"{name}, answers over views"}
        return MethodRow(f"{name}-views", variant(name, data, get), OVER_VIEWS, **how)

    def doubled(name: str, why: str, cost: float) -> MethodRow:
        title, twice = f"{name}, consistency 2", {"consistency": 2.0}
        how: dict[str, Any] = {"control": True, "cost": cost, "why": why, "title": title}
        return MethodRow(f"{name}-consistency-2", variant(name, data, get), twice, **how)

    return [
        own("source", 0.4),
        own("norm-stats", 0.4),
        own("tent"),
        own("eata"),
        own("roid", 3.0),
        own("undrift", 8.0),
        own("undrift-light", 3.0),
        twin("undrift", 8.0, **NO_VARIANCE),
        twin("undrift-light", 3.0, **NO_NOISE),
        over_views("norm-stats", 1.0),
        over_views("tent", 2.0),
        over_views("roid", 4.0),
        MethodRow("vmp:paper", "vmp:paper", rate, cost=5.0),
        MethodRow("vmp:released", "vmp:released", rate, cost=3.0),
        own("vmp-roid", 4.0),
        control("tent-matched-lr", "tent, VMP's rate", "tent", "is it only the learning rate?", 1.0),
        control("vmp-sigma-0", "vmp, σ = 0", "vmp:paper", "is it the noise?", 5.0, **NO_NOISE),
        control(
            "vmp-inner", "vmp, first layer without noise", "vmp:paper", "is it the first layer's?", 5.0, skip_first=1
        ),
        control("vmp-sigma-0.04", "vmp, σ² = 0.04 Var", "vmp:paper", "would more noise help?", 5.0, init_fraction=0.04),
        control("vmp-sigma-0.1", "vmp, σ² = 0.1 Var", "vmp:paper", "would much more help?", 5.0, init_fraction=0.1),
        doubled("roid", "what does twice the consistency do without noise?", 3.0),
        doubled("vmp-roid", "and with noise? (A prototype's value, from CIFAR-10-C itself; not by the rule.)", 4.0),
        own("eta", tier="B"),
        own("sar", 2.5, tier="B"),
        own("tent-ft", 1.5, tier="B"),
        own("cotta", 20.0, tier="B"),
        MethodRow(
            "cotta-8-views",
            variant("cotta", data, get),
            {"views": 8},
            "B",
            control=True,
            cost=6.0,
            why="what does CoTTA do with a quarter of its views?",
            title="cotta, 8 views",
            note=NOTES["cotta-8-views"],
        ),
        own("bacs", 3.0, tier="B", title="bacs, one member"),
        own("ttt", 30.0, tier="B"),
        own("bbb", 6.0, tier="B"),
    ]


def ablation_rows(data: str) -> list[MethodRow]:
    """Return the rows of `--only ablation`: the spare `undrift`, and the same with one change each."""

    def row(name: str, title: str, why: str, cost: float, **change: Any) -> MethodRow:
        how: dict[str, Any] = {"control": True, "cost": cost, "why": why, "title": title, "group": "ablation"}
        return MethodRow(f"undrift-{name}", variant("undrift", data), SPARE | change, **how)

    spare = "undrift, σ² = 0.04 Var, no replay"
    return [
        row("spare", spare, "what are more noise and replay worth?", 8.0),
        row("spare-sigma-0", "undrift, σ = 0, no replay", "is it the noise?", 8.0, **NO_VARIANCE),
        row("no-teacher", "… without teacher", "the target is the network's own last state", 8.0, memory=1),
        row("no-views", "… without views", "no view is taken for safe", 4.0, views=()),
        row("one-draw", "… one draw per step", "no second draw, of another view", 6.0, other=False),
        row("replay", "… with replay", "images that were sure are looked at again", 8.0, replay=1000),
        row("no-kl", "… without KL", "nothing holds the mean to the source's weights", 8.0, kl_weight=0.0),
        row("whole-kl", "… KL with its full weight", "the bound as it stands", 8.0, kl_weight=1.0),
        row("frozen", "… frozen mean", "noise and norm layers alone, as in the paper", 6.0, mean_rank=0),
        *(row(f"rank-{r}", f"… mean of rank {r}", "from the kernel's directions", 8.0, mean_rank=r) for r in RANKS),
    ]


def variant(name: str, data: str, get: Callable[[str], Any] | None = None) -> str:
    """Return the method's name for a data set: its variant where there is one, else the plain name."""
    if get is None:
        from undrift import methods

        get = methods.get
    try:
        get(f"{name}:{data}")
    except OptionError:
        return name
    return f"{name}:{data}"
