"""Run one cell of an analysis: an offline or online cell with one change, or one finished elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import undrift
from undrift import methods
from undrift.images import TensorDomain
from undrift.judge import shift
from undrift.judge.metrics import Tally
from undrift.posterior.perturbed import Perturbed
from undrift.system.progress import Bar
from undrift_bench.bench.analysis.parts import DRAWS_IN_TEST, AnalysisPart, Trial, Where
from undrift_bench.bench.harness.cell import Cell, MethodRow
from undrift_bench.bench.harness.networks import RESNEXT29, WRN40_2
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.run import LARGE, Adapting
from undrift_bench.bench.offline.sources import Setup
from undrift_bench.bench.online import c10, c100
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.settings import CONTINUAL
from undrift_bench.bench.online.streaming import Streaming

IMAGES = {"cifar10-c": 1000, "cifar100-c": 2000}  # of each corruption: enough to tell a point apart, and cheap
COMPARED = 1000  # images of each domain, for the A-distance and the number of draws
STREAMS: dict[Where, OnlineBenchmark] = {
    "cifar10-c": replace(c10.benchmark, networks=(WRN40_2,), settings=(CONTINUAL,)),
    "cifar100-c": replace(c100.benchmark, networks=(RESNEXT29,), settings=(CONTINUAL,)),
}


@dataclass(frozen=True)
class Planned:
    """A trial with the cell that it is kept as."""

    part: AnalysisPart
    trial: Trial
    cell: Cell


class Analysing:
    """Runs the cells of all analyses."""

    def __init__(self, made_of: Setup, request: Request, planned: list[Planned]) -> None:
        self.setup, self.request = made_of, request
        self.planned = {p.cell.key: p for p in planned}
        self.adapting = Adapting(made_of, request)  # now: its deadline counts from here
        self._streams: dict[Where, Streaming] = {}

    def __call__(self, cell: Cell, bar: Bar) -> Mapping[str, Any]:
        """Return the numbers of one cell."""
        trial = self.planned[cell.key].trial
        known = None if trial.look else self._finished(cell, trial)
        if known is not None:
            return known
        if trial.where != "pacs":
            return self._streamed(cell, trial, bar)
        task = self.setup.dataset.task(task_of(trial, self.request))
        return self.adapting(cell, bar, look_into if trial.look else None, task)

    def known(self, cell: Cell) -> bool:
        """Return whether the numbers are there already, and nothing will be run."""
        trial = self.planned[cell.key].trial
        return not trial.look and self._finished(cell, trial) is not None

    def _finished(self, cell: Cell, trial: Trial) -> Record | None:
        """Return the numbers of the same run where it is finished: in another part, or as a cell of `offline`."""
        task = task_of(trial, self.request)
        twins = [
            p.cell
            for p in self.planned.values()
            if (p.trial.where, p.cell.images) == (trial.where, cell.images) and task_of(p.trial, self.request) == task
        ]
        places = [(Store(self.request.results / cell.benchmark), twins)]
        if trial.where == "pacs" and "epochs" not in self.request.extra:
            offline, its_task = Offline(), self.setup.dataset.task(task)
            rows = (offline.of(self.setup, its_task, row, self.request) for row in offline.rows)
            places.append((Store(self.request.results / offline.name), [c for cells in rows for c in cells]))
        for store, cells in places:
            for twin in cells:
                record = store.finished(twin) if twin.seed == cell.seed else None
                if record is not None and same_run(twin.row, cell.row):
                    numbers = {name: value for name, value in record.items() if name not in twin.identity}
                    return {"taken_from": f"{twin.benchmark}/{twin.key}"} | numbers
        return None

    def _streamed(self, cell: Cell, trial: Trial, bar: Bar) -> Mapping[str, Any]:
        if trial.where not in self._streams:
            request = replace(self.request, images=cell.images)
            self._streams[trial.where] = Streaming(STREAMS[trial.where].scaled(request), request)
        streaming = self._streams[trial.where]
        inner = replace(cell, network=streaming.benchmark.networks[0].name, setting=CONTINUAL.name)
        numbers = dict(streaming(inner, bar))
        return numbers | {"accuracy": 1 - numbers.pop("error")}


def task_of(trial: Trial, request: Request) -> str:
    """Return the task of a trial on PACS: its own, or `--set task=…`, or its usual one."""
    return trial.task or request.extra.get("task", trial.usual)


def same_run(one: MethodRow, other: MethodRow) -> bool:
    """Return whether two rows come to the same run: the same scheme and the same likelihood, however they are written.

    Examples:
        >>> same_run(MethodRow("a", "vmp-shot:paper"), MethodRow("b", "vmp-shot", {"beta": 0.3, "train_samples": 1}))
        True
    """
    first, second = (methods.get(row.method).build(row.settings) for row in (one, other))
    if first.keepers or second.keepers:
        return (one.method, dict(one.settings)) == (other.method, dict(other.settings))
    return first.options == second.options and repr(first.likelihood) == repr(second.likelihood)


@torch.no_grad()
def look_into(adapting: Adapting, cell: Cell, model: Perturbed) -> dict[str, Any]:
    """Return σ of each layer beside its start, each layer's A-distance, and the scores with more or fewer draws."""
    dataset = adapting.setup.dataset
    task = next(t for t in dataset.tasks if cell.setting.endswith(t.name))
    target = adapting.images(task.target)
    sigma = {
        row.layer: {
            "variances": row.variances,
            "l1": row.l1,
            "start_l1": row.start_l1,
            "relative": row.relative[0],
            "start_relative": row.start_relative,
        }
        for row in shift.sigma(model)
    }
    with model.off() as net:
        some = (adapting.images(domain).images[:COMPARED] for domain in (task.source, task.target))
        one, other = ([adapting.centre(part) for part in images.split(64)] for images in some)
        distances = shift.a_distance(net, one, other, list(sigma))
    by_samples = scores_by_draws(adapting, model, target)
    return {"sigma": sigma, "a_distance": distances, "by_samples": by_samples}


@torch.no_grad()
def scores_by_draws(adapting: Adapting, model: Perturbed, domain: TensorDomain) -> dict[str, dict[str, float]]:
    """Return the scores of the mean network ("0") and of the first n of one series of draws, on the first images."""
    images, truth = adapting.centre(domain.images[:COMPARED]), domain.labels
    assert truth is not None, "a benchmark's images have labels"
    truth = truth[:COMPARED]
    found = {}
    total = torch.zeros(())
    for draws in range(max(DRAWS_IN_TEST) + 1):
        probs = undrift.predict(model, images, min(draws, 1), batch_size=LARGE).probs
        total = probs if draws <= 1 else total + probs
        if draws in DRAWS_IN_TEST:
            mean = total / max(draws, 1)
            tally = Tally()
            tally.add(mean, truth)
            scores = tally.scores()
            names = ("accuracy", "nll", "ece", "aurc", "augrc")
            found[str(draws)] = {name: getattr(scores, name) for name in names}
    return found
