"""Question: would another σ do better: one that the data decides, or one without the first layer?

Offline the KL alone moves σ (benchmarks/sigma_why.py); on a stream Adam hardly moves it at all, 5e-4 in ln σ² a step.
Here VMP adapts on the three development corruptions (speckle noise, Gaussian blur, saturate; severity 5; WRN-40-2, one
after another, batches of 200), with the rate of log-variances multiplied, with the KL and without it, beside σ = 0 and
σ that stays. Seed 0.

Predicted: with the KL, σ grows everywhere and error with it. Without it, entropy makes σ smaller, most in the first
layer, whose noise costs most; error comes near that of σ = 0, and likelihood loses what the draws had gained. Where the
first layer has no noise, error is within half a point of σ = 0's, with a better likelihood; with 0.04 and 0.1 Var in
the others, a little more of both.

    python benchmarks/sigma_choice.py --data ../shared/data/cifar10 --images 1000 --draws 5 --out benchmarks/results
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift.judge import shift
from undrift.system.atomic import write_bytes
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

BATCH = 200
VARIANTS: dict[str, dict[str, Any]] = {
    "σ = 0": {"layers": ()},
    "σ stays": {"log_var_lr_scale": 0.0},
    "VMP as it is": {},
    "rate × 100": {"log_var_lr_scale": 100.0},
    "rate × 1,000": {"log_var_lr_scale": 1000.0},
    "rate × 100, no KL": {"log_var_lr_scale": 100.0, "kl_weight": 0.0},
    "rate × 1,000, no KL": {"log_var_lr_scale": 1000.0, "kl_weight": 0.0},
    "no noise in the first layer": {"skip_first": 1},
    "… and σ² = 0.04 Var": {"skip_first": 1, "init_fraction": 0.04},
    "… and σ² = 0.1 Var": {"skip_first": 1, "init_fraction": 0.1},
}


def run(net: nn.Module, images: Tensor, labels: Tensor, draws: int, **changes: Any) -> dict[str, Any]:
    """Return error and NLL of the answers, and σ over its kernel's deviation at the end, by layer."""
    torch.manual_seed(0)
    draws = 0 if changes.get("layers") == () else draws
    generator = torch.Generator().manual_seed(0)
    stream = undrift.stream(
        net, images.split(BATCH), method="vmp:paper", test_samples=draws, generator=generator, **changes
    )
    probs = torch.cat([answer.probs.cpu() for answer in stream])
    sigma = {row.layer: row.relative[0] for row in shift.sigma(stream.model)}
    stream.remove()
    wrong = (probs.argmax(1) != labels).float().mean()
    return {"error": float(wrong), "nll": float(F.nll_loss(probs.clamp_min(1e-12).log(), labels)), "sigma": sigma}


def line(name: str, one: dict[str, Any]) -> str:
    """Return a line of the table."""
    sigma = dict(one["sigma"])
    ends = [sigma.pop(layer, None) for layer in ("conv1", "fc")]
    mean = sum(sigma.values()) / len(sigma) if sigma else None
    where = ["–" if value is None else f"{value:.3f}" for value in (ends[0], mean, ends[1])]
    return f"| {name} | {100 * one['error']:.2f} | {one['nll']:.3f} | " + " | ".join(where) + " |"


def main() -> None:
    """Run, and write as streams finish; a finished one is not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000, help="of each corruption")
    parser.add_argument("--draws", type=int, default=10, help="an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    images, labels = development(asked.data, asked.images, torch.device(asked.device))
    place = asked.out / "sigma-choice.json"
    here = machine(torch.device(asked.device))
    of = {"hardware": here["hardware"], "images": asked.images, "draws": asked.draws}
    result: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {}
    if not result.items() >= of.items():
        result = here | of | {"variants": {}}
    print("| | error % | NLL | σ/std, first layer | between, mean | last |\n|---|---:|---:|---:|---:|---:|")
    for name, changes in VARIANTS.items():
        if name not in result["variants"]:
            net = zoo.load("wrn40_2", asked.data / "wrn40_2.safetensors").to(asked.device).eval()
            begun = time.perf_counter()
            one = run(net, images, labels, asked.draws, **changes)
            result["variants"][name] = one | {"seconds": time.perf_counter() - begun}
            write_bytes(place, json.dumps(result, indent=1, ensure_ascii=False).encode())
        print(line(name, result["variants"][name]), flush=True)


if __name__ == "__main__":
    main()
