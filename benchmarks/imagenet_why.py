"""Question: why does Tent gain so much less on ImageNet-C here than published?

The suspect is our network: its weights are Keras', and the scales γ of its norm layers need not be those of the network
that rates were published for. The same function with γ twice as large has gradients half as large, so that a step of
SGD moves it a fourth as far: a rate has no meaning without the scale of what it moves. If that is all, Tent at larger
rates gains what was published (Adam's steps, on CIFAR, depend on it less). The fifteen corruptions, one after another,
never reset; nothing is chosen by it.

    python benchmarks/imagenet_why.py --data ../shared/data/imagenet --weights resnet50_imagenet.safetensors
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import CORRUPTIONS
from undrift_bench import data, zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.online.corrupted import Corrupted
from why_options import options

NETWORK, BATCH, RATE = "resnet50_v1", 64, 2.5e-4
FACTORS = (1, 4, 16, 64)


def scales(net: nn.Module) -> dict[str, float]:
    """Return the quartiles of |γ| over all norm layers."""
    found = torch.cat([layer.weight.detach().abs() for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)])
    return dict(zip(("25 %", "median", "75 %"), found.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist(), strict=True))


def errors(net: nn.Module, kinds: Tensor, labels: Tensor, rate: float, fast: bool) -> dict[str, float]:
    """Return Tent's error on each corruption of one stream, at a rate of SGD; at 0, of norm statistics alone."""
    torch.manual_seed(0)
    device = next(net.parameters()).device
    normalise = zoo.preprocess(NETWORK).normalise
    batches = (normalise(part.to(device)) for images in kinds for part in images.split(BATCH))
    how = {"method": "tent:imagenet", "stream_lr": rate} if rate else {"method": "norm-stats"}
    with quickly(device, fast):
        answers = torch.cat([answer.label for answer in undrift.stream(net, batches, **how)]).view(len(kinds), -1)
    wrong = (answers != labels.to(answers.device)).float().mean(1)
    return dict(zip(CORRUPTIONS, wrong.tolist(), strict=True))


def main() -> None:
    """Run each rate, and write imagenet-why.json as answers come; what is in it is not run again."""
    parser = options(__doc__, images=5_000)
    parser.add_argument("--cache", type=Path, help="keep corrupted images here, as `undrift bench --cache` does")
    parser.add_argument("--factors", type=float, nargs="*", default=FACTORS, help="of the published rate")
    asked = parser.parse_args()
    device, fast = torch.device(asked.device), asked.device != "cpu"
    clean = data.imagenet(asked.data, seed=0).hold("cpu")
    assert clean.labels is not None
    count = min(asked.images, len(clean))
    kinds = Corrupted(clean, device, asked.cache, asked.frost).held([(name, 5) for name in CORRUPTIONS], count)

    place = asked.out / "imagenet-why.json"
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {**machine(device), "network": NETWORK, "images": count, "rate": RATE}
    result: dict[str, Any] = {**about, "scales": scales(zoo.load(NETWORK, asked.weights)), "error": {}}
    if place.is_file() and (known := json.loads(place.read_text())).items() >= about.items():
        result = known
    for factor in (0.0, *asked.factors):
        name = f"{factor:g}"
        if name not in result["error"]:
            begun = time.perf_counter()
            net = zoo.load(NETWORK, asked.weights).to(device).eval()
            net = net.to(memory_format=torch.channels_last) if fast else net  # type: ignore[call-overload]
            wrong = errors(net, kinds, clean.labels[:count], factor * RATE, fast)
            mean = sum(wrong.values()) / len(wrong)
            print(f"rate × {name}: error {100 * mean:.2f} %, {time.perf_counter() - begun:.0f} s", flush=True)
            result["error"][name] = {"mean": mean, "by_corruption": wrong}
            place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
