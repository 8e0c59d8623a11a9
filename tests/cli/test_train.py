"""`undrift train` on the shell: what it keeps, what it takes, and how it advises."""

from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from undrift_bench.train import read_header

from .conftest import Run, leftovers

QUICK = ("--preset", "cifar", "--network", "wrn40_2", "--epochs", "1", "--batch-size", "4", "--held-out", "0.2")
TRAIN = ("train", "source", *QUICK, "--device", "cpu", "--quiet")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two layers in the place of forty."""
    from undrift_bench import zoo

    def build(_name: str, classes: int | None = None) -> nn.Module:
        pooled = (nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*pooled, nn.Linear(4, classes or 1))

    monkeypatch.setattr(zoo, "build", build)


@pytest.mark.usefixtures("small")
def test_a_picture_of_the_curves_name_needs_force(run: Run) -> None:
    Path("own.png").write_bytes(b"mine")
    found = run(*TRAIN, "--out", "own.safetensors")
    assert (found.code, "own.png is there already" in found.err, "--force" in found.err) == (1, True, True)
    assert Path("own.png").read_bytes() == b"mine"
    assert not Path("own.safetensors").exists()
    assert run(*TRAIN, "--out", "own.safetensors", "--force").code == 0
    assert Path("own.png").read_bytes() != b"mine"


@pytest.mark.usefixtures("small")
def test_two_processes_do_not_train_to_one_file(run: Run, work: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    words = (*TRAIN, "--out", "own.safetensors")
    with Path(".own.safetensors.lock").open("w") as lock:  # as a run that is under way
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path("own.checkpoint.pt").write_bytes(b"another's")
        for more in ((), ("--force",), ("--no-resume",)):
            found = run(*words, *more)
            told = "another process is writing own.safetensors; needed: one process per file" in found.err
            assert (found.code, told, "Wait for it, stop it, or choose" in found.err) == (1, True, True), found.err
        assert Path("own.checkpoint.pt").read_bytes() == b"another's"
        assert run(*TRAIN, "--out", "other.safetensors").code == 0
    assert run(*words, "--no-resume").code == 0
    assert leftovers(work) == []


@pytest.mark.usefixtures("small")
def test_images_of_mixed_sizes_are_brought_to_one(run: Run) -> None:
    Image.new("RGB", (12, 9)).save("source/red/large.png")
    found = run(*TRAIN, "--out", "own.safetensors")
    assert (found.code, "--resize 8x8" in found.err) == (1, True), found.err
    found = run(*TRAIN, "--out", "own.safetensors", "--resize", "10x10", "--crop", "8")
    assert found.code == 0, found.err
    preprocess = read_header("own.safetensors").preprocess
    assert (preprocess.resize, preprocess.crop) == ((10, 10), 8)
    found = run(*TRAIN, "--out", "other.safetensors", "--crop", "20", "--resize", "none")
    assert (found.code, "--resize" in found.err) == (1, True), found.err


@pytest.mark.usefixtures("small")
def test_advice_is_for_the_shell(run: Run) -> None:
    Path("own.checkpoint.pt").write_bytes(b"nothing")
    found = run(*TRAIN, "--out", "own.safetensors")
    assert (found.code, "start over with --no-resume" in found.err) == (1, True), found.err
    assert run(*TRAIN, "--out", "own.safetensors", "--no-resume").code == 0
    found = run(*TRAIN, "--out", "b.safetensors", "--batch-size", "100")
    assert (found.code, "Lower --batch-size to" in found.err) == (1, True), found.err
    found = run(*TRAIN, "--out", "b.safetensors", "--device", "gpu")
    assert (found.code, "Use --device auto" in found.err) == (2, True), found.err


def test_a_backbone_without_weights_is_told_the_flag(run: Run) -> None:
    found = run("train", "source", "--out", "b.safetensors", "--device", "cpu")
    assert (found.code, "Name it: --trunk FILE." in found.err) == (2, True), found.err


@pytest.mark.usefixtures("small")
def test_one_class_folder_is_refused(run: Run) -> None:
    for name in ("green", "blue"):
        Path("source", name).rename(name)
    found = run(*TRAIN, "--out", "own.safetensors")
    assert (found.code, "source has one class (red); needed: two" in found.err) == (1, True), found.err
    assert not Path("own.safetensors").exists()


@pytest.mark.usefixtures("small")
def test_images_of_other_channels_are_refused(run: Run) -> None:
    found = run("train", "digits:optdigits", "--network", "wrn40_2", "--out", "own.safetensors", "--quiet")
    assert (found.code, "images of 1 channels and a preprocessing for 3" in found.err) == (1, True), found.err
