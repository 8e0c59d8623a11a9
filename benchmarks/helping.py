"""Claim: without labels, `stream.health` and `history.verdict` say how often source and adapted network are right.

They also say which of the two is right more often. Bars: the mean absolute error of an estimated accuracy is at most 5
points, and the sign of helped or hurt is right in 90 % of the cases where the true difference is above 2 points. A case
is a network, images of one domain, and a way to adapt. Ways that hurt are among them: batches of four, classes in runs,
too large a rate.

    cifar10   WRN-40-2, the fifteen corruptions at severities 1, 3 and 5 (ways that hurt: clean images and severity 1;
              norm statistics alone and undrift-light: severity 5, to save time)
    pacs      ResNet-50, the 12 tasks; source networks are trained first (needs a GPU)

Beside it, on the same images: mean confidence; 1 − mean entropy / ln C; the share of images above a threshold of
negative entropy at which 500 labelled *source* images are right as often as above it (ATC, with labels that nobody has
here); AETTA's rule, 1 − disagreement of ten dropout passes / (entropy of the mean prediction / ln C)³.

The rule, written before the fifteen corruptions ran: constants in `undrift/judge/accuracy.py` come from the development
corruptions (speckle noise, Gaussian blur, saturate; other images of the test set). SURE is that of the grid with the
least error, as the mean of the errors of source, adapted and gain; within 0.1 points of it, the nearest to 8.
OWN_ERROR and OWN_ERROR_OF_GAIN are root mean squares over development cases, rounded up to a point, at that SURE; the
gain's with ALONE where no view of an image is looked at. OWN_ERROR_ALONE is that of README's example, as all networks
of development have safe views, or that of development where it is larger.
MOST_SHRUNK is above every case that helps.

Predicted: 4 points of error and 95 % of the signs; ATC as good on source networks and useless on adapted ones, as
adaptation makes networks sure; confidence and entropy too high by 10 to 20 points at severity 5; AETTA between. It
fails where both networks are wrong together: at severity 5 of the noises the source's accuracy comes out too high.

Seen on development (27 cases): 3.0 and 3.7 points of error, every sign right; ATC 2.9 and 8.9; confidence 14 and 15;
AETTA 4.5 and 5.3, and better than predicted at the difference. The sources of severe noise are not too high. What fails
instead are large gains, which come out too small (undrift-light on blur: 62 points for 51), and the source beside a
network that went astray (12 points). Of the fifteen 16 of 123 cases have run, in a mixed order; PACS has not.

At first streams were asked with noise, though they answer without: undrift-light was 13.5 points too low on average,
with its answers' own network 4.5; the errors of 7 and 12 points became 5 and 10 by the rule.

Command:   python benchmarks/helping.py --data ../shared/data --set development cifar10 [--minutes 9]
           python benchmarks/helping.py --data ../shared/data --set pacs --device cuda --resnet50 FILE --cache FOLDER
                                                           (pacs.py writes its cases of `adapt` beside other records)
           python benchmarks/helping.py --tiny                          does everything run?
           python benchmarks/helping.py --table                         print what was found
Seeds:     0 (order of images, noise).
Output:    helping.json under --results, case by case; a finished case is not run again.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, corrupt
from undrift.judge.accuracy import OWN_ERROR_ALONE_OF_GAIN, OWN_ERROR_OF_GAIN, SURE, helping, margin, right
from undrift.loop.helped import adapted_answers, source_answers
from undrift_bench import zoo
from undrift_bench.bench.harness.gathered import gather
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.networks import tiny_data, tiny_network
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.offline.sources import Images, Sources, setup
from undrift_bench.bench.offline.tiny import tiny_setup
from undrift_bench.data import cifar10
from undrift_bench.zoo.shot import WeightNormLinear

IMAGES, SEVERITIES, LABELLED = 256, (1, 3, 5), 500
GRID = (4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0)
SPOKEN = 0.02  # differences below this are not counted as helped or hurt
OURS, PARTS = "undrift", ("source", "adapted")
ESTIMATORS = {
    OURS: "**undrift**",
    "alone": "undrift, where no view is safe",
    "atc": "ATC, threshold from labelled source images",
    "aetta": "AETTA's rule",
    "confidence": "mean confidence",
    "entropy": "1 − entropy / ln C",
}
Pair = tuple[float, float]


@dataclass(frozen=True)
class Way:
    """A way to adapt.

    Attributes:
        method: of `stream`, or of `adapt` where there are epochs.
        batch: images of a step.
        runs: whether images come sorted by class.
        hurts: whether it is here because it may hurt: on clean images and at severity 1.
        severe: whether severity 5 is enough, to save time.
    """

    method: str
    batch: int = 64
    runs: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 0
    hurts: bool = False
    severe: bool = False


STREAMS = {
    "Tent": Way("tent"),
    "norm-stats": Way("norm-stats", severe=True),
    "undrift-light": Way("undrift-light", severe=True),
    "norm-stats, classes in runs": Way("norm-stats", 32, True, hurts=True),
    "Tent, batches of 4": Way("tent", 4, hurts=True),
    "Tent, rate × 30": Way("tent", 32, settings={"stream_lr": 0.03}, hurts=True),
}
WHOLE = {
    "adapt": Way("undrift", epochs=15),
    "SHOT": Way("shot", epochs=15),
    "Tent, batches of 4": Way("tent", 4, hurts=True),
}


@dataclass(frozen=True)
class Case:
    """Images of one domain, and a way to adapt a network to them."""

    part: str
    domain: str
    way: str

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.part}: {self.domain}, {self.way}"


def cases(parts: Sequence[str]) -> list[Case]:
    """Return every case of these sets."""
    found = []
    kinds = {"development": DEVELOPMENT, "cifar10": CORRUPTIONS}
    for part in [part for part in kinds if part in parts]:
        domains = [f"{name} {severity}" for name in kinds[part] for severity in SEVERITIES]
        mild = ["clean", *(domain for domain in domains if domain.endswith(" 1"))]
        severe = [domain for domain in domains if domain.endswith(" 5")]
        for name, way in STREAMS.items():
            chosen = mild if way.hurts else severe if way.severe else domains
            found += [Case(part, domain, name) for domain in chosen]
    if "pacs" in parts:
        found += [Case("pacs", task.name, way) for way in WHOLE for task in SETS["pacs"].tasks]
    return found


class Cifar:
    """WRN-40-2, images of CIFAR-10 under a corruption, and labelled ones from before."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)

    @cache  # noqa: B019  # as long as the script
    def network(self) -> nn.Module:
        """Return the source network."""
        if self.asked.tiny:
            return tiny_network().load(Request())
        net = zoo.load("wrn40_2", self.asked.data / "cifar10/wrn40_2.safetensors").eval().to(self.device)
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # a third faster

    @cache  # noqa: B019
    def _clean(self) -> tuple[Tensor, Tensor]:
        if self.asked.tiny:
            return tiny_data(Request()).images.repeat(10, 1, 1, 1) / 255, torch.arange(120) % 4
        images, labels = next(iter(cifar10(self.asked.data / "cifar10").batches(10_000)))
        return images, labels

    def labelled(self, _domain: str) -> tuple[Tensor, Tensor]:
        """Return source images with labels that are in no case."""
        images, labels = self._clean()
        return images[-LABELLED:].to(self.device), labels[-LABELLED:]

    def images(self, part: str, domain: str) -> tuple[Tensor, Tensor]:
        """Return the images of a case; those of development are others than those of the results."""
        images, labels = self._clean()
        count = self.asked.images
        begin = count if part == "development" else 0
        images, labels = images[begin : begin + count], labels[begin : begin + count]
        if domain != "clean":
            name, severity = domain.rsplit(" ", 1)
            images = corrupt(images, name, int(severity))
        return images.to(self.device), labels


class Pacs:
    """SHOT's ResNet-50 trained on one domain, images of another, and held-out ones of the first."""

    def __init__(self, asked: argparse.Namespace) -> None:
        weights = {} if asked.resnet50 is None else {"resnet50_v1": asked.resnet50}
        request = Request(data=asked.data, cache=asked.cache, tiny=asked.tiny, device=asked.device, weights=weights)
        dataset = SETS["pacs"].shrunk() if asked.tiny else SETS["pacs"]
        self.tasks = {task.name: task for task in dataset.tasks}
        made_of = tiny_setup(dataset) if asked.tiny else setup(dataset, request)
        self._images, self.device = Images(made_of, request), request.place
        self._sources = Sources(made_of, self._images, request)
        self._most = asked.images
        self._domain = ""

    def network(self) -> nn.Module:
        """Return the source network of the domain that was asked about last."""
        return self._sources.network(self.tasks[self._domain].source, 0).to(self.device)

    def labelled(self, domain: str) -> tuple[Tensor, Tensor]:
        """Return held-out source images with labels."""
        return next(iter(self._sources.held_out(self.tasks[domain].source, 0).batches(LABELLED)))

    def images(self, _part: str, domain: str) -> tuple[Tensor, Tensor]:
        """Return the images of the target."""
        self._domain = domain
        target = self._images(self.tasks[domain].target)
        return next(iter(target.batches(len(target))))


def adapt(net: nn.Module, images: Tensor, labels: Tensor, way: Way) -> tuple[undrift.Perturbed, Any, Tensor | None]:
    """Return the adapted network, its views, and for a stream the log-probabilities of its answers, image by image."""
    if way.epochs:
        history = undrift.adapt(net, images, method=way.method, epochs=way.epochs, generator=seeded(), **way.settings)
        assert history.model is not None
        return history.model, history.model.options.answer_views or None, None
    order = labels.argsort(stable=True) if way.runs else torch.arange(len(labels))
    batches = images[order.to(images.device)].split(way.batch)
    going = undrift.stream(net, batches, method=way.method, generator=seeded(), **way.settings)
    answers = torch.cat([answer.probs.float().cpu() for answer in going])
    names = going.online.views.names if going.online.views.decided else ()
    given = torch.empty_like(answers)
    given[order] = answers
    return going.model, names or None, given.clamp_min(1e-12).log()


def seeded() -> torch.Generator:
    """Return the generator of noise and order."""
    return torch.Generator().manual_seed(0)


def run(case: Case, place: Cifar | Pacs, most: int, held: dict[Any, Any]) -> dict[str, Any]:
    """Return the truth of a case, and what each estimator says; `held` keeps what source networks said."""
    torch.manual_seed(0)
    way = (WHOLE if case.part == "pacs" else STREAMS)[case.way]
    images, labels = place.images(case.part, case.domain)
    net = place.network()
    key = case.part, case.domain if case.part == "pacs" else ""
    if key not in held:
        held[key] = threshold_of(net, *place.labelled(case.domain))
    begun = time.perf_counter()
    model, names, given = adapt(net, images, labels, way)
    adapting = time.perf_counter() - begun
    if given is None:  # as history.verdict does
        some = torch.randperm(len(labels), generator=seeded())[:most]
        images, labels = images[some.to(images.device)], labels[some.to(labels.device)]
    # A stream of health asks in one batch, as there are no more than that.
    batches = list(images.split(64)) if given is None else [images]
    source = held.setdefault((case.part, case.domain, "source"), {})
    record = compared(model, batches, labels, names, held[key], given, source, case.part == "development")
    model.remove()
    return record | {"seconds": [round(adapting, 1), record["seconds"]]}


def compared(
    model: undrift.Perturbed,
    batches: Sequence[Tensor],
    labels: Tensor,
    names: Any,
    threshold: float,
    given: Tensor | None = None,
    held: dict[Any, Any] | None = None,
    by_grid: bool = False,
) -> dict[str, Any]:
    """Return how often source and adapted network are right, and what each estimator says.

    Args:
        batches: images that both are asked about, with their labels.
        names: views; None tests which are safe.
        threshold: ATC's.
        given: what a stream answered, as log-probabilities.
        held: what the source network said of these images, by views; filled.
        by_grid: whether to look at every value that a constant could have.
    """
    held = {} if held is None else held
    begun = time.perf_counter()
    with features(model.net) as seen:
        safe, adapted = adapted_answers(model, batches, names, in_a_stream=given is not None)
        after = torch.cat(seen)[: len(labels)]
        seen.clear()
        if safe not in held:
            # Its answers do not depend on the batch.
            source = source_answers(model, [part for batch in batches for part in batch.split(32)], safe)
            held[safe] = source, torch.cat(seen)[: len(labels)]
        source, before = held[safe]
    if given is not None:
        adapted[0] = given
    classifier = classifier_of(model.net)
    answers = source[0], adapted[0]
    found = helping(source, adapted)
    estimates: dict[str, Any] = {
        OURS: {name: getattr(found, name).value for name in PARTS},
        "alone": {name: getattr(helping(source[:1], adapted[:1]), name).value for name in PARTS},
        "atc": both(lambda z, _: float((negative_entropy(z) > threshold).float().mean()), answers),
        "aetta": both(lambda z, h: aetta(z, h, classifier), answers, (before, after)),
        "confidence": both(lambda z, _: float(z.softmax(1).amax(1).mean()), answers),
        "entropy": both(lambda z, _: 1 + float(negative_entropy(z).mean()) / math.log(z.shape[1]), answers),
    }
    record = {
        "truth": both(lambda z, _: float((z.argmax(1) == labels.cpu()).float().mean()), answers),
        "estimates": estimates,
        "chance": math.sqrt(max(0.0, found.gain.error**2 - own_error(len(safe), found.agreement) ** 2)),
        "agreement": found.agreement,
        "views": list(safe),
        "shrunk": margin(adapted[0]) / margin(source[0]),
        "images": len(labels),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    if by_grid:
        views = {"grid": len(source), "alone": 1}
        record |= {
            name: {str(sure): [float(p.mean()) for p in right(source[:n], adapted[:n], sure)] for sure in GRID}
            for name, n in views.items()
        }
    return record


def own_error(views: int, agreement: float) -> float:
    """Return what the method itself adds to the error of a gain."""
    return (OWN_ERROR_OF_GAIN if views else OWN_ERROR_ALONE_OF_GAIN) * math.sqrt(1 - agreement)


def judgement(record: Mapping[str, Any]) -> str:
    """Return what the sentence says, with the constants as they are now."""
    said = record["estimates"][OURS]
    gain = said["adapted"] - said["source"]
    error = math.hypot(record["chance"], own_error(len(record["views"]), record["agreement"]))
    return "unclear" if abs(gain) <= error else "helped" if gain > 0 else "hurt"


def both(rule: Any, answers: tuple[Tensor, Tensor], features: tuple[Any, Any] = (None, None)) -> dict[str, float]:
    """Return what a rule says of source and adapted network."""
    return {name: rule(z, h) for name, z, h in zip(PARTS, answers, features, strict=True)}


def negative_entropy(logits: Tensor) -> Tensor:
    """Return Σ p ln p of each image."""
    log_p = logits.log_softmax(1)
    return (log_p.exp() * log_p).sum(1)


@torch.no_grad()
def threshold_of(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the threshold above which as many labelled images are as the network is right for."""
    logits = torch.cat([net(batch) for batch in images.split(64)]).float().cpu()
    wrong = int((logits.argmax(1) != labels.cpu()).sum())
    return float(negative_entropy(logits).sort().values[max(0, wrong - 1)]) if wrong else -math.inf


@contextmanager
def features(net: nn.Module) -> Iterator[list[Tensor]]:
    """Give a list of what enters the classifier in each pass of a `with` block."""
    seen: list[Tensor] = []
    hook = classifier_of(net).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().float().cpu()))
    try:
        yield seen
    finally:
        hook.remove()


def classifier_of(net: nn.Module) -> nn.Module:
    """Return the last layer that is linear; that of SHOT's network is none of PyTorch's."""
    return [module for module in net.modules() if isinstance(module, nn.Linear | WeightNormLinear)][-1]


def aetta(logits: Tensor, before: Tensor, classifier: nn.Module) -> float:
    """Return AETTA's estimate: dropout of 0.4 in front of the classifier, ten passes, α = 3; not smoothed over time."""
    weight, bias = (None if p is None else p.detach().float().cpu() for p in (classifier.weight, classifier.bias))
    torch.manual_seed(0)
    passes = [F.linear(F.dropout(before, 0.4, True), weight, bias).argmax(1) for _ in range(10)]
    disagreement = statistics.fmean(float((found != logits.argmax(1)).float().mean()) for found in passes)
    mean = logits.softmax(1).mean(0)
    spread = float(-(mean * mean.clamp_min(1e-12).log()).sum()) / math.log(len(mean))
    return max(0.0, 1 - disagreement / max(spread, 1e-3) ** 3)


def scores(records: Sequence[Mapping[str, Any]], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return mean absolute errors in points, and how often the sign is right where the true difference counts."""
    truth = [(r["truth"]["source"], r["truth"]["adapted"]) for r in records]
    gains = [(after - before, b - a) for (before, after), (a, b) in zip(truth, pairs, strict=True)]
    helped = [said > 0 for true, said in gains if true > SPOKEN]
    hurt = [said < 0 for true, said in gains if true < -SPOKEN]

    def points(errors: Iterator[float]) -> float:
        return 100 * statistics.fmean(map(abs, errors))

    return {
        "source": points(t[0] - p[0] for t, p in zip(truth, pairs, strict=True)),
        "adapted": points(t[1] - p[1] for t, p in zip(truth, pairs, strict=True)),
        "gain": points(true - said for true, said in gains),
        "helped": (sum(helped), len(helped)),
        "hurt": (sum(hurt), len(hurt)),
    }


def of_estimator(records: Sequence[Mapping[str, Any]], name: str) -> list[Pair]:
    """Return an estimator's accuracies of source and adapted network."""
    return [(r["estimates"][name]["source"], r["estimates"][name]["adapted"]) for r in records]


def table(result: Mapping[str, Any], part: str) -> str:
    """Return a set's results as Markdown: each estimator, then ours by way; then what was judged."""
    found = {case: result["cases"][case.key] for case in cases([part]) if case.key in result["cases"]}
    records = list(found.values())
    head = ["", "cases", "source", "adapted", "difference", "helped: sign right", "hurt: sign right"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    rows = [(title, records, of_estimator(records, name)) for name, title in ESTIMATORS.items()]
    for way in dict.fromkeys(case.way for case in found):
        own = [record for case, record in found.items() if case.way == way]
        rows.append((f"undrift: {way}", own, of_estimator(own, OURS)))
    for title, own, pairs in rows:
        s = scores(own, pairs)
        signs = [f"{a} of {b}" if b else "–" for a, b in (s["helped"], s["hurt"])]
        numbers = [str(len(own)), *(f"{s[name]:.1f}" for name in ("source", "adapted", "gain")), *signs]
        lines.append(f"| {title} | {' | '.join(numbers)} |")
    return "\n".join([*lines, "", judged(records)])


TITLES = {
    "cifar10": "WRN-40-2 on the fifteen corruptions, severities 1, 3 and 5",
    "development": "WRN-40-2 on speckle noise, gaussian blur and saturate, where the constants were chosen",
    "pacs": "ResNet-50 on the 12 tasks of PACS",
}


def page(result: Mapping[str, Any]) -> str:
    """Return the tables of the documentation."""
    parts = []
    for part, title in TITLES.items():
        records = [result["cases"][case.key] for case in cases([part]) if case.key in result["cases"]]
        how = "Not run yet."
        if records:
            days = sorted({record["date"] for record in records})
            machines = sorted({f"{record['hardware']}; torch {record['torch']}" for record in records})
            missing = len(cases([part])) - len(records)
            left = f" {missing} cases are not run yet." if missing else ""
            most = max(record["images"] for record in records)
            seeds = ", ".join(sorted({str(record.get("seed", 0)) for record in records}))
            how = (
                f"{', '.join(machines)}; {days[-1]}; {most} images a case; seed {seeds}.{left}\n\n{table(result, part)}"
            )
        parts.append(f"**{title}.** {how}")
    return "\n\n".join([*parts, choice(result)])


def judged(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how often the sentence took a side, and was right."""
    spoken = [r for r in records if judgement(r) != "unclear"]
    gains = [r["truth"]["adapted"] - r["truth"]["source"] for r in spoken]
    right = sum((gain > 0) == (judgement(r) == "helped") for r, gain in zip(spoken, gains, strict=True))
    return f"The sentence took a side in {len(spoken)} of {len(records)} cases, and was right in {right} of these."


def choice(result: Mapping[str, Any]) -> str:
    """Return what the rule takes from the development cases."""
    records = [result["cases"][case.key] for case in cases(["development"]) if case.key in result["cases"]]
    if not records:
        return ""
    errors: dict[float, float] = {}
    lines = ["| SURE | source | adapted | difference | mean |", "|---:|---:|---:|---:|---:|"]
    for sure in GRID:
        s = scores(records, [tuple(r["grid"][str(sure)]) for r in records])
        parts = [s[name] for name in ("source", "adapted", "gain")]
        errors[sure] = statistics.fmean(parts)
        lines.append(f"| {sure:g} | {' | '.join(f'{p:.1f}' for p in (*parts, errors[sure]))} |")
    near = [sure for sure, error in errors.items() if error <= min(errors.values()) + 0.1]
    taken = min(near, key=lambda sure: abs(sure - 8))
    found = [f"SURE = {taken:g}"]
    for name, constant in (("grid", "OWN_ERROR"), ("alone", "OWN_ERROR_ALONE")):
        off, of_gain = [], []
        for r in records:
            before, after = r[name][str(taken)]
            off += [before - r["truth"]["source"], after - r["truth"]["adapted"]]
            gain = (after - before) - (r["truth"]["adapted"] - r["truth"]["source"])
            if r["agreement"] < 1:
                of_gain.append(gain / math.sqrt(1 - r["agreement"]))
        found += [f"{constant} = {root_mean_square(off):.3f}", f"{constant}_OF_GAIN = {root_mean_square(of_gain):.3f}"]
    shrunk = max(r["shrunk"] for r in records if r["truth"]["adapted"] >= r["truth"]["source"])
    return "\n".join(
        [
            *lines,
            "",
            f"The rule takes {', '.join(found)}; the largest ratio of margins in a case that helps is {shrunk:.2f}.",
        ]
    )


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(statistics.fmean(value**2 for value in values))


def main() -> None:
    """Run what is not finished, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", choices=("development", "cifar10", "pacs"), default=["development"])
    parser.add_argument("--images", type=int, default=IMAGES, help="of each case; of PACS, that are looked at")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no case after so long")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), help="I N: case I and each Nth after it")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--resnet50", type=Path, help="ImageNet's weights, for PACS")
    parser.add_argument("--cache", type=Path, help="keeps PACS's images and source networks")
    parser.add_argument("--tiny", action="store_true", help="tiny random networks; nothing is written")
    parser.add_argument("--table", action="store_true", help="print what was found, run nothing")
    asked = parser.parse_args()
    place = asked.results / "helping.json"
    result: dict[str, Any] = {"sure": SURE, "cases": {}}
    if place.is_file() and not asked.tiny:
        result = json.loads(place.read_text("utf-8"))
    if not asked.table:
        torch.set_num_threads(1)
        if asked.tiny:
            asked.images, asked.set = 24, ["development", "cifar10", "pacs"]
        go(asked, result, place)
    print(f"\n{page(result)}")


def go(asked: argparse.Namespace, result: dict[str, Any], place: Path) -> None:
    """Run the cases that are left; the record is written as each ends."""
    begun = time.perf_counter()
    where: dict[str, Cifar | Pacs] = {}
    held: dict[Any, Any] = {}
    order = cases([part for part in asked.set if part != "cifar10"])
    mixed = cases(["cifar10"] if "cifar10" in asked.set else [])
    random.Random(0).shuffle(mixed)  # so that what is finished is a fair sample of all
    own, of = asked.share
    for case in (order + mixed)[own::of]:
        if case.key in result["cases"] or asked.only not in case.key:
            continue
        if time.perf_counter() - begun > 60 * asked.minutes:
            print("The time is over; call again for the rest.")
            break
        kind = Pacs if case.part == "pacs" else Cifar
        if kind.__name__ not in where:
            where[kind.__name__] = kind(asked)
        if asked.tiny and kind is Pacs and case.domain not in where["Pacs"].tasks:  # type: ignore[union-attr]
            continue
        record = run(case, where[kind.__name__], asked.images if kind is Cifar else 2 * IMAGES, held)
        result["cases"][case.key] = record = record | machine(torch.device(asked.device))
        t, e = record["truth"], record["estimates"][OURS]
        said = " → ".join(f"{100 * t[name]:.0f} ({100 * e[name]:.0f})" for name in PARTS)
        print(f"{time.perf_counter() - begun:4.0f} s  {case.key}: {said} {judgement(record)}", flush=True)
        if not asked.tiny:
            result |= gather(place, {"sure": SURE, "cases": {case.key: record}})


if __name__ == "__main__":
    main()
