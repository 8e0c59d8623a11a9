"""Question: how should predict(mode="fast") average its two draws?

The choice is the part of the draws' mean logits in the answer; the rest is the logarithm of their mean probability.
The parts are compared on speckle noise, Gaussian blur and saturate (severity 5), never on the fifteen that are reported
on. For each of them the logits of the mean network and of 24 draws are made once; the target is the NLL of ten of these
draws, averaged over 200 ways to pick them, and each choice is the mean over 60 ways to pick its two draws. WRN-40-2,
batches of 200, seed 0; moving statistics of one noisy pass. Beside the parts: the mean network, two draws as they are,
and an earlier form of "fast": half the mean network's logits and half those of one draw, of two for every second image.

    python benchmarks/predict_choice.py --data ../shared/data/cifar10 --images 2000
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift import data, metrics, zoo
from undrift._few import Few, answer, temperature_of
from undrift.data.corrupt import DEVELOPMENT, corrupt

BATCH, DRAWS = 200, 24
SETTINGS: dict[str, dict[str, Any]] = {
    "0.04 × Var, all but the first layer": {"init_fraction": 0.04, "skip_first": 1},
    "0.01 × Var, all layers": {"init_fraction": 0.01},
}
PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)


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


def differences(mean: Tensor, draws: Tensor, labels: Tensor) -> dict[str, float]:
    """Return NLL minus that of ten draws, for each choice."""
    pick = torch.Generator().manual_seed(0)
    probs = draws.softmax(-1)

    def some(count: int) -> Tensor:
        return torch.randperm(len(draws), generator=pick)[:count]

    target = sum(metrics.nll(probs[some(10)].mean(0), labels) for _ in range(200)) / 200
    found = {"samples=0": metrics.nll(mean.softmax(1), labels) - target}
    found["two draws, averaged"] = sum(metrics.nll(probs[some(2)].mean(0), labels) for _ in range(60)) / 60 - target
    found["earlier form"] = sum(metrics.nll(earlier(mean, *draws[some(2)]), labels) for _ in range(60)) / 60 - target
    sound = torch.ones(BATCH, dtype=torch.bool)
    for part in PARTS:
        total = 0.0
        for _ in range(60):
            first, second = draws[some(2)]
            answers = [
                answer([Few.of(a, b, sound[: len(a)], part)], 10).probs
                for a, b in zip(first.split(BATCH), second.split(BATCH), strict=True)
            ]
            total += metrics.nll(torch.cat(answers), labels) - target
        found[f"fast, {part:g} of the mean logits"] = total / 60
    return found


def earlier(mean: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the probabilities of the earlier form, batch by batch; temperature as in `answer`."""
    probs = []
    for m, a, b in zip(mean.split(BATCH), first.split(BATCH), second.split(BATCH), strict=True):
        drawn = a.clone()
        drawn[::2] = (a[::2] + b[::2]) / 2
        p, q = a[::2].softmax(1), b[::2].softmax(1)
        target = 0.9 * (p * q).sum(1).mean() + 0.1 * (p.square().sum(1) + q.square().sum(1)).mean() / 2
        logits = (m + drawn) / 2
        probs.append((logits / temperature_of([logits], target)).softmax(1))
    return torch.cat(probs)


def main() -> None:
    """Compare the choices, and write predict_choice.json as corruptions finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=2000)
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
