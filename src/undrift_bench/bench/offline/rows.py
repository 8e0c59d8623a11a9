"""The rows of the offline and generalized tables, and the values of each method.

A method runs with its authors' values, as in `undrift.methods`: with those for the data set if there is such a variant
("nrc:office31"), and with those for a single task if `OF_A_TASK` has them. For PACS there are none, so methods run as
on Office-Home. The paper's β is SHOT's, 0.3.
"""

from dataclasses import replace
from typing import Any

from undrift import methods
from undrift_bench.bench.harness.cell import NO_NOISE, NO_VARIANCE, MethodRow, Tier

# Authors' values for a single task of a data set, by method and task.
OF_A_TASK: dict[tuple[str, str], dict[str, Any]] = {
    ("nrc:office31", "A-W"): {"neighbours": 3, "second_neighbours": 2},
}

LATER = {"statistics_first": False}

NOTES = {
    "vmp-shot:released": "its authors released no code for whole domains. Noise, KL and samples are those of their "
    "code for streams; loss, rates and norm statistics are the paper's. A published value beside it is the paper's, "
    "the same as beside vmp-shot:paper.",
    "gsfda": "its source network is not the other rows': it was trained under the two masks, with constant rates and a "
    "weight decay of 5e-4, as its authors do.",
    "vmp-shot-sigma-0": "not the noise alone is gone: without noise pseudo-labels are taken under the statistics that "
    "the steps kept, with noise under statistics that the mean network takes first (docs/results.md has both apart for "
    "one task).",
    "vmp-nrc": "epochs and neighbours are NRC's on Office-Home, on every data set.",
}


def offline_rows() -> list[MethodRow]:
    """Return the rows in the tables' order; a control changes one thing of the row it belongs to, or has a note."""

    def control(
        name: str, title: str, method: str, why: str, cost: float, tier: Tier = "A", **changes: Any
    ) -> MethodRow:
        about: dict[str, Any] = {"why": why, "title": title, "note": NOTES.get(name, "")}
        return MethodRow(name, method, changes, tier, control=True, cost=cost, **about)

    ours = [
        MethodRow("undrift", "undrift", cost=4.0),
        control(
            "undrift-sigma-0",
            "undrift, σ = 0",
            "undrift",
            "is it the noise? The same prior, rates, likelihood and views, and no variance.",
            4.0,
            **NO_VARIANCE,
        ),
        control(
            "nrc-statistics-first",
            "nrc, statistics first",
            "nrc",
            "and for NRC as its authors run it (40 epochs, constant rates, the classifier trained, too)?",
            3.0,
            statistics_first=True,
        ),
    ]
    rows = [
        MethodRow("source", "source", cost=0.1),
        MethodRow("norm-stats", "norm-stats:domain", cost=0.1),
        MethodRow("shot", "shot"),
        MethodRow("shot-bn", "shot-bn"),
        MethodRow("vmp-shot:paper", "vmp-shot:paper", cost=2.5),
        MethodRow("vmp-shot:released", "vmp-shot:released", cost=2.0, note=NOTES["vmp-shot:released"]),
        control(
            "vmp-shot-sigma-0",
            "vmp-shot, σ = 0",
            "vmp-shot:paper",
            "is it the noise? (norm-affine SHOT, VMP's rates)",
            1.0,
            **NO_NOISE,
        ),
        control(
            "vmp-shot-sigma-0.04",
            "vmp-shot, σ² = 0.04 Var",
            "vmp-shot:paper",
            "would more noise help?",
            2.5,
            init_fraction=0.04,
        ),
        control(
            "shot-statistics-first",
            "shot, statistics first",
            "shot",
            "how much do the first pseudo-labels matter?",
            1.0,
            statistics_first=True,
        ),
        control(
            "vmp-shot-statistics-first",
            "vmp-shot, statistics first",
            "vmp-shot:paper",
            "the same question, with the noise?",
            2.5,
            "B",
            statistics_first=True,
        ),
        *(ours if "undrift" in methods.names("adapt") else ()),
        MethodRow("tent", "tent", tier="B", cost=0.1),
        MethodRow("nrc", "nrc", tier="B", cost=3.0),
        MethodRow("aad", "aad", tier="B", cost=3.0),
        MethodRow("gsfda", "gsfda", tier="B", cost=2.0, note=NOTES["gsfda"]),
        MethodRow("hcl", "hcl", tier="B", cost=3.0),
        MethodRow("bbb", "bbb", tier="B", cost=5.0),
        MethodRow("bbb-shot", "bbb-shot", tier="B", cost=5.0),
        MethodRow("vmp-nrc", "vmp-nrc", tier="B", cost=7.0, note=NOTES["vmp-nrc"]),
    ]
    return [replace(row, loop="adapt") for row in rows]


def ablation_rows() -> list[MethodRow]:
    """Return the rows of `--only ablation`: `undrift` with one change each."""

    def row(name: str, title: str, why: str, **change: Any) -> MethodRow:
        how: dict[str, Any] = {"control": True, "cost": 4.0, "why": why, "title": title, "group": "ablation"}
        return MethodRow(f"undrift-{name}", "undrift", change, loop="adapt", **how)

    five: dict[str, Any] = {"neighbours": 5, "second_neighbours": 5}
    five |= {"late_neighbours": None, "late_second_neighbours": None}
    return [
        row(
            "five-neighbours",
            "five neighbours of five",
            "the recipe's first values; NOTES.md has why they left",
            **five,
        ),
        row(
            "five-neighbours-sigma-0",
            "five neighbours of five, σ = 0",
            "is it the noise, there?",
            **five,
            **NO_VARIANCE,
        ),
        row("statistics-later", "statistics not first", "banks are filled by the source's statistics", **LATER),
        row("no-kl", "without KL", "nothing holds the mean to the source's weights", kl_weight=0.0),
        row("no-views", "answers without views", "the image alone is asked", answer_views=()),
        row("frozen", "frozen mean", "noise and norm layers alone, as in the paper", mean_rank=0),
        *(row(f"rank-{r}", f"mean of rank {r}", "from the kernel's directions", mean_rank=r) for r in (8, 64)),
    ]
