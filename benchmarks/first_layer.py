"""Question: how much of what noise costs on a stream is the first layer's, under today's default statistics ("train")?

Five ways to have noise: nowhere; everywhere, with the first layer's energy about the image's mean (our default) or as
x² (the paper's); everywhere but in the first layer; and everywhere with weights drawn once a batch. WRN-40-2, preset
"paper", entropy, one step a batch of 200: speckle noise, Gaussian blur and saturate (severity 5) one after another and
never reset, and apart from them, no part of any choice, the first 600 images of contrast. All rows see the same images
in the same batches; those with noise, the same seed. ± is the standard error of a share of answers; the last columns
compare with no noise image by image, which is sharper.

Predicted, error % on development and on contrast, before any of it ran (three of the development errors are known from
benchmarks/sigma_choice.py, of 1,000 images: 17.4, 20.7 and 18.4, so only the two others are guesses there):

    no noise 17.5, 16;  centred 20.5, 20;  x² 24, 75;  first layer without noise 18.5, 17;  drawn weights 18.5, 17.5

that is: drawn weights cost as little as noise without the first layer, as a norm layer takes away what a drawn kernel
makes of an image's constant part, and x² ruins contrast under these statistics as it did under moving ones.

Seen: 17.4, 12.8; 20.6, 17.0; 21.8, 53.3; 18.4, 15.3; 18.8 and, against the prediction, 33.5 on contrast. Drawn weights
shift a channel by what they make of the constant part, and a norm layer takes that away only where it normalises by the
very draw. "train" answers by what the *step's* draw left, so that each draw of an answer keeps its shift less that one.
`--why` asks contrast again with norm_statistics="batch": the same steps, but each draw of an answer by its own
statistics. Predicted for that, before it ran: 15 to 18; above 25 the reason is another. Seen: 13.3.

Command:   python benchmarks/first_layer.py --data ../shared/data/cifar10 [--images 600] [--draws 5] [--seeds 1] [--why]
Hardware:  one CPU core, shared with other work: about half an hour.
Seeds:     0 to --seeds − 1 of the noise, all rows of one before the next.
Output:    first-layer.json under --results, with each answer; prints the table of docs/explanation/defaults.md.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.system.atomic import write_text
from undrift_bench import data, zoo
from undrift_bench.bench.harness.cell import NO_NOISE
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

BATCH, CONTRAST = 200, 600
ROWS: dict[str, dict[str, Any]] = {
    "no noise (σ = 0)": NO_NOISE,
    "centred: (x − mean)², our default": {},
    "x², the paper's": {"first_energy": "square"},
    "first layer without noise": {"skip_first": 1},
    "drawn weights": {"estimator": "drawn"},
}
WHY: dict[str, dict[str, Any]] = {
    "drawn weights, by their own statistics": {"estimator": "drawn", "norm_statistics": "batch"},
}


def answers(folder: Path, images: Tensor, labels: Tensor, seed: int, **changes: Any) -> dict[str, Any]:
    """Return, for each image of a stream that starts at the source, whether its answer was wrong; and the mean NLL."""
    net = zoo.load("wrn40_2", folder / "wrn40_2.safetensors").eval()
    generator = torch.Generator().manual_seed(seed)
    stream = undrift.stream(net, images.split(BATCH), method="vmp:paper", generator=generator, **changes)
    probs = torch.cat([answer.probs for answer in stream])
    stream.remove()
    return scored(probs, labels)


def scored(probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return what a record holds of answers: for each whether it was wrong, a letter an image; and the mean NLL."""
    nll = torch.nn.functional.nll_loss(probs.clamp_min(1e-12).log(), labels)
    wrong = (probs.argmax(1) != labels).int().tolist()
    return {"wrong": "".join(map(str, wrong)), "nll": float(nll)}


def joined(result: dict[str, Any], row: str, part: str) -> Tensor:
    """Return whether answers of a row were wrong, seeds one after another."""
    found = [result["seeds"][seed][row][part]["wrong"] for seed in result["seeds"] if row in result["seeds"][seed]]
    return bits("".join(found))


def bits(wrong: str) -> Tensor:
    """Return the answers of a record as numbers: 1 where one was wrong."""
    return torch.tensor([int(one) for one in wrong], dtype=torch.float64)


def cell(wrong: Tensor) -> str:
    """Return a mean in % with its standard error; repeated images of other seeds count as new ones.

    Examples:
        >>> cell(torch.tensor([1.0, 0, 0, 0]))
        '25.00 ± 25.00'
    """
    return f"{100 * wrong.mean():.2f} ± {100 * wrong.std() / len(wrong) ** 0.5:.2f}"


def table(result: dict[str, Any]) -> str:
    """Return the rows that have run as Markdown."""
    lines = ["| | error %, development | NLL | by corruption | contrast | more than no noise | on contrast |"]
    lines.append("|---|---:|---:|---|---:|---:|---:|")
    for row in ROWS:
        seeds = [found[row] for found in result["seeds"].values() if row in found]
        if not seeds:
            continue
        parts = {part: joined(result, row, part) for part in ("development", "contrast")}
        base = {part: joined(result, next(iter(ROWS)), part)[: len(wrong)] for part, wrong in parts.items()}
        nll = sum(one["development"]["nll"] for one in seeds) / len(seeds)
        each = parts["development"].view(len(seeds), len(DEVELOPMENT), -1).mean((0, 2))
        by = " / ".join(f"{100 * float(wrong):.1f}" for wrong in each)
        more = [cell(parts[part] - base[part]) for part in parts]
        cells = (cell(parts["development"]), f"{nll:.3f}", by, cell(parts["contrast"]), *more)
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run, and write as streams finish; a finished one is not run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=int, default=600, help="of each development corruption")
    parser.add_argument("--draws", type=int, default=5, help="an answer")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--why", action="store_true", help="contrast alone, with statistics of each draw; seed 0")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = development(asked.data, asked.images, torch.device("cpu"))
    clean, truth = next(iter(data.cifar10(asked.data).select(range(CONTRAST)).batches(CONTRAST)))
    streams = {"development": (images, labels), "contrast": (corrupt(clean, "contrast", 5), truth)}
    place = asked.results / "first-layer.json"
    of = {"images": asked.images, "contrast_images": CONTRAST, "batch": BATCH, "draws": asked.draws}
    result: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    if result and not result.items() >= of.items():
        found = {name: result.get(name) for name in of}
        raise SystemExit(f"{place} is of {found}; needed: {of}, to go on there. Name another folder: --results.")
    result = result or machine(torch.device("cpu")) | of | {"seeds": {}}
    for row, changes in WHY.items() if asked.why else ():
        if row not in result.setdefault("why", {}):
            how = {"test_samples": asked.draws, **changes}
            result["why"][row] = answers(asked.data, *streams["contrast"], 0, **how)
            write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        print(f"contrast, {row}: {cell(bits(result['why'][row]['wrong']))}", flush=True)
    for seed in range(asked.seeds):
        found = result["seeds"].setdefault(str(seed), {})
        for row, changes in ROWS.items():
            if row in found:
                continue
            begun, how = time.perf_counter(), {"test_samples": asked.draws, **changes}
            one: dict[str, Any] = {part: answers(asked.data, *pair, seed, **how) for part, pair in streams.items()}
            found[row] = one | {"seconds": round(time.perf_counter() - begun)}
            write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
            print(f"seed {seed}, {row}: {found[row]['seconds']} s\n{table(result)}", flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
