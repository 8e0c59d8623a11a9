"""Run one offline cell: adapt a copy of the source network, then score it on target and source."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift
from undrift import methods
from undrift._errors import OptionError
from undrift.images import TensorDomain
from undrift.judge.history import History
from undrift.judge.metrics import Scores, harmonic_mean
from undrift.keep.masks import MaskedGradients
from undrift.likelihood.masks import masks_of
from undrift.loop.indexed_loader import avoid_last_single
from undrift.packs.fingerprint import fingerprint
from undrift.posterior.perturbed import Perturbed
from undrift.recipes.method import Method
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.measure import PeakMemory, Scoring, learnables
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import CannotRun, Request
from undrift_bench.bench.offline.sets import Task
from undrift_bench.bench.offline.sources import Images, Setup, Sources
from undrift_bench.bench.offline.views import CentreView, RandomView, StopWatch
from undrift_bench.bench.online.streaming import file_bytes

LARGE = 256  # images of a batch that is only looked at, where statistics are not the batch's

Look = Callable[["Adapting", Cell, Perturbed], Mapping[str, Any]]
"""Returns more numbers of an adapted network, for the analyses."""


class Adapting:
    """Runs the cells of one data set; images and source networks are made ready when first needed."""

    def __init__(self, made_of: Setup, request: Request) -> None:
        self.setup, self.request, self.device = made_of, request, request.place
        before = None if request.deadline is None else time.monotonic() + request.deadline
        self.images = Images(made_of, request)
        self.sources = Sources(made_of, self.images, request, before)
        self.centre = CentreView.of(made_of.preprocess, request.fast)

    def __call__(self, cell: Cell, bar: Bar, look: Look | None = None, task: Task | None = None) -> Mapping[str, Any]:
        """Return the numbers of one cell.

        Args:
            look: what else to find out about the adapted network.
            task: where the cell's setting does not name it.
        """
        task = task or self.setup.dataset.task(cell.setting)
        recipe, epochs = self.recipe(cell)
        source, target = self.source(cell, task), self.images(task.target)
        bar.advance(0, images=f"{len(target):,}")
        begun = time.monotonic()
        watch = StopWatch(self.device, epochs * math.ceil(len(target) / recipe.batch_size))
        memory = PeakMemory(self.device)
        with quickly(self.device, self.request.fast):
            history = self.adapted(cell, source, target, watch)
            model, peak = history.model, memory.peak()
            assert model is not None, "a history that was not saved has its model"
            answers = self.scored(model, target, recipe.batch_size)
            on_target = answers.scores()[0]
            with _source_mask(model):
                on_source = self.scores(model, self.sources.held_out(task.source, cell.seed), recipe.batch_size)
            more = {} if look is None else look(self, cell, model)
        self._keep(cell, task, model)
        return {
            "accuracy": on_target.accuracy,
            "nll": on_target.nll,
            "brier": on_target.brier,
            "ece": on_target.ece,
            "aurc": on_target.aurc,
            "augrc": on_target.augrc,
            "certain": answers.certain(),
            "source_accuracy": on_source.accuracy,
            "source_nll": on_source.nll,
            "source_ece": on_source.ece,
            "harmonic": harmonic_mean([on_source.accuracy, on_target.accuracy]),
            "unanswered": on_target.unanswered,
            "scored": on_target.count,
            "collapsed": history.verdict is not None and history.verdict.collapsed,
            "epochs": epochs,
            "batch": recipe.batch_size,
            "milliseconds": None if "shared" in self.request.extra else watch.milliseconds,
            "peak_mib": peak,
            "learnables": learnables(model),
            "file_bytes": file_bytes(model),
            # Without decoding and source training, which the first cell of a source would carry for all.
            "seconds": time.monotonic() - begun,
            "options": model.options.as_dict(),
            "source_network": fingerprint(source)[:12],
            **more,
        }

    def _keep(self, cell: Cell, task: Task, model: Perturbed) -> None:
        """Save a cell's pack where `--set packs=FOLDER` asks for it."""
        if (folder := self.request.extra.get("packs")) is not None:
            model.preprocess = self.setup.preprocess
            place = Path(folder) / f"{task.source}-{task.target}-{cell.row.name}-s{cell.seed}.safetensors"
            place.parent.mkdir(parents=True, exist_ok=True)
            undrift.save(model, place, name=task.target)

    def recipe(self, cell: Cell) -> tuple[Method, int]:
        """Return a cell's method and how many epochs it has here."""
        try:
            recipe = methods.get(cell.row.method, "adapt")
        except OptionError as error:
            raise CannotRun(str(error)) from error
        return recipe, self.setup.epochs or recipe.epochs

    def source(self, cell: Cell, task: Task) -> nn.Module:
        """Return the source network that a cell takes a copy of."""
        return self.sources.network(task.source, cell.seed, masks=MaskedGradients in self.recipe(cell)[0].keepers)

    def adapted(self, cell: Cell, source: nn.Module, target: TensorDomain, each: Callable[[], None]) -> History:
        """Return what became of a copy of the source network on the target; `each` is called before every batch."""
        recipe, epochs = self.recipe(cell)
        centre = replace(self.centre, usual=recipe.batch_size)
        windows = RandomView(**vars(centre), each=each)
        net = copy.deepcopy(source).to(self.device)
        if self.request.fast:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.manual_seed(cell.seed)
        return undrift.adapt(
            net,
            target.prepared(windows),
            method=cell.row.method,
            epochs=epochs,
            clean=target.prepared(centre),
            generator=torch.Generator().manual_seed(cell.seed),
            progress=False,
            **cell.row.settings,
        )

    def scores(self, model: Perturbed, domain: TensorDomain, batch: int, samples: int | None = None) -> Scores:
        """Return the scores on the centre crops of a labelled domain."""
        return self.scored(model, domain, batch, samples).scores()[0]

    def scored(self, model: Perturbed, domain: TensorDomain, batch: int, samples: int | None = None) -> Scoring:
        """Answer the centre crops of a labelled domain, with the draws and views that `predict` takes by itself."""
        labels = domain.labels
        assert labels is not None, "a benchmark's images have labels"
        alone = any(policy.statistics == "batch" for policy in model.norms)
        size = avoid_last_single(batch if alone else LARGE, len(domain))
        # A size that adaptation had is known already; another would be tried for a dozen batches.
        centre = replace(self.centre, usual=batch if alone else None)
        scoring = Scoring()
        for start in range(0, len(domain), size):
            images, truth = domain.images[start : start + size], labels[start : start + size]
            answer = undrift.predict(model, centre(images), samples)
            scoring.add(answer.probs, answer.label, truth, torch.zeros_like(truth))
        return scoring


def _source_mask(model: Perturbed) -> contextlib.AbstractContextManager[None]:
    """Turn on the source's feature mask of an adapted network with masks: G-SFDA is told which domain an image is of.

    Row 1, not row 0: adaptation exchanges the rows, so that the mask of the network's own domain is always the first.
    """
    masks = masks_of(model)
    return contextlib.nullcontext() if masks is None else masks.using(1)
