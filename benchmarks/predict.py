"""Claim: predict(mode="fast") is within 0.01 NLL of ten draws in at most three noise-free forward passes' time.

The tables say whether it holds; docs/explanation/uncertainty.md reads them.

Quality: WRN-40-2 on CIFAR10-C severity 5, initial variance 0.04 × Var(kernel) without the first layer, 0.01 with it.
Moving statistics are those of one noisy pass over a corruption's first batch; nothing else is adapted. Rows: the mean
network (samples=0), ten draws, ten other draws (how far chance alone moves NLL), and fast with one temperature for all
images, for each batch of 200, and for each batch of 8 (on a GPU that is ten draws, in one pass). ΔNLL is against the
first ten draws: the mean over seeds ± its standard error.
A first form of "fast" was found on 200 images each of contrast, frost and Gaussian noise, so those three stand apart
from the corruptions that were not looked at; the present one was chosen on the three development corruptions
(predict_choice.py), which come first.

Time: medians of one run, against a noise-free forward pass in the same mode, at batch 200 and batch 8; CUDA is
synchronised around each (`undrift bench speed --only predict` measures this half, without data). Hardware, seeds and
images are in the table's first line.

    python benchmarks/predict.py --data ../shared/data/cifar10 --images 2000 --seeds 3
    python benchmarks/predict.py --data ../shared/data/cifar10 --no-quality --time-network wrn28_10 --bf16
"""

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, corrupt
from undrift.judge.metrics import scored
from undrift.system.atomic import write_text
from undrift_bench import data, zoo
from undrift_bench.bench.speed.modes import settings
from undrift_bench.bench.speed.predict import FORM, times

BATCH = 200
LOOKED_AT = ("contrast", "frost", "gaussian_noise")
SETTINGS: dict[str, dict[str, Any]] = {
    "0.04 × Var, all but the first layer": {"init_fraction": 0.04, "skip_first": 1},
    "0.01 × Var, all layers": {"init_fraction": 0.01},
}
ROWS: dict[str, Callable[[undrift.Perturbed, Tensor, int], undrift.Prediction]] = {
    "samples=0": lambda m, x, _seed: undrift.predict(m, x, 0, batch_size=BATCH),
    "full, 10 draws": lambda m, x, s: undrift.predict(m, x, 10, batch_size=BATCH, generator=2 * s),
    "full, 10 other draws": lambda m, x, s: undrift.predict(m, x, 10, batch_size=BATCH, generator=2 * s + 1),
    "fast, one call": lambda m, x, s: undrift.predict(m, x, 10, batch_size=BATCH, generator=2 * s + 1, mode="fast"),
    "fast, batches of 200": lambda m, x, s: fast(m, x, BATCH, 2 * s + 1),
    "fast, batches of 8": lambda m, x, s: fast(m, x, 8, 2 * s + 1),
}


def fast(model: undrift.Perturbed, x: Tensor, batch: int, seed: int) -> undrift.Prediction:
    """Return answers that each knew of their own batch only, as in a stream."""
    generator = torch.Generator().manual_seed(seed)
    return undrift.Prediction.cat(
        undrift.predict(model, part, 10, mode="fast", generator=generator) for part in x.split(batch)
    )


def quality(net: nn.Module, x: Tensor, labels: Tensor, seeds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the scores of each row under each setting, a number per seed."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for setting, changes in SETTINGS.items():
        found[setting] = {row: {"nll": [], "error": [], "ece": [], "mutual_info": []} for row in ROWS}
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            model = undrift.perturb(net, norm_statistics="moving", norm_momentum=1.0, generator=generator, **changes)
            with torch.no_grad():
                model.key.training = True  # statistics move
                model(x[:BATCH])
                model.key.training = False
            for row, ask in ROWS.items():
                p, scores = ask(model, x, seed), found[setting][row]
                of_row = scored(p.probs, labels)
                for name in ("nll", "error", "ece"):
                    scores[name].append(getattr(of_row, name))
                scores["mutual_info"].append(float(p.mutual_info.mean()))
            model.remove()
    return found


def main() -> None:
    """Measure, and write predict.json and predict.md as corruptions finish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--corruptions", nargs="*", default=[*DEVELOPMENT, *CORRUPTIONS])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="*", default=[BATCH, 8], help="batch sizes to time")
    parser.add_argument("--time-network", default="wrn40_2")
    parser.add_argument("--bf16", action="store_true", help="time under autocast, channels-last")
    parser.add_argument("--frost", type=Path, help="a folder of frost pictures, where their package is not installed")
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    path = arguments.out / "predict.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"quality": {}, "time": {}}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    about = {"machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads(), "fast": FORM}
    if not arguments.no_quality:
        setting = {**about, "images": arguments.images, "seeds": arguments.seeds}
        if result.get("quality_of") != setting:  # corruptions of one setting may be measured in several runs
            result |= {"quality_of": setting, "quality": {}}
        clean, labels = next(iter(data.cifar10(arguments.data).select(range(arguments.images)).batches(10**6)))
        net = zoo.load("wrn40_2", arguments.data / "wrn40_2.safetensors").to(device).eval()
        for name in arguments.corruptions:
            result["quality"][name] = quality(
                net, corrupt(clean, name, 5, frost=arguments.frost).to(device), labels.to(device), arguments.seeds
            )
            print(name, flush=True)
            write(result, arguments.out)
    if not arguments.no_time:
        mode = f"{arguments.time_network}{', channels-last bf16' if arguments.bf16 else ''}, {machine}"
        net, rows = zoo.build(arguments.time_network).to(device).eval(), list[dict[str, Any]]()
        result["time"][mode] = {**about, **settings(device), "date": datetime.date.today().isoformat(), "rows": rows}
        for row in times(net, device, arguments.batches, arguments.bf16, arguments.repeats):
            print(row, flush=True)
            rows.append(row)
        write(result, arguments.out)
    print((arguments.out / "predict.md").read_text())


def write(result: dict[str, Any], out: Path) -> None:
    """Write what there is so far."""
    lines: list[str] = []
    if result["quality"]:
        of = result["quality_of"]
        lines += [
            f"WRN-40-2, CIFAR10-C severity 5, {of['images']} images each, {of['seeds']} seeds; {of['machine']}.",
            f"Fast: {of.get('fast', 'an earlier form')}.",
            "",
            "| corruptions | initial variance | prediction | NLL | ΔNLL | largest of a corruption | error % | ECE % |",
            "|---|---|---|---|---|---|---|---|",
        ]
    done = result["quality"]
    groups = {
        "development": [n for n in DEVELOPMENT if n in done],
        "looked at while choosing": [n for n in LOOKED_AT if n in done],
        "not looked at": [n for n in CORRUPTIONS if n in done and n not in LOOKED_AT],
        "all fifteen": [n for n in CORRUPTIONS if n in done] if set(CORRUPTIONS) <= done.keys() else [],
    }
    for group, names in groups.items():
        for setting in SETTINGS if names else ():
            for row in ROWS:
                lines.append(f"| {group} ({len(names)}) | {setting} | {row} | {cells(done, names, setting, row)} |")
    for mode, measured in result["time"].items():
        form = measured.get("fast", "an earlier form")
        lines += ["", f"Times over one noise-free forward pass, {mode}, PyTorch {measured['torch']}. Fast: {form}.", ""]
        lines += ["| batch | forward, ms | way | × |", "|---|---|---|---|"]
        lines += [f"| {r['batch']} | {r['forward_ms']:.2f} | {r['way']} | {r['ratio']:.2f} |" for r in measured["rows"]]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "predict.json", json.dumps(result, indent=1) + "\n")
    write_text(out / "predict.md", "\n".join(lines) + "\n")


def cells(done: dict[str, Any], names: list[str], setting: str, row: str) -> str:
    """Return NLL, ΔNLL against ten draws, the largest ΔNLL of one corruption, error and ECE, as a table's cells."""

    def values(which: str, row: str) -> Tensor:  # corruptions × seeds
        return torch.tensor([done[n][setting][row][which] for n in names], dtype=torch.float64)

    delta = values("nll", row) - values("nll", "full, 10 draws")
    seeds = delta.mean(0)
    spread = f" ± {float(seeds.std() / len(seeds) ** 0.5):.4f}" if len(seeds) > 1 else ""
    largest = delta.mean(1)[delta.mean(1).abs().argmax()]
    return (
        f"{values('nll', row).mean():.4f} | {seeds.mean():+.4f}{spread} | {largest:+.4f} | "
        f"{100 * values('error', row).mean():.2f} | {100 * values('ece', row).mean():.2f}"
    )


if __name__ == "__main__":
    main()
