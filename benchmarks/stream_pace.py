"""Question: which pace of kept norm statistics on a stream (`stream_norm_momentum`) does the written rule take?

Five values, 0.1 to 1, on speckle noise, Gaussian blur and saturate (severity 5), one after another and never reset;
never on the fifteen that results are reported on. `vmp:paper` on WRN-40-2, batches of 200, and of 50, where an average
should be worth most. Under "train" steps normalise by their batch, so the pace changes answers alone: one stream makes
the steps, keeps an average for each value, and answers by each with the same noise. That is what five streams give
(`--check` shows it on a few images).

The rule is that of benchmarks/rates.py: the least error; of values within two standard errors of it, the nearest to the
authors'. Their text has an average without a pace, their code the batch's own statistics: that is 1, and stands for
theirs. What the rule would take with PyTorch's 0.1 in its place is recorded beside, and each value's difference from 1,
image by image.

Predicted, error %, before any of it ran:

    pace            0.1    0.2    0.4    0.7    1
    batches of 200  35     29     23.5   21     20.7
    batches of 50   28     23.5   21.5   21     21.5

that is: with 200 images nothing beats 1; with 50 an average of a few batches does, by less than two standard errors.

Seen, 600 images of each, two draws: 42.1, 40.6, 33.1, 24.4, 21.4 and 38.9, 32.1, 25.3, 22.7, 22.3. Slow averages are
worse than predicted: they do not catch up in 600 images. 1 has the least in both, and the rule takes it; with 50 images
0.7 cannot be told from it. Then, to see longer domains, 1,000 of each in batches of 50: 34.3, 27.6, 23.6, 22.0, 22.2.
The rule takes 1 again; with PyTorch's 0.1 as the authors' it would take 0.7 with 50 images, and 1 with 200.

Command:   python benchmarks/stream_pace.py --data ../shared/data/cifar10 --batch 200 [--images 600] [--draws 2]
Hardware:  one CPU core, shared with other work: about five minutes a size of batch.
Seeds:     0 of the noise.
Output:    stream-pace.json under --results, with each answer; prints the table of docs/explanation/defaults.md.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from first_layer import bits, cell, scored
from rates import chosen
from undrift.images.corrupt import DEVELOPMENT
from undrift.posterior.norm import AVERAGES
from undrift.posterior.state import keeping_noise
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

PACES = (0.1, 0.2, 0.4, 0.7, 1.0)
AUTHORS, PYTORCH = 1.0, 0.1


def kept(model: undrift.Perturbed) -> list[Tensor]:
    """Return the statistics that norm layers keep; a step puts new tensors in their place."""
    return [policy.layer._buffers[name] for policy in model.norms for name in AVERAGES]


def put(model: undrift.Perturbed, statistics: list[Tensor]) -> None:
    """Let norm layers keep these statistics."""
    places = [(policy.layer, name) for policy in model.norms for name in AVERAGES]
    for (layer, name), tensor in zip(places, statistics, strict=True):
        layer._buffers[name] = tensor


def paces(net: nn.Module, images: Tensor, batch: int, draws: int) -> dict[float, Tensor]:
    """Return the probabilities that a stream answers with, for each pace, of one run of its steps."""
    generator = torch.Generator().manual_seed(0)
    parts = images.split(batch)
    how: dict[str, Any] = {"stream_norm_momentum": 1.0, "answer": "before", "generator": generator}
    stream = undrift.stream(net, parts, method="vmp:paper", **how)
    model = stream.model
    averages = {pace: kept(model) for pace in PACES}
    answers: dict[float, list[Tensor]] = {pace: [] for pace in PACES}
    for part, _ in zip(parts, stream, strict=True):
        own = kept(model)  # at a pace of 1: this batch's
        for pace in PACES:
            averages[pace] = torch._foreach_lerp(averages[pace], own, pace)
            put(model, averages[pace])
            # The last one's draws move the noise on, as a stream's own would.
            with nullcontext() if pace == PACES[-1] else keeping_noise(model.key):
                answers[pace].append(undrift.predict(model, part, samples=draws).probs)
        put(model, own)
    stream.remove()
    return {pace: torch.cat(found) for pace, found in answers.items()}


def check(folder: Path) -> None:
    """Raise where one stream with five averages answers otherwise than a stream of that pace."""
    images, _ = development(folder, 20, torch.device("cpu"))
    together = paces(_network(folder), images, 20, 2)
    for pace in (0.2, 1.0):
        how: dict[str, Any] = {"stream_norm_momentum": pace, "test_samples": 2}
        how["generator"] = torch.Generator().manual_seed(0)
        alone = undrift.stream(_network(folder), images.split(20), method="vmp:paper", **how)
        torch.testing.assert_close(torch.cat([answer.probs for answer in alone]), together[pace], rtol=1e-3, atol=1e-4)


def _network(folder: Path) -> nn.Module:
    return zoo.load("wrn40_2", folder / "wrn40_2.safetensors").eval()


def table(found: dict[str, Any]) -> str:
    """Return a search as Markdown."""
    lines = [
        "| pace | error % | NLL | by corruption | first batch of each | the rest | above 1 |",
        "|---:|" + "---:|" * 6,
    ]
    best = bits(found["paces"]["1.0"]["wrong"])
    for pace, one in found["paces"].items():
        wrong = bits(one["wrong"])
        each = wrong.view(len(DEVELOPMENT), -1)
        first, rest = each[:, : found["batch"]].mean(), each[:, found["batch"] :].mean()
        cells = (
            cell(wrong),
            f"{one['nll']:.3f}",
            " / ".join(f"{100 * float(domain):.1f}" for domain in each.mean(1)),
            f"{100 * first:.1f}",
            f"{100 * rest:.1f}",
            cell(wrong - best),
        )
        lines.append(f"| {pace} | " + " | ".join(cells) + " |")
    taken = f"The rule takes {found['chosen']}; with PyTorch's 0.1 as the authors' it would take"
    return "\n".join(lines) + f"\n{taken} {found['chosen_if_pytorch']}.\n"


def main() -> None:
    """Search with one size of batch, and write it beside those that are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=int, default=600, help="of each corruption")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--draws", type=int, default=2, help="an answer")
    parser.add_argument("--check", action="store_true", help="only compare with single streams, on sixty images")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.check:
        check(asked.data)
        return
    images, labels = development(asked.data, asked.images, torch.device("cpu"))
    begun = time.perf_counter()
    one: dict[str, Any] = {"images": asked.images, "batch": asked.batch, "draws": asked.draws, "paces": {}}
    for pace, probs in paces(_network(asked.data), images, asked.batch, asked.draws).items():
        one["paces"][str(pace)] = scored(probs, labels)
    errors = {float(pace): float(bits(found["wrong"]).mean()) for pace, found in one["paces"].items()}
    one["chosen"] = chosen(errors, len(labels), AUTHORS)
    one["chosen_if_pytorch"] = chosen(errors, len(labels), PYTORCH)
    one = machine(torch.device("cpu")) | one | {"seconds": round(time.perf_counter() - begun)}
    place = asked.results / "stream-pace.json"
    result: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    result[f"batches of {asked.batch}, {asked.images} images"] = one
    write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"batches of {asked.batch}, {one['seconds']} s\n{table(one)}")


if __name__ == "__main__":
    main()
