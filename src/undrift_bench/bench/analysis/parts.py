"""The parts of the analyses, one per figure of the paper: what is varied, on what, with which values.

| part | what | on |
|---|---|---|
| sigma | σ per layer against A-distance per layer | PACS, sketch to the three others |
| prior | scale of the prior, adaptive against isotropic | PACS, CIFAR-10-C |
| sharing | one σ a kernel against one a weight | PACS, CIFAR-10-C |
| layers | a part of the network left without noise | PACS, CIFAR-10-C |
| schemes | what may change | PACS, CIFAR-100-C |
| samples | draws in training, and in test | PACS, CIFAR-10-C |
| beta | weight of the pseudo-labels | PACS, cartoon to art |
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from undrift_bench.bench.harness.cell import NO_NOISE, MethodRow
from undrift_bench.bench.online.rows import VMP_RATES, variant

Where = Literal["pacs", "cifar10-c", "cifar100-c"]
PLACES: tuple[Where, ...] = ("pacs", "cifar10-c", "cifar100-c")

# Of the six main tasks the one where noise changes most, and the smallest.
TASK = "sketch-photo"
# There two classes' pseudo-labels tip, all or none of them (benchmarks/look_why.py), and a curve over their weight
# would show when. So it runs on a task that was chosen before any of its rows was known.
STEADY = "cartoon-art_painting"

SCALES = (0.001, 0.01, 0.1, 1.0)
BETAS = (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
DRAWS_IN_TEST = (0, 1, 2, 5, 10, 20, 50)

# What can be left out of each network: from the first layer to the last.
STAGES: dict[Where, tuple[str, ...]] = {
    "pacs": (*("backbone.conv1", *(f"backbone.layer{n}" for n in (1, 2, 3, 4))), "bottleneck"),
    "cifar10-c": ("conv1", "block1", "block2", "block3", "fc"),
}
TINY_STAGES: dict[Where, tuple[str, ...]] = {
    "pacs": ("backbone.conv1", "backbone.layer1", "bottleneck"),
    "cifar10-c": ("0", "1", "4"),
}


@dataclass(frozen=True)
class Trial:
    """One cell of an analysis.

    Attributes:
        where: the data it runs on.
        curve: the line of the figure it is a point of; "" in a dot chart.
        value: where on that line; the dot's name in a dot chart.
        row: the method and what is changed of it.
        task: of PACS, whatever was asked for.
        usual: the task where none was asked for.
        look: whether σ, A-distances and the number of draws in test are looked into as well.
    """

    where: Where
    curve: str
    value: str
    row: MethodRow
    task: str = ""
    usual: str = TASK
    look: bool = False


@dataclass(frozen=True)
class AnalysisPart:
    """One analysis.

    Attributes:
        kind: lines over values, a dot a trial, or σ's own figure.
        title: what it asks.
        axis: what the values of lines are.
    """

    name: str
    kind: Literal["lines", "dots", "sigma"]
    title: str
    trials: tuple[Trial, ...]
    note: str = ""
    axis: str = ""


def parts(tiny: bool = False) -> dict[str, AnalysisPart]:
    """Return all analyses by name, in the order of the page; `tiny` leaves out what a tiny network does not have."""
    found = (_sigma(tiny), _prior(), _sharing(), _layers(tiny), _schemes(), _samples(), _beta(tiny))
    return {part.name: part for part in found}


def slug(text: str) -> str:
    """Return words as a row's name: plain letters, for files and the command line.

    Examples:
        >>> slug("one σ a kernel"), slug("adaptive, σ starts there 0.01")
        ('one-a-kernel', 'adaptive-starts-there-0.01')
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _vmp(where: Where, curve: str, value: Any, cost: float = 2.5, **changes: Any) -> Trial:
    """Return VMP with something changed: over epochs on PACS, in a stream elsewhere."""
    name = slug(f"{curve} {value}")
    if where == "pacs":
        return Trial(where, curve, str(value), MethodRow(name, "vmp-shot:paper", changes, "B", cost=cost))
    rates = VMP_RATES["cifar10" if where == "cifar10-c" else "cifar100"]
    return Trial(where, curve, str(value), MethodRow(name, "vmp:paper", rates | changes, "B", cost=cost))


def _sigma(tiny: bool) -> AnalysisPart:
    row = MethodRow("looked-into", "vmp-shot:paper", {}, "B", cost=4.0)
    targets = ("photo",) if tiny else ("photo", "art_painting", "cartoon")
    trials = tuple(Trial("pacs", "", f"sketch-{name}", row, f"sketch-{name}", look=True) for name in targets)
    note = (
        "Σσ is the paper's measure; it grows with the number of kernels, so the grey curve, before the first step, has "
        "its shape already. σ over the standard deviation of its kernel starts as a flat line: what is learned is the "
        "distance from it. A-distances are of the source network, between source and target images."
    )
    return AnalysisPart("sigma", "sigma", "Does σ grow where the domains differ?", trials, note)


def _prior() -> AnalysisPart:
    trials = []
    places: tuple[Where, ...] = ("pacs", "cifar10-c")
    for where in places:
        for prior in ("adaptive", "isotropic"):
            trials += [
                _vmp(where, f"{prior}, σ starts there", scale, prior=prior, prior_scale=scale, init="prior")
                for scale in SCALES
            ]
    for prior in ("adaptive", "isotropic"):
        trials += [_vmp("cifar10-c", prior, scale, prior=prior, prior_scale=scale) for scale in SCALES]
    note = (
        "Where σ² starts at a hundredth of the kernel's variance (curves without “starts there”), the prior acts "
        "through the KL alone. Where it starts at the prior, λ is also the size of the noise."
    )
    return AnalysisPart(
        "prior", "lines", "How much does the prior's scale matter?", tuple(trials), note, "λ of the prior"
    )


def _sharing() -> AnalysisPart:
    places: tuple[Where, ...] = ("pacs", "cifar10-c")
    trials = []
    for where in places:
        trials.append(_vmp(where, "", "one σ a kernel"))
        trials.append(_vmp(where, "", "one σ a weight", 5.0, conv_sharing="weight"))
    note = (
        "Linear layers have one σ a weight in both, as in the paper, which counts 0.6 million instead of 24.03 "
        "(ResNet-50) and 30 thousand instead of 36.47 million (WRN-28-10)."
    )
    return AnalysisPart("sharing", "dots", "What does sharing σ within a kernel cost?", tuple(trials), note)


def _layers(tiny: bool) -> AnalysisPart:
    trials = []
    for where, stages in (TINY_STAGES if tiny else STAGES).items():
        trials.append(_vmp(where, "", "all layers"))
        trials += [_vmp(where, "", f"without {stage}", exclude=(stage,)) for stage in stages]
        trials.append(_vmp(where, "", "the first layer alone", first=1))
        trials.append(_vmp(where, "", "the last layer alone", last=1))
        trials.append(_vmp(where, "", "no layer (σ = 0)", 1.0, **NO_NOISE))
    note = "Norm layers adapt everywhere in all of them: only the noise is left out."
    return AnalysisPart("layers", "dots", "Which layers need the noise?", tuple(trials), note)


def _schemes() -> AnalysisPart:
    offline = {
        "nothing": ("source", 0.1),
        "norm statistics": ("norm-stats:domain", 0.1),
        "norm statistics and affine": ("shot-bn", 1.0),
        "all weights": ("shot", 1.0),
        "perturbation (VMP)": ("vmp-shot:paper", 2.5),
    }
    online = {
        "nothing": ("source", 0.1),
        "norm statistics": ("norm-stats", 0.1),
        "norm statistics and affine": ("tent", 1.0),
        "all weights": ("tent-ft", 1.5),
    }
    trials = [
        Trial("pacs", "", name, MethodRow(slug(name), m, {}, "B", cost=cost)) for name, (m, cost) in offline.items()
    ]
    for name, (method, cost) in online.items():
        trials.append(
            Trial("cifar100-c", "", name, MethodRow(slug(name), variant(method, "cifar100"), {}, "B", cost=cost))
        )
    trials.append(_vmp("cifar100-c", "", "perturbation (VMP)"))
    # A control: VMP has other learning rates than the rest, too.
    trials += [_vmp(where, "", "norm affine, VMP's rates", 1.0, **NO_NOISE) for where in ("pacs", "cifar100-c")]
    note = "On PACS all ask what SHOT asks, on CIFAR-100-C what Tent asks; each at the rates of its own method."
    return AnalysisPart("schemes", "dots", "What should change: norm layers, weights, or noise?", tuple(trials), note)


def _samples() -> AnalysisPart:
    trials = [_vmp("pacs", "in training", draws, 2.5 * draws, train_samples=draws) for draws in (1, 2, 5)]
    trials += [_vmp("cifar10-c", "in training", draws, 2.5 * draws, train_samples=draws) for draws in (1, 2, 5, 10)]
    trials += [_vmp("cifar10-c", "in test", draws, 2 + 0.3 * draws, test_samples=draws) for draws in DRAWS_IN_TEST]
    note = (
        "Draws in training: with ten in test. Draws in test: with one in training; 0 is the mean network. On PACS they "
        "are of one adapted network, that of part “sigma”, on 1,000 target images; in a stream each answer is made "
        "before the next step."
    )
    return AnalysisPart(
        "samples", "lines", "How many draws are enough?", tuple(trials), note, "draws (0: the mean network)"
    )


def _beta(tiny: bool) -> AnalysisPart:
    trials = [_vmp("pacs", "VMP + SHOT", beta, beta=beta) for beta in BETAS]
    for beta in BETAS:
        row = MethodRow(slug(f"SHOT {beta}"), "shot", {"beta": beta}, "B")
        trials.append(Trial("pacs", "SHOT", str(beta), row))
    trials = trials if tiny else [replace(trial, usual=STEADY) for trial in trials]
    note = (
        "The paper searched β in [0.1, 2] and took 0.3, which is SHOT's own value; it does not say how it searched "
        "without labels."
    )
    return AnalysisPart("beta", "lines", "How much weight for the pseudo-labels?", tuple(trials), note, "β")
