"""Published numbers with their sources, in per cent as printed.

Online values are errors under a continual stream at severity 5, in the standard order but for CoTTA's authors' on
ImageNet-C (`COTTA`), which are means of ten orders; offline ones are accuracies. Source networks of others are not
ours, so a published value is for comparison, not a target.
"""

from dataclasses import dataclass

PAPER = "Jing et al. 2022 (VMP)"
COTTA = "Wang et al. 2022 (CoTTA)"
BENCHMARK = "Döbler et al.'s test-time adaptation benchmark, 5 seeds"
ROID = "Marsden et al. 2024 (ROID), 5 seeds"


@dataclass(frozen=True)
class Published:
    """One number of others.

    Attributes:
        value: in per cent.
        source: where it stands.
        about: whether it was read off a text that says "improves by …", and is good to a tenth at best.
        domains: the same number for each domain, where it was printed.
    """

    value: float
    source: str
    about: bool = False
    domains: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{'≈ ' if self.about else ''}{self.value:.1f}"


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# Mean error on the fifteen corruptions; the first of several is the one that tables show. The networks are WRN-28-10
# (RobustBench), ResNeXt-29 (AugMix) and ResNet-50.
ONLINE: dict[str, dict[str, tuple[Published, ...]]] = {
    "online-c10": {
        "source": (
            Published(
                *(43.5, COTTA, False),
                _numbers("72.3 65.7 72.9 46.9 54.3 34.8 42.0 25.1 41.3 26.0 9.3 46.7 26.6 58.5 30.3"),
            ),
        ),
        "norm-stats": (
            Published(
                *(20.4, COTTA, False),
                _numbers("28.1 26.1 36.3 12.8 35.3 14.2 12.1 17.3 17.4 15.3 8.4 12.6 23.8 19.7 27.3"),
            ),
        ),
        "tent": (
            Published(
                *(20.7, COTTA, False),
                _numbers("24.8 20.6 28.6 14.4 31.1 16.5 14.1 19.1 18.6 18.6 12.2 20.3 25.7 20.8 24.9"),
            ),
            Published(20.0, BENCHMARK),
        ),
        "cotta": (
            Published(
                *(16.2, COTTA, False),
                _numbers("24.3 21.3 26.6 11.6 27.6 12.2 10.3 14.8 14.1 12.4 7.5 10.6 18.3 13.4 17.3"),
            ),
            Published(16.5, BENCHMARK),
        ),
        "tent-ft": (Published(19.8, PAPER, about=True),),
        "eata": (Published(17.9, BENCHMARK),),
        "sar": (Published(20.4, BENCHMARK),),
        "roid": (Published(16.2, ROID),),
        "vmp": (Published(17.9, PAPER, about=True),),
    },
    "online-c100": {
        "source": (Published(46.4, COTTA),),
        "norm-stats": (Published(35.4, COTTA),),
        "tent": (Published(60.9, COTTA), Published(62.2, BENCHMARK)),
        "cotta": (Published(32.5, COTTA), Published(32.8, BENCHMARK)),
        "eata": (Published(32.2, BENCHMARK),),
        "sar": (Published(32.0, BENCHMARK),),
        "roid": (Published(29.3, ROID),),
    },
    "online-imagenet": {
        "source": (Published(82.4, COTTA),),
        "norm-stats": (Published(72.1, COTTA),),
        "tent": (Published(66.5, COTTA), Published(62.6, BENCHMARK)),
        "cotta": (Published(63.0, COTTA), Published(63.1, BENCHMARK)),
        "eata": (Published(58.0, BENCHMARK),),
        "sar": (Published(61.9, BENCHMARK),),
        "roid": (Published(54.5, ROID),),
    },
}

SOURCE_USING = ("DAN", "DANN", "MCD", "BNM", "SAFN", "CDAN+E", "MDD", "BDG")
"""Methods of the offline tables that look at source data while they adapt: published, not run."""

OFFICE31_TASKS = ("A→W", "A→D", "W→A", "W→D", "D→A", "D→W")
OFFICE_HOME_TASKS = (
    *("Ar→Cl", "Ar→Pr", "Ar→Rw", "Cl→Ar", "Cl→Pr", "Cl→Rw"),
    *("Pr→Ar", "Pr→Cl", "Pr→Rw", "Rw→Ar", "Rw→Cl", "Rw→Pr"),
)

# Accuracy a task, then the mean as the paper prints it (its tables "offline_office" and "offline_home"; ResNet-50).
_OFFICE31 = """
DAN     80.5 78.6 62.8  99.6 63.6 97.1  80.4
DANN    82.6 81.5 67.5  99.3 68.4 96.9  82.7
MCD     88.6 92.2 69.7 100.0 69.5 98.5  86.5
BNM     91.5 90.3 71.6 100.0 70.9 98.5  87.1
SAFN    90.1 90.7 70.2  99.8 73.0 98.6  87.1
CDAN+E  94.1 92.9 69.3 100.0 71.0 98.6  87.7
MDD     90.4 90.4 73.7  99.9 75.0 98.7  88.0
BDG     93.6 93.6 72.0 100.0 73.2 99.0  88.5
source  76.9 80.8 63.6  98.7 60.3 95.3  79.3
shot    90.1 94.0 74.3  99.9 74.7 98.4  88.6
vmp     93.3 96.2 76.9 100.0 75.4 98.6  90.0
"""
_OFFICE_HOME = """
DAN     43.6 57.0 67.9 45.8 56.5 60.4 44.0 43.6 67.7 63.1 51.5 74.3  56.3
DANN    45.6 59.3 70.1 47.0 58.5 60.9 46.1 43.7 68.5 63.2 51.8 76.8  57.6
MCD     48.9 68.3 74.6 61.3 67.6 68.8 57.0 47.1 75.1 69.1 52.2 79.6  64.1
CDAN+E  50.7 70.6 76.0 57.6 70.0 70.0 57.4 50.9 77.3 70.9 56.7 81.6  65.8
SAFN    52.0 71.7 76.3 64.2 69.9 71.9 63.7 51.4 77.1 70.9 57.1 81.5  67.3
BNM     52.3 73.9 80.0 63.3 72.9 74.9 61.7 49.5 79.7 70.5 53.6 82.2  67.9
MDD     54.9 73.7 77.8 60.0 71.4 71.8 61.2 53.6 78.1 72.5 60.2 82.3  68.1
BDG     51.5 73.4 78.7 65.3 71.5 73.7 65.1 49.7 81.1 74.6 55.1 84.8  68.7
source  44.6 67.3 74.8 52.7 62.7 64.8 53.0 40.6 73.2 65.3 45.4 78.0  60.2
shot    57.1 78.1 81.5 68.0 78.2 78.1 67.4 54.9 82.2 73.3 58.8 84.3  71.8
vmp     57.9 77.6 82.5 68.6 79.4 80.6 68.4 55.6 83.1 75.2 59.6 84.7  72.8
"""


def _table(text: str) -> dict[str, Published]:
    rows = (line.split() for line in text.strip().splitlines())
    return {name: Published(float(mean), PAPER, False, _numbers(" ".join(tasks))) for name, *tasks, mean in rows}


OFFICE31 = _table(_OFFICE31)
"""Accuracy of each method in the paper's order, `domains` in that of `OFFICE31_TASKS`."""

OFFICE_HOME = _table(_OFFICE_HOME)
"""The same for Office-Home, `domains` in the order of `OFFICE_HOME_TASKS`."""

# Held-out source, target, and their harmonic mean on Office-Home (the paper's table "gsfda"; tasks were not printed).
GENERALIZED_OFFICE_HOME: dict[str, tuple[float, float, float]] = {
    "source": (83.6, 59.1, 69.2),
    "shot": (71.7, 70.4, 71.0),
    "vmp": (76.6, 71.6, 74.0),
}

# The paper's Table 1: source-free, online, uncertainty, adaptation scheme, extra requirement.
TABLE1: dict[str, tuple[bool, bool, bool, str, str]] = {
    "tent": (True, True, False, "–", ""),
    "shot": (True, False, False, "Conv + FC", ""),
    "ttt": (False, True, False, "Conv + FC", "auxiliary task"),
    "bacs": (True, True, True, "Conv + FC", "multiple models"),
    "vmp": (True, True, True, "Perturbations", ""),
}


def online(benchmark: str, method: str) -> tuple[Published, ...]:
    """Return what was published of a method, by its name with or without a variant; nothing where nothing was."""
    known = ONLINE.get(benchmark, {})
    return known.get(method) or known.get(method.partition(":")[0], ())
