"""Claim: on a long stream steps that normalise by the batch keep improving, and steps by the moving average drift away.

Error % on the three development corruptions (speckle noise, Gaussian blur, saturate; severity 5), never on the fifteen
that results are reported on. Four cycles through them, WRN-40-2, 1,500 images each, batches of 50 (360 steps), preset
"paper", entropy, Adam 5e-4, seed 0 of the noise; the answer is the step's own noisy pass, so that both policies answer
by the statistics that they step by. The moving average takes 0.4 of each new batch, the default when this ran.

Command:   python benchmarks/norm_policy.py --data ../shared/data/cifar10 [--only train] [--images 100 --cycles 1]
Hardware:  two CPU cores, one thread each: the two policies ran side by side, about 15 minutes.
Seeds:     0 alone; a difference of less than two points in one domain says nothing.
Output:    norm-policy.json under --results, and the table of docs/explanation/defaults.md on the terminal.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.system.atomic import write_text
from undrift_bench import data, zoo

POLICIES = ("moving", "train")
MOMENTUM = 0.4
SEED = 0


def errors(net: nn.Module, domains: list[Tensor], labels: Tensor, policy: str, batch: int, cycles: int) -> list[float]:
    """Return the error % of each domain in turn, cycle after cycle, of one stream that is never reset.

    Args:
        net: the source network; it is given back as it was.
        domains: images ready for the network, of each domain in the order in which they come.
        labels: of each domain's images; the stream does not see them.
    """
    settings: dict[str, Any] = {"norm_statistics": policy, "stream_norm_momentum": MOMENTUM}
    model = undrift.perturb(net, "paper", generator=torch.Generator().manual_seed(SEED), **settings)
    batches = [part for _ in range(cycles) for images in domains for part in images.split(batch)]
    truth = [part for _ in range(cycles * len(domains)) for part in labels.split(batch)]
    answers = undrift.stream(model, batches, undrift.entropy, answer="before")
    wrong = [(answer.label != true).float().mean() for answer, true in zip(answers, truth, strict=True)]
    model.remove()
    means = torch.stack(wrong).view(cycles * len(domains), -1).mean(1)
    return [round(100 * float(mean), 1) for mean in means]


def table(result: dict[str, Any]) -> str:
    """Return the numbers as Markdown: a line a policy, a column a cycle, the domains one after another."""
    width, cycles = len(result["domains"]), result["cycles"]
    lines = ["| norm_statistics | " + " | ".join(f"cycle {n + 1}" for n in range(cycles)) + " |"]
    lines.append("|---|" + "---:|" * cycles)
    for policy, found in result["errors"].items():
        parts = [found[at : at + width] for at in range(0, cycles * width, width)]
        lines.append(f'| `"{policy}"` | ' + " | ".join(" / ".join(f"{n:.1f}" for n in part) for part in parts) + " |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    """Run the policies asked for, beside those that are finished with the same settings; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10 and wrn40_2.safetensors")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", choices=POLICIES)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--cycles", type=int, default=4)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    setting = {
        "claim": (__doc__ or "").partition("\n")[0],
        "command": "python benchmarks/norm_policy.py --data FOLDER",
        "hardware": "two CPU cores, one thread each",
        "torch": torch.__version__,
        "network": "wrn40_2",
        "domains": list(DEVELOPMENT),
        "severity": 5,
        "images": asked.images,
        "batch": asked.batch,
        "cycles": asked.cycles,
        "seed": SEED,
        "answer": "before",
        "stream_lr": 5e-4,
        "stream_norm_momentum": MOMENTUM,
    }
    place = asked.results / "norm-policy.json"
    known = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    same = all(known.get(name) == value for name, value in setting.items())
    found = dict(known["errors"]) if same else {}
    domain = data.cifar10(asked.data).select(range(asked.images))
    assert domain.labels is not None
    net = zoo.load("wrn40_2", asked.data / "wrn40_2.safetensors")
    images = [corrupt(domain.images, name, 5).float() / 255 for name in DEVELOPMENT]
    for policy in (asked.only,) if asked.only else POLICIES:
        if policy not in found:
            found[policy] = errors(net, images, domain.labels, policy, asked.batch, asked.cycles)
            result = setting | {"errors": {name: found[name] for name in POLICIES if name in found}}
            asked.results.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(table(setting | {"errors": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
