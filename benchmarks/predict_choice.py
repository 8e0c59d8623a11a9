"""Question: how should predict(mode="fast") spend two to three draws an image, and how should it average them?

Choices: which images get a third draw, how many draws the answer is to be as sharp as (ten, or infinitely many), and
the part of the draws' mean logits in it; the rest is the logarithm of their mean probability. They are compared on
speckle noise, Gaussian blur and saturate (severity 5), never on the fifteen that are reported on. For each of these the
logits of the mean network and of 24 draws are made once; the target is the NLL of ten of the draws, averaged over 200
ways to pick them, and each choice is the mean over 100 ways to pick its two or three. WRN-40-2, batches of 200, seed 0;
moving statistics of one noisy pass. Beside the choices: the mean network, and two and three draws as they are.

    python benchmarks/predict_choice.py --data ../shared/data/cifar10 --images 400

With --corruptions it looks at others, to see and not to choose (results/predict_choice_fifteen.json, 200 images each).
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift.answer.fast_mode import THIRD, evenly, temperature_of
from undrift.answer.prediction import entropy_of
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.judge.metrics import scored
from undrift_bench import data, zoo

BATCH, DRAWS, WAYS = 200, 24, 100
SETTINGS: dict[str, dict[str, Any]] = {
    "0.04 × Var, all but the first layer": {"init_fraction": 0.04, "skip_first": 1},
    "0.01 × Var, all layers": {"init_fraction": 0.01},
}


@torch.no_grad()
def logits(net: torch.nn.Module, x: Tensor, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the logits of the mean network and of all draws."""
    generator = torch.Generator().manual_seed(0)
    model = undrift.perturb(net, norm_statistics="moving", norm_momentum=1.0, generator=generator, **changes)
    model.key.training = True
    model(x[:BATCH])
    model.key.training = False
    with model.mean():
        mean = torch.cat([model(part) for part in x.split(BATCH)])
    draws = torch.stack([torch.cat([model(part) for part in x.split(BATCH)]) for _ in range(DRAWS)])
    model.remove()
    return mean.cpu(), draws.cpu()


@dataclass(frozen=True)
class Choice:
    """How to spend up to three draws of an image, and how to average them.

    Attributes:
        third: the part of a batch's images that gets a third draw.
        stands_for: how many draws the answer is to be as sharp as.
        part: of the mean logits; the rest is the logarithm of the mean probability.
        ranked: whether the third draw goes where the first two disagree, which takes a pass of its own.
    """

    third: float = THIRD
    stands_for: float = 10
    part: float = 1.0
    ranked: bool = False

    def probs(self, draws: Tensor) -> Tensor:
        """Return one batch's answers from the log-probabilities of three draws."""
        two, share = draws[:2], 1 / self.stands_for
        rows = disputed(two, self.third) if self.ranked else evenly(two[0], self.third)
        logits = mixed(two, self.part)
        if self.third:
            logits[rows] = mixed(draws[:, rows], self.part)
        across, own = two.sum(0).exp().sum(1).mean(), (2 * two).exp().sum(2).mean()
        return (logits / temperature_of([logits], (1 - share) * across + share * own)).softmax(1)


def disputed(two: Tensor, part: float) -> Tensor:
    """Return the rows, that part of them, on which two draws disagree most: largest mutual information."""
    probs = two.exp().movedim(0, 2)
    mutual = entropy_of(probs.mean(2)) - entropy_of(probs).mean(1)
    return mutual.topk(round(part * len(mutual)), sorted=False).indices


def mixed(draws: Tensor, part: float) -> Tensor:
    """Return `part` of the draws' mean log-probabilities, and the rest of the logarithm of their mean probability."""
    return part * draws.mean(0) + (1 - part) * draws.logsumexp(0)


CHOICES = {
    "two draws, as ten": Choice(third=0),
    "two draws, as many": Choice(third=0, stands_for=math.inf),
    "third draw for 40 %, as ten (fast)": Choice(),
    "… half of the mean logits": Choice(part=0.5),
    "… none of the mean logits": Choice(part=0.0),
    "70 %, half of the mean logits, as ten (before)": Choice(third=0.7, part=0.5),
    "third draw for 70 %, as ten": Choice(third=0.7),
    "third draw for all, as ten": Choice(third=1.0),
    "third draw for 40 %, as many": Choice(stands_for=math.inf),
    "third draw where two disagree, 40 %, as ten": Choice(ranked=True),
    "third draw where two disagree, 40 %, as many": Choice(stands_for=math.inf, ranked=True),
}


def differences(mean: Tensor, draws: Tensor, labels: Tensor) -> dict[str, float]:
    """Return NLL minus that of ten draws, for each choice."""
    logs, found = draws.log_softmax(-1), {}
    target = expected(partial(plain, logs, labels, 10), 200)
    found["samples=0"] = scored(mean.softmax(1), labels).nll - target
    for count in (2, 3):
        found[f"{count} draws, averaged"] = expected(partial(plain, logs, labels, count), WAYS) - target
    for name, choice in CHOICES.items():
        found[name] = expected(partial(one_way, choice, logs, labels), WAYS) - target
    return found


def expected(score: Callable[[Tensor], float], ways: int) -> float:
    """Return the mean score over ways to order the draws, the same ways for every score."""
    generator = torch.Generator().manual_seed(0)
    return sum(score(torch.randperm(DRAWS, generator=generator)) for _ in range(ways)) / ways


def plain(logs: Tensor, labels: Tensor, count: int, pick: Tensor) -> float:
    """Return the NLL of the mean probability of some draws."""
    return scored(logs[pick[:count]].exp().mean(0), labels).nll


def one_way(choice: Choice, logs: Tensor, labels: Tensor, pick: Tensor) -> float:
    """Return the NLL of a choice, batch by batch as a stream would ask it."""
    return scored(torch.cat([choice.probs(batch) for batch in logs[pick[:3]].split(BATCH, dim=1)]), labels).nll


def main() -> None:
    """Compare the choices, and write predict_choice.json as corruptions finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--corruptions", nargs="*", default=list(DEVELOPMENT))
    arguments = parser.parse_args()
    clean, labels = next(iter(data.cifar10(arguments.data).select(range(arguments.images)).batches(10**6)))
    net = zoo.load("wrn40_2", arguments.data / "wrn40_2.safetensors").to(arguments.device).eval()
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    result: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "images": arguments.images}
    for setting, changes in SETTINGS.items():
        result[setting] = {}
        for name in arguments.corruptions:
            mean, draws = logits(net, corrupt(clean, name, 5).to(arguments.device), changes)
            result[setting][name] = differences(mean, draws, labels)
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "predict_choice.json").write_text(json.dumps(result, indent=1) + "\n")
        for choice in result[setting][arguments.corruptions[0]]:
            each = [result[setting][name][choice] for name in arguments.corruptions]
            numbers = " ".join(f"{v:+.4f}" for v in each)
            print(f"{setting}: {choice}: ΔNLL {sum(each) / len(each):+.4f} ({numbers})", flush=True)


if __name__ == "__main__":
    main()
