"""Claim: `undrift.perturb` works on the architectures people have, of torchvision, timm, Hugging Face and MONAI.

For each network (random weights): how many learnables; whether `off()` and `remove()` give the source's outputs bit for
bit and leave the state as it was; whether one Adam step on entropy + KL lowers that loss under the same noise; whether
forward and backward compile into one graph whose outputs are the eager ones.

    python benchmarks/compat.py --out out/compat          # all, four at a time
    python benchmarks/compat.py --only vit_b_16            # one

Writes compat.json and compat.md. Networks whose library is not installed are listed as "not run".
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.posterior.outputs import logits
from undrift.posterior.table import totals

# name: (library, how to build it, side of its images)
NETWORKS: dict[str, tuple[str, str, int]] = {
    "ResNet-50": ("torchvision", "resnet50", 96),
    "ResNeXt-50": ("torchvision", "resnext50_32x4d", 96),
    "DenseNet-121": ("torchvision", "densenet121", 96),
    "MobileNetV3": ("torchvision", "mobilenet_v3_large", 96),
    "EfficientNet-B0": ("torchvision", "efficientnet_b0", 96),
    "RegNet-Y-400MF": ("torchvision", "regnet_y_400mf", 96),
    "ConvNeXt-T": ("torchvision", "convnext_tiny", 96),
    "ViT-B/16 (nn.MultiheadAttention)": ("torchvision", "vit_b_16", 224),
    "Swin-T": ("torchvision", "swin_t", 224),
    "ViT-S/16": ("timm", "vit_small_patch16_224", 224),
    "MLP-Mixer-S/16": ("timm", "mixer_s16_224", 224),
    "ResNet-50, GroupNorm": ("timm", "resnet50_gn", 96),
    "ResNetV2-50, standardised weights": ("timm", "resnetv2_50x1_bit", 96),
    "EfficientNet-B0, padding of its own": ("timm", "tf_efficientnet_b0", 96),
    "ViT (Hugging Face)": ("transformers", "ViT", 224),
    "ConvNeXt (Hugging Face)": ("transformers", "ConvNext", 96),
    "DenseNet-121 (MONAI)": ("monai", "DenseNet121", 96),
    "UNet (MONAI)": ("monai", "UNet", 96),
    "SegResNet (MONAI)": ("monai", "SegResNet", 96),
    "SwinUNETR (MONAI)": ("monai", "SwinUNETR", 96),
}

# What MONAI's networks need besides their channels.
MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "norm": "batch"}
}

COLUMNS = (
    "network",
    "library",
    "weights perturbed",
    "learnables",
    "linear layers per row",
    "one variance a weight",
    "`off()` exact",
    "`remove()` exact",
    "a step lowers the loss",
    "one graph",
)


def build(name: str) -> nn.Module:
    """Return the network with random weights, in eval mode."""
    library, call, _ = NETWORKS[name]
    module = importlib.import_module(library)
    if library == "torchvision":
        net = getattr(importlib.import_module("torchvision.models"), call)(weights=None, num_classes=10)
    elif library == "timm":
        net = module.create_model(call, pretrained=False, num_classes=10)
    elif library == "monai":
        nets = importlib.import_module("monai.networks.nets")
        net = getattr(nets, call)(spatial_dims=2, in_channels=3, out_channels=10, **MONAI.get(call, {}))
    else:
        config = getattr(module, f"{call}Config")(num_labels=10)
        net = getattr(module, f"{call}ForImageClassification")(config)
    return net.eval()


def loss_of(model: undrift.Perturbed, call: Any, images: Tensor, seed: int) -> Tensor:
    """Return entropy + KL under the noise of one seed."""
    model.reseed(seed)
    output = logits(call(images))
    return -(output.softmax(1) * output.log_softmax(1)).sum(1).mean() + undrift.kl_term(model, size=len(images))


def check(name: str, device: torch.device, compile_it: bool) -> dict[str, object]:
    """Return one row of the table."""
    torch.manual_seed(0)
    net = build(name).to(device)
    side = NETWORKS[name][2]
    images = torch.rand(4, 3, side, side, device=device)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        source = logits(net(images)).clone()
    model = undrift.perturb(net, norm_statistics="source")
    count = totals(model)
    row: dict[str, object] = {
        "network": name,
        "library": NETWORKS[name][0],
        "layers": len(model.noises()),
        "learnables": count.learnables,
        "unshared": count.unshared,
        "per kernel": None,
    }
    with torch.no_grad(), model.off():
        row["off exact"] = torch.equal(logits(net(images)), source)
    with torch.no_grad():
        row["noisy"] = not torch.equal(logits(model(images)), source)
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    first = loss_of(model, model, images, seed=1)
    first.backward()
    optimiser.step()
    optimiser.zero_grad()
    with torch.no_grad():
        row["step lowers loss"] = bool(loss_of(model, model, images, seed=1) < first)
    row["compiles"], row["compile seconds"] = None, None
    if compile_it:
        start = time.perf_counter()
        eager = loss_of(model, model, images, seed=2)
        whole = loss_of(model, torch.compile(model, fullgraph=True), images, seed=2)
        whole.backward()
        row["compiles"] = bool(torch.allclose(whole, eager, rtol=1e-3))
        row["compile seconds"] = round(time.perf_counter() - start, 1)
    model.remove()
    with torch.no_grad():
        same = torch.equal(logits(net(images)), source)
    after = net.state_dict()
    row["remove exact"] = same and all(torch.equal(before[k], after[k]) for k in before)
    shared = undrift.perturb(net, linear_sharing="kernel")
    row["per kernel"] = totals(shared).learnables
    return row


def problem(stderr: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in stderr.splitlines() if "Error" in line]
    return (lines or ["no message"])[-1][:300]


def run_one(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the row of one network, measured in a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--device", arguments.device, "--json"]
    result = subprocess.run(command + ["--no-compile"] * arguments.no_compile, capture_output=True, text=True)
    if result.returncode == 0:
        row = json.loads(result.stdout.strip().splitlines()[-1])
    else:
        row = {"network": name, "library": NETWORKS[name][0], "error": problem(result.stderr)}
    print(json.dumps(row), flush=True)
    return row


def markdown(rows: list[dict[str, Any]], device: str) -> str:
    """Return the table for docs/."""

    def mark(value: object) -> str:
        return {True: "yes", False: "**no**", None: "not run"}[value]  # type: ignore[index]

    lines = [
        f"Hardware: {device}; PyTorch {torch.__version__}; random weights, seed 0, batch 4.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['network']} | {r['library']} | not run: {r['error']} |" + " |" * 7)
            continue
        marks = " | ".join(mark(r[k]) for k in ("off exact", "remove exact", "step lowers loss", "compiles"))
        lines.append(
            f"| {r['network']} | {r['library']} | {r['layers']} | {r['learnables']:,} | {r['per kernel']:,} "
            f"| {r['unshared']:,} | {marks} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the table, or one row of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/compat"))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one row and write nothing")
    arguments = parser.parse_args()
    if arguments.only and arguments.json:
        print(json.dumps(check(arguments.only, torch.device(arguments.device), not arguments.no_compile)))
        return
    names = [arguments.only] if arguments.only else list(NETWORKS)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(lambda name: run_one(name, arguments), names))
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "compat.json").write_text(json.dumps({"device": name, "rows": rows}, indent=1))
    (arguments.out / "compat.md").write_text(markdown(rows, name))
    print(markdown(rows, name))


if __name__ == "__main__":
    main()
