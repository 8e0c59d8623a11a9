"""A folder to work in: a tiny network in a module, its weights, and images in three colours, of two domains."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from undrift.cli import main

# Warnings are errors, but for one of PyTorch 2.6: it leaves a temporary folder of its own to Python's exit.
STRICT = ("-W", "error", "-W", "ignore:Implicitly cleaning up:ResourceWarning")
NAMES = ("red", "green", "blue")
MODULE = '''
import time
from pathlib import Path
from torch import nn


class Tiny(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Slow(Tiny):
    """Says how often it was called, and takes its time."""

    def forward(self, x):
        with Path("calls").open("a") as file:
            file.write("x")
        time.sleep(0.02)
        return super().forward(x)


class Stopping(Tiny):
    """Ctrl-C once a file has so many lines, or once it exists; the file `stop` says which."""

    def forward(self, x):
        name, lines = Path("stop").read_text().split()
        if Path(name).exists() and lines in ("any", str(Path(name).read_bytes().count(b"\\n"))):
            raise KeyboardInterrupt
        return super().forward(x)


def make(classes=3):
    return Tiny(classes)


def stopping():
    return Stopping()


def slow():
    return Slow()


def not_a_network():
    return 3


def broken():
    raise ValueError("no such depth")
'''
sys.modules.pop("tiny_of_tests", None)


def pictures(count: int, seed: int, dim: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return noisy images N×3×8×8 in uint8, each mostly of one colour, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    values = torch.rand(count, 3, 8, 8, generator=generator) * 0.5
    values[torch.arange(count), labels] += 0.3
    return (values * dim * 255).to(torch.uint8), labels


@pytest.fixture(scope="session")
def weights() -> dict[str, Tensor]:
    """Return the weights of the tiny network, trained in a blink."""
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(MODULE, scope)
    net: nn.Module = scope["make"]()
    images, labels = pictures(60, 0)
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(40):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(images.float() / 255), labels).backward()
        optimiser.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def write_tree(folder: Path, count: int, seed: int, dim: float = 1.0) -> None:
    images, labels = pictures(count, seed, dim)
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        (folder / NAMES[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / NAMES[label] / f"{number:02d}.png")


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Run = Callable[..., Outcome]
StopWhen = Callable[..., Outcome]
MODEL = (
    "--model",
    "tiny_of_tests:make",
    "--weights",
    "source.safetensors",
    "--classes",
    "names.txt",
    "--preprocess",
    "none",
)


@pytest.fixture
def work(inside: Path, weights: dict[str, Tensor]) -> Path:
    """Return the folder, which is the current one: module, weights, images of source and target."""
    (inside / "tiny_of_tests.py").write_text(MODULE)
    save_file(weights, inside / "source.safetensors")
    (inside / "names.txt").write_text("\n".join(NAMES) + "\n")
    write_tree(inside / "source", 12, 1)
    write_tree(inside / "target", 30, 2, 0.6)
    np.save(inside / "target.npy", pictures(30, 2, 0.6)[0].permute(0, 2, 3, 1).numpy())
    np.save(inside / "labels.npy", pictures(30, 2)[1].numpy())
    return inside


@pytest.fixture
def run(work: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs a command in this process and says how it ended."""

    def call(*words: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def stop_when(run: Run, work: Path) -> StopWhen:
    """Return what runs a command and presses Ctrl-C in the pass after a file has so many lines."""

    def call(name: str, lines: int | str, *words: str) -> Outcome:
        (work / "stop").write_text(f"{name} {lines}")
        found = run(*(word.replace("tiny_of_tests:make", "tiny_of_tests:stopping") for word in words))
        assert found.code == 130, found.err
        return found

    return call


@pytest.fixture
def adapted(run: Run) -> Path:
    """Return a domain file, learned in the folder."""
    found = run("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "2", "--likelihood", "information")
    assert found.code == 0, found.err
    return Path("b.safetensors")


def start(work: Path, *words: str | Path) -> "subprocess.Popen[str]":
    """Start a command as the shell would."""
    code = "import sys; from undrift.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, *STRICT, "-c", code, *map(str, words)],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a group of its own, with the processes that decode for it
    )


def leftovers(folder: Path) -> list[str]:
    """Return files that something half-written would have left."""
    return [p.name for p in folder.rglob("*") if p.name.endswith((".tmp", ".partial")) or p.name.startswith(".")]
