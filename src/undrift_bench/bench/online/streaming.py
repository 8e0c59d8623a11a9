"""Run one online cell: a fresh copy of the network follows the stream, then answers clean images."""

import copy
import gc
import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import undrift
from undrift._errors import OptionError, UndriftError
from undrift.images import Preprocess, TensorDomain
from undrift.options import answering_draws
from undrift.packs.fingerprint import fingerprint
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.measure import Clock, PeakMemory, Scoring, learnables, means
from undrift_bench.bench.harness.quickly import by_pass, quickly
from undrift_bench.bench.harness.request import CannotRun, Request
from undrift_bench.bench.harness.tiny_parts import TinyParts
from undrift_bench.bench.online.corrupted import Corrupted
from undrift_bench.bench.online.settings import StreamPlan, StreamSetting, plan

if TYPE_CHECKING:
    from undrift_bench.bench.online.benchmark import OnlineBenchmark

SHOWN_EVERY = 25  # batches; each look at the running error waits for the device
SOURCE_SETTINGS = ("source", "source_images")  # how a method asks for source images
TRAINED = {
    "head": "a rotation head that was trained with the source network: undrift_bench.train.train_rotation writes one",
    "posterior": "a posterior over the source network's weights: undrift_bench.train.collect_moments(…).save makes it",
}
"""Settings that name a part from source training; without it a method runs on an untrained one, and says nothing."""
FEW_CLEAN = 2000
SOURCE_IMAGES = 2000  # as many as EATA's authors take


class Streaming:
    """Runs the cells of one benchmark; networks, clean and corrupted images are loaded when first needed."""

    def __init__(self, benchmark: "OnlineBenchmark", request: Request) -> None:
        self.benchmark, self.request, self.device = benchmark, request, request.place
        self._networks: dict[str, nn.Module] = {}

    @cached_property
    def clean(self) -> TensorDomain:
        """The clean test images, on the CPU, framed and still to be normalised."""
        return self.benchmark.clean(self.request)

    @cached_property
    def corrupted(self) -> Corrupted:
        """Their corruptions."""
        return Corrupted(self.clean, self.device, self.request.cache, self.request.frost)

    @cached_property
    def untrained(self) -> TinyParts:
        """What stands for trained parts where the network is the tiny one."""
        return TinyParts(self.network(self.benchmark.networks[0].name))

    def network(self, name: str) -> nn.Module:
        """Return a source network, on the CPU: each cell takes a copy of its own."""
        if name not in self._networks:
            known = {network.name: network for network in self.benchmark.networks}
            self._networks[name] = known[name].load(self.request)
        return self._networks[name]

    def __call__(self, cell: Cell, bar: Bar) -> Mapping[str, Any]:
        """Return the numbers of one cell."""
        setting = next(s for s in self.benchmark.settings if s.name == cell.setting)
        settings = self.given(cell, setting)
        self.network(cell.network)  # that its file is missing shows before images are made
        feed = self.feed(cell, setting)
        begun = time.monotonic()  # images and networks are loaded once, for all cells
        gc.collect()  # hooks make circles: the last cell's network must not be freed in the middle of this one's count
        memory = PeakMemory(self.device)
        scoring, cycles = Scoring(), Scoring()
        clock = Clock(self.device, len(feed.plan.batches))
        with quickly(self.device, self.request.fast):
            stream = self.begin(cell, feed, settings)
            for number, (truth, domain, cycle) in enumerate(feed.batches()):
                answer = clock(lambda: next(stream))
                scoring.add(answer.probs, answer.label, truth, domain)
                if setting.cycles > 1:
                    cycles.add(answer.probs, answer.label, truth, cycle)
                if number % SHOWN_EVERY == 0:
                    bar.advance(0, error=f"{100 * scoring.error():.1f} %")
            peak, model = memory.peak(), stream.model
            samples = answering_draws(model.options)
            with stream.answering():
                forgotten = self._clean_error(model, feed, samples, views_of(stream))
        corruptions = self.benchmark.corruptions
        numbers = means({corruptions[d]: scores for d, scores in scoring.scores().items()})
        return numbers | {
            # What the stream did with its batches: SAR may answer most of them with the source's weights put back.
            **{name: getattr(stream.report, name) for name in ("steps", "missed", "resets")},
            "source_error_after": forgotten,
            "clean_samples": samples,
            "trained": {name: _sha256(settings[name]) for name in TRAINED if name in settings},
            # Of gathered images the first batches have no step: their time is not that of the method.
            "milliseconds": None if setting.gather or "shared" in self.request.extra else clock.milliseconds,
            "peak_mib": peak,
            "learnables": learnables(model),
            "file_bytes": file_bytes(model),
            "certain": scoring.certain(),
            "batch": feed.size,
            **({"cycles": [s.error for _, s in sorted(cycles.scores().items())]} if setting.cycles > 1 else {}),
            **({} if setting.gather is None else {"gather": setting.gather}),
            **({"balanced": True} if setting.balanced else {}),
            "seconds": time.monotonic() - begun,
            "corrupted_on": self.device.type,
            "options": model.options.as_dict(),
            "source_network": fingerprint(self.network(cell.network))[:12],
        }

    def begin(self, cell: Cell, feed: "Feed", settings: Mapping[str, Any]) -> undrift.Stream:
        """Return a cell's method on the stream, with a copy of its source network."""
        net = copy.deepcopy(self.network(cell.network)).to(self.device)
        if self.request.fast:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            by_pass(net, feed.usual)
        torch.manual_seed(cell.seed)
        return undrift.stream(net, feed, method=cell.row.method, **settings)

    def feed(self, cell: Cell, setting: StreamSetting) -> "Feed":
        """Return what hands a cell's method its batches."""
        benchmark, labels = self.benchmark, self.clean.labels
        assert labels is not None
        count = min(cell.images, len(self.clean))
        size = setting.batch or benchmark.batch
        network = next(n for n in benchmark.networks if n.name == cell.network)
        images = self.corrupted.held(setting.kinds(benchmark.corruptions), count)
        laid_out = plan(setting, benchmark.corruptions, labels, count, size, cell.seed)
        fast = self.request.fast
        return Feed(images, labels, laid_out, network.preprocess, self.device, fast, size, setting.gather or size)

    def given(self, cell: Cell, setting: StreamSetting) -> dict[str, Any]:
        """Return all that a cell's method is given beside the network and the images."""
        ways = {"episodic": setting.episodic or None, "gather": setting.gather, "balanced": setting.balanced or None}
        given = {name: value for name, value in ways.items() if value is not None}
        return {**cell.row.settings, **self._needed(cell, setting), **given}

    def _needed(self, cell: Cell, setting: StreamSetting) -> dict[str, Any]:
        """Return what a method asks for: preprocessing, the batch, trained parts, or clean images without labels."""
        try:
            known = undrift.methods.get(cell.row.method, "stream").settings()
        except OptionError as error:
            raise CannotRun(str(error)) from error
        network = next(n for n in self.benchmark.networks if n.name == cell.network)
        needed: dict[str, Any] = {"preprocess": network.preprocess} if "preprocess" in known else {}
        if "batch" in known:  # ROID's authors divide by the configured one, in a domain's last batch too
            needed["batch"] = setting.gather or setting.batch or self.benchmark.batch
        parts = [name for name in known if name in TRAINED and name not in cell.row.settings]
        needed |= {name: self._trained(cell, name) for name in parts}
        asked = [name for name in known if name in SOURCE_SETTINGS]
        if asked:
            images = self.clean.images[:SOURCE_IMAGES].to(self.device)
            needed[asked[0]] = [network.preprocess.normalise(part) for part in images.split(self.benchmark.batch)]
        return needed

    def _trained(self, cell: Cell, name: str) -> Path:
        """Return the file of a part from source training that a method cannot do without."""
        given = self.request.extra.get(name)
        if given is None and self.request.tiny:
            return self.untrained.file(name)
        if given is None or not Path(given).is_file():
            found = f"no {name} was given" if given is None else f"{given} is no file"
            alone = "" if self.request.tiny else f", one network at a time (--networks {cell.network})"
            raise CannotRun(f"{found}; {cell.row.method} needs {TRAINED[name]}. Give it with --set {name}=FILE{alone}.")
        return Path(given)

    def _clean_error(self, model: nn.Module, feed: "Feed", samples: int, views: Sequence[str]) -> float:
        """Return the error on clean source images of the network as the stream left it, with so many draws per view."""
        labels = self.clean.labels
        assert labels is not None
        wanted = self.request.images  # fewer than all: then a part of the clean ones will do, too
        count = len(self.clean) if wanted is None else min(len(self.clean), FEW_CLEAN)
        scoring = Scoring()
        for start in range(0, count, self.benchmark.batch):
            some = slice(start, min(start + self.benchmark.batch, count))
            raw = self.clean.images[some].to(self.device, non_blocking=True)
            answer = undrift.predict(model, feed.ready(raw), samples, views=views)
            truth = labels[some].to(self.device, non_blocking=True)
            scoring.add(answer.probs, answer.label, truth, torch.zeros_like(truth))
        return scoring.error()


class Feed:
    """Hands a stream its batches one by one; each is ready on the device before its time is taken.

    Attributes:
        size: images of a batch; `usual`: of a step.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        laid_out: StreamPlan,
        preprocess: Preprocess,
        device: torch.device,
        fast: bool,
        size: int,
        usual: int,
    ) -> None:
        self.images, self.plan, self.preprocess = images, laid_out, preprocess
        self.device, self.fast, self.size, self.usual = device, fast, size, usual
        self._kind, self._image = laid_out.kind.to(images.device), laid_out.image.to(images.device)
        self._truth = labels[laid_out.image].to(device)
        self._domain, self._cycle = laid_out.domain.to(device), laid_out.cycle.to(device)
        self._ready: Tensor | None = None

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Make each batch ready in turn; yield its true classes, domains and cycles, which the stream does not see."""
        for begin, end in self.plan.batches:
            some = slice(begin, end)
            raw = self.images[self._kind[some], self._image[some]].to(self.device, non_blocking=True)
            self._ready = self.ready(raw)
            yield self._truth[some], self._domain[some], self._cycle[some]

    def ready(self, raw: Tensor) -> Tensor:
        """Return images as the network wants them."""
        images = self.preprocess.normalise(raw)
        return images.contiguous(memory_format=torch.channels_last) if self.fast else images

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            assert self._ready is not None, "a batch is made ready before the stream asks for it"
            ready, self._ready = self._ready, None
            yield ready


def views_of(stream: undrift.Stream) -> tuple[str, ...]:
    """Return the names of the views that a stream's answers are averaged over, be it by the loop or the likelihood."""
    own = getattr(stream.online.likelihood, "views", None)
    return own if isinstance(own, tuple) else stream.online.views.names


def _sha256(file: Path) -> str:
    """Return which file a trained part came from: its name and the start of its hash."""
    return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def file_bytes(model: Any) -> int | None:
    """Return the size of the domain file, or None where the model cannot be saved (a network that diverged)."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return undrift.save(model, Path(folder, "domain.safetensors"))
        except UndriftError:
            return None
