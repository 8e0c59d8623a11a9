"""Measure a run: scores kept on the device, time of a few batches, peak memory, the machine."""

import datetime
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from undrift.answer.prediction import Prediction
from undrift.judge.metrics import Scores, Tally

WARM_UP, TIMED = 10, 20
RISKS = (0.01, 0.05, 0.1)  # that `Prediction.certain` is asked for
LEAST = 2.0**-126  # as in undrift.judge.metrics: a probability of 0 costs 87.3 nats
T = TypeVar("T")


class Scoring:
    """Scores by domain of answers that come batch by batch; nothing leaves the device before the end."""

    def __init__(self) -> None:
        self._columns: list[Tensor] = []
        self._domains: list[Tensor] = []
        self._answered: list[Tensor] = []  # for each risk of RISKS, which answers of a batch are certain
        self._right: Tensor | None = None  # counted on the device, for the running error
        self._seen = 0

    def add(self, probs: Tensor, label: Tensor, truth: Tensor, domain: Tensor) -> None:
        """Take in one batch: probabilities, answers (−1: none), true classes, and the number of each image's domain."""
        p = probs.detach().double()
        true = p.gather(1, truth[:, None])[:, 0]
        brier = p.square().sum(1) - 2 * true + 1
        columns = (p.amax(1), label == truth, -true.clamp_min(LEAST).log(), brier, label < 0)
        self._columns.append(torch.stack([c.double() for c in columns]))
        self._domains.append(domain)
        answer = Prediction(probs, label, entropy=p[:, 0], mutual_info=p[:, 0])  # neither of the two is looked at
        self._answered.append(torch.stack([answer.certain(risk=risk) for risk in RISKS]))
        right = columns[1].sum()
        self._right = right if self._right is None else self._right + right
        self._seen += len(truth)

    def error(self) -> float:
        """Return the share of wrong answers so far; waits for the device."""
        return 1 - float(self._right) / self._seen if self._right is not None else math.nan

    def right(self) -> Tensor:
        """Return for each answer, in the order given, whether it was right."""
        return torch.cat(self._columns, 1)[1].cpu() > 0

    def scores(self) -> dict[int, Scores]:
        """Return the scores of each domain, by its number."""
        columns, domains = torch.cat(self._columns, 1).cpu(), torch.cat(self._domains).cpu()
        return {int(d): _Kept(columns[:, domains == d]).scores() for d in domains.unique()}

    def certain(self) -> dict[str, dict[str, float | None]]:
        """Return for each wanted risk which part of the images was answered, and which part of these was wrong."""
        right, answered = torch.cat(self._columns, 1)[1].cpu(), torch.cat(self._answered, 1).double().cpu()
        found: dict[str, dict[str, float | None]] = {}
        for risk, kept in zip(RISKS, answered, strict=True):
            count = float(kept.sum())
            error = 1 - float((right * kept).sum()) / count if count else None
            found[str(risk)] = {"coverage": count / len(right), "error": error}
        return found


class _Kept(Tally):
    def __init__(self, columns: Tensor) -> None:
        super().__init__()
        self._kept = [columns]


class Clock:
    """The median time of a few calls after a warm-up; only these wait for the device."""

    def __init__(self, device: torch.device, calls: int) -> None:
        self.device = device
        first = min(WARM_UP, calls // 3)
        self._sample = range(first, first + TIMED)
        self._calls, self._times = 0, list[float]()

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what the work returns, timed where it is this call's turn."""
        timed = self._calls in self._sample
        self._calls += 1
        if not timed:
            return work()
        wait(self.device)
        start = time.perf_counter()
        result = work()
        wait(self.device)
        self._times.append(time.perf_counter() - start)
        return result

    @property
    def milliseconds(self) -> float | None:
        """The median, or None where nothing was timed."""
        return 1e3 * statistics.median(self._times) if self._times else None

    @property
    def count(self) -> int:
        """How many calls it is the median of."""
        return len(self._times)


class PeakMemory:
    """The peak of device memory from here on, without images that are already there; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Start measuring, before the network is on the device."""
        self.device, self._before = device, 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> float | None:
        """Return the peak since the start, in MiB."""
        if self.device.type != "cuda":
            return None
        return (torch.cuda.max_memory_allocated(self.device) - self._before) / 2**20


def laps(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Return the seconds that each of so many calls took, from one that the device was idle before to its end."""
    found = []
    for _ in range(count):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - start)
    return found


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def learnables(model: nn.Module) -> int:
    """Return how many numbers the model may change by gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a record says of where and when it was made."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    return {"hardware": name, "date": today, "torch": torch.__version__}


def means(by_domain: dict[str, Scores]) -> dict[str, Any]:
    """Return the numbers of a table: means over domains, each counting once, and each domain's own."""
    names = ("error", "nll", "brier", "ece", "aurc", "augrc")
    domains = {name: {n: getattr(scores, n) for n in names} for name, scores in by_domain.items()}
    whole: dict[str, Any] = {n: statistics.fmean(d[n] for d in domains.values()) for n in names}
    return whole | {
        "unanswered": sum(scores.unanswered for scores in by_domain.values()),
        "scored": sum(scores.count for scores in by_domain.values()),
        "domains": domains,
    }
