"""Question: which rates should `tent-ft`, `bacs` and `bbb` have, which consistency `vmp-roid`, where no author says?

Four values each, the same budget, on speckle noise, Gaussian blur and saturate (severity 5), one after another and
never reset; never on the fifteen that results are reported on. ROID, whose author gives 1, runs beside. The rule: the
least error over the whole stream; of values within two standard errors of it, the one nearest to the authors' (Tent's
and PETAL's 1e-3, VMP's 5e-4 for `bbb`, ROID's 1). Short streams flatter a rate that ruins a network slowly: 10,000
images each where there is a GPU. WRN-40-2, batches of 200, seed 0. `bacs` runs with a posterior of that network
(benchmarks/posterior.py), or not at all; its record says how many training images that is of.

    python benchmarks/rates.py --data ../shared/data/cifar10
    python benchmarks/rates.py --data ../shared/data/cifar10 --posterior FILE --posterior-images 50000
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift
from undrift.images import Preprocess
from undrift_bench import zoo
from undrift_bench.bench.online.corrupted import development

BATCH = 200
SEARCHES: dict[str, tuple[str, tuple[float, ...], float]] = {
    "tent-ft": ("stream_lr", (1e-6, 1e-5, 1e-4, 1e-3), 1e-3),
    "bacs": ("stream_lr", (1e-6, 1e-5, 1e-4, 1e-3), 1e-3),
    "bbb": ("stream_lr", (1e-6, 1e-5, 1e-4, 1e-3), 5e-4),
    "vmp-roid": ("consistency", (0.5, 1.0, 2.0, 4.0), 1.0),
    "roid": ("consistency", (0.5, 1.0, 2.0, 4.0), 1.0),
}
"""Method: the setting, its values, and the authors' value of the method it comes from (BACS: PETAL; bbb: VMP)."""


def error(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, method: str, **settings: Any) -> float:
    """Return the part of the answers that were wrong when they were given."""
    torch.manual_seed(0)
    how = {"preprocess": Preprocess(), **settings} if "roid" in method else settings
    answers = undrift.stream(net, images.split(BATCH), method=method, **how)
    wrong = [answer.label.cpu() != truth for answer, truth in zip(answers, labels.split(BATCH), strict=True)]
    answers.model.remove()
    return float(torch.cat(wrong).float().mean())


def chosen(found: dict[float, float], answers: int, authors: float) -> float:
    """Return the value that the rule takes.

    Examples:
        >>> chosen({0.5: 0.20, 1.0: 0.1901, 2.0: 0.19, 4.0: 0.3}, 10_000, 1.0)
        1.0
    """
    least = min(found.values())
    chance = 2 * math.sqrt(least * (1 - least) / answers)
    near = [value for value, wrong in found.items() if wrong <= least + chance]
    return min(near, key=lambda value: abs(math.log(value / authors)))


def begin(known: dict[str, Any] | None, setting: str, posterior_images: int | None) -> dict[str, Any]:
    """Return a method's record to go on with; errors with one posterior say nothing of those with another.

    Examples:
        >>> begin({"setting": "stream_lr", "posterior_images": 10, "error": {"0.1": 0.5}}, "stream_lr", 20)
        {'setting': 'stream_lr', 'posterior_images': 20, 'error': {}}
    """
    of = {} if posterior_images is None else {"posterior_images": posterior_images}
    fresh = {"setting": setting, **of, "error": {}}
    return fresh if known is None or known.get("posterior_images") != posterior_images else known


def main() -> None:
    """Search, and write rates.json (on a GPU rates-cuda.json) as streams finish; a finished one is not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=10_000, help="of each corruption")
    parser.add_argument("--only", default=",".join(SEARCHES), help="methods, with commas between")
    parser.add_argument("--posterior", type=Path, help="of wrn40_2, for bacs; a file of benchmarks/posterior.py")
    parser.add_argument("--posterior-images", type=int, help="how many training images it was collected on")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - SEARCHES.keys():
        parser.error(
            f"--only names {', '.join(sorted(unknown))}; needed: some of {', '.join(SEARCHES)}. Leave it out for all."
        )
    if (arguments.posterior is None) != (arguments.posterior_images is None):
        parser.error("--posterior and --posterior-images go together: the record says what the posterior is of.")
    device = torch.device(arguments.device)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    place = arguments.out / ("rates-cuda.json" if device.type == "cuda" else "rates.json")
    result: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "images": arguments.images}
    if place.is_file() and (known := json.loads(place.read_text())).items() >= result.items():
        result = known
    images, labels = development(arguments.data, arguments.images, device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for method in arguments.only.split(","):
        setting, values, authors = SEARCHES[method]
        if method == "bacs" and arguments.posterior is None:
            print("bacs: not searched, it needs --posterior FILE", flush=True)
            continue
        part = {"posterior": str(arguments.posterior)} if method == "bacs" else {}
        found = result[method] = begin(result.get(method), setting, arguments.posterior_images if part else None)
        for value in values:
            if str(value) in found["error"]:
                continue
            net = zoo.load("wrn40_2", arguments.data / "wrn40_2.safetensors").to(device).eval()
            begun = time.perf_counter()
            wrong = found["error"][str(value)] = error(net, images, labels, method, **part, **{setting: value})
            print(
                f"{method} {setting}={value}: error {100 * wrong:.2f} %, {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
            place.write_text(json.dumps(result, indent=1) + "\n")
        errors = {float(value): wrong for value, wrong in found["error"].items()}
        found["chosen"] = chosen(errors, len(labels), authors)
        print(f"{method}: the rule takes {found['chosen']}", flush=True)
        place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
