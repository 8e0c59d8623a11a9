"""Source training as a whole: it learns, it repeats itself, it survives a kill, and its file says what it is."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import undrift
from support import same
from undrift.images import SHOT, FileDomain, Preprocess, TensorDomain, split
from undrift_bench import zoo
from undrift_bench.train import TrainOptions, load_source, read_header, train_preset, train_source

HERE = Path(__file__).parent


def weights(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_it_learns_and_the_file_knows_itself(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    options = quick.replace(epochs=12)
    result = train_source(domain, tmp_path / "bars.safetensors", options, progress=False)
    assert result.accuracy is not None
    assert result.accuracy > 0.9
    assert [row.epoch for row in result.history] == list(range(1, 13))
    assert result.accuracy == max(row.accuracy or 0 for row in result.history)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bars.png", "bars.safetensors"]
    assert result.curve is not None
    assert result.curve.read_bytes()[1:4] == b"PNG"

    header = read_header(result.path)
    assert (header.network, header.class_names, header.preprocess) == ("digits", domain.class_names, domain.preprocess)
    assert (header.accuracy, header.epoch, header.seed) == (result.accuracy, result.epoch, 0)
    assert (header.domain, header.images) == ("bars", 96)
    assert TrainOptions(**header.options) == options

    network, _ = load_source(result.path)
    assert same(network.state_dict(), zoo.load("digits", result.path).state_dict())
    assert same(network.state_dict(), result.network.state_dict())
    # The held-out images can be made again, and give the accuracy that the file states.
    _, held = split(domain, 0.2, seed=0)
    images, labels = next(iter(held.batches(len(held))))
    assert (network(images).argmax(1) == labels).float().mean().item() == pytest.approx(result.accuracy)


def test_same_seed_same_weights_bit_for_bit(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(len(files))  # the caller's own randomness must not matter
        train_source(domain, tmp_path / f"{name}.safetensors", quick.replace(seed=seed), progress=False)
        files.append(weights(tmp_path / f"{name}.safetensors"))
    assert same(files[0], files[1])
    assert not same(files[0], files[2])


def test_the_callers_randomness_is_left_alone(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train_source(domain, tmp_path / "a.safetensors", quick.replace(epochs=1), progress=False)
    assert torch.equal(before, torch.get_rng_state())


KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
from conftest import bars
from undrift_bench import zoo
from undrift_bench.train import train_preset, train_source
import torch

torch.set_num_threads(1)
calls = 0

def count(*_):
    global calls
    calls += 1
    if calls == {kill}:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
network = torch.nn.Sequential(zoo.build("digits", 4), torch.nn.Dropout(0.2))
network.register_forward_hook(count)
options = train_preset("digits").replace(epochs=4, batch_size=20, held_out=0.0, pad=1, checkpoint_seconds=0.0)
train_source(bars(), {out!r}, options, network=network, progress=False)
"""


def child(out: Path, kill: int) -> int:
    code = KILLED.format(here=str(HERE), out=str(out), kill=kill)
    return subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=120).returncode


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_where_the_whole_one_ends(tmp_path: Path) -> None:
    # The first call checks the shape, an epoch is 6 steps: call 16 is in the middle of epoch 3. Without validation the
    # last weights are kept, on which everything before has its effect.
    killed, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    assert child(killed, kill=16) == -signal.SIGKILL
    assert killed.with_suffix(".checkpoint.pt").exists()
    assert not killed.exists()
    saved = torch.load(killed.with_suffix(".checkpoint.pt"), weights_only=True)
    assert [row["epoch"] for row in saved["history"]] == [1, 2]
    assert child(killed, kill=0) == 0
    assert child(whole, kill=0) == 0
    assert same(weights(killed), weights(whole))
    assert read_header(killed) == read_header(whole)
    assert not list(tmp_path.glob("*checkpoint*"))


class Stop(Exception):
    pass


def interrupt(domain: TensorDomain, out: Path, options: TrainOptions, after: int) -> None:
    def watch(row: object) -> None:
        if getattr(row, "epoch", 0) == after:
            raise Stop

    with pytest.raises(Stop):
        train_source(domain, out, options, progress=False, watch=watch)


@pytest.mark.parametrize("after", [1, 3])
def test_going_on_keeps_figures_and_best(domain: TensorDomain, quick: TrainOptions, tmp_path: Path, after: int) -> None:
    whole = train_source(domain, tmp_path / "whole.safetensors", quick, progress=False)
    interrupt(domain, tmp_path / "parts.safetensors", quick, after)
    parts = train_source(domain, tmp_path / "parts.safetensors", quick, progress=False)
    assert [replace(row, seconds=0.0) for row in parts.history] == [replace(row, seconds=0.0) for row in whole.history]
    assert (parts.epoch, parts.accuracy) == (whole.epoch, whole.accuracy)
    assert same(weights(parts.path), weights(whole.path))


def test_the_best_epoch_is_kept_across_an_interruption(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    # No later epoch can beat an accuracy of 2.
    out = tmp_path / "a.safetensors"
    interrupt(domain, out, quick.replace(lr=0.01), after=2)
    checkpoint = out.with_suffix(".checkpoint.pt")
    content = torch.load(checkpoint, weights_only=True)
    content["best"]["accuracy"] = 2.0
    torch.save(content, checkpoint)
    result = train_source(domain, out, quick.replace(lr=0.01), progress=False)
    assert result.epoch == content["best"]["epoch"]
    assert same(weights(result.path), content["best"]["weights"])


def test_a_checkpoint_of_another_run_is_refused(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    interrupt(domain, out, quick, after=2)
    with pytest.raises(undrift.DataError, match=r"another run \(lr was 0.1, is 0.05\).*resume=False"):
        train_source(domain, out, quick.replace(lr=0.05), progress=False)
    other = replace(domain, labels=(domain.labels + 1) % 4)
    with pytest.raises(undrift.DataError, match="training images was '96 of bars"):
        train_source(other, out, quick, progress=False)
    # How often checkpoints are written may change: no weight depends on it.
    assert len(train_source(domain, out, quick.replace(checkpoint_seconds=5.0), progress=False).history) == 4


def test_a_broken_checkpoint_is_named(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    out.with_suffix(".checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(undrift.DataError, match="not a checkpoint that can be read"):
        train_source(domain, out, quick, progress=False)
    assert train_source(domain, out, quick.replace(epochs=1), resume=False, progress=False).epoch == 1


def test_a_finished_model_is_not_lost(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out, short = tmp_path / "a.safetensors", quick.replace(epochs=1)
    train_source(domain, out, short, progress=False)
    with pytest.raises(undrift.DataError, match="is there already"):
        train_source(domain, out, short, progress=False)
    train_source(domain, out, short, overwrite=True, progress=False)


def test_without_validation_the_last_epoch_is_kept(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    result = train_source(domain, tmp_path / "a.safetensors", quick.replace(held_out=0.0), progress=False)
    assert (result.accuracy, result.epoch) == (None, 4)
    assert read_header(result.path).accuracy is None
    assert read_header(result.path).images == 120


@pytest.mark.slow
def test_own_validation_and_rare_evaluation(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    options = quick.replace(evaluate_every=3)
    held = domain.select(range(30))
    result = train_source(domain, tmp_path / "a.safetensors", options, validation=held, progress=False)
    assert [row.accuracy is None for row in result.history] == [True, True, False, False]
    assert read_header(result.path).images == 120


class Tiny(nn.Module):
    """SHOT's three parts in small."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.bottleneck = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.bottleneck(self.backbone(x)))


def photos(root: Path, count: int = 16) -> FileDomain:
    from PIL import Image

    for index in range(count):
        place = root / ("cat", "dog")[index % 2] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + index, 30), (40 * (index % 2), 9 * index, 100)).save(place)
    sources = undrift.images.domain(root).sources
    labels = torch.tensor([int("dog" in str(source)) for source in sources])
    return FileDomain("photos", sources, labels, ("cat", "dog"), SHOT)


def test_files_of_any_size_train_shot_style(tmp_path: Path) -> None:
    options = train_preset("shot").replace(epochs=2, batch_size=6, held_out=0.2)
    domain = photos(tmp_path / "photos")
    out = tmp_path / "a.safetensors"
    result = train_source(domain, out, options, network=Tiny(), device="cpu", workers=0, progress=False)
    header = read_header(out)
    assert header.preprocess == SHOT
    assert header.images == 13
    assert header.network.endswith("Tiny")
    assert result.history[-1].lr == pytest.approx(1e-2 * (1 + 10 * 3.5 / 4) ** -0.75)
    with pytest.raises(undrift.OptionError, match="the zoo has no network"):
        load_source(out)


def test_the_v1_layout_stays_in_the_file(tmp_path: Path) -> None:
    from undrift_bench.train.source_file import SourceHeader, write_source

    net = zoo.build("shot_resnet50_v1", 2)
    header = SourceHeader("shot_resnet50_v1", ("cat", "dog"), SHOT, "photos", 13, 0.5, 1, 0, {})
    write_source(tmp_path / "a.safetensors", net.state_dict(), header)
    assert same(load_source(tmp_path / "a.safetensors")[0].state_dict(), net.state_dict())
    with pytest.raises(undrift.DataError, match="shot_resnet50_v1"):
        zoo.load("shot_resnet50", tmp_path / "a.safetensors")


def test_a_loss_that_is_not_finite_stops_the_run(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    with pytest.raises(undrift.OptionError, match=r"the loss of epoch \d is (nan|inf).*Lower lr"):
        train_source(domain, tmp_path / "a.safetensors", quick.replace(lr=1e30, schedule="constant"), progress=False)


def test_what_cannot_be_trained_gets_three_facts(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"

    def wrong(message: str, bad: TensorDomain = domain, options: TrainOptions | str = quick, **more: object) -> None:
        with pytest.raises(undrift.UndriftError, match=message):
            train_source(bad, **{"out": out, "options": options, "progress": False, **more})  # type: ignore[arg-type]

    wrong("bars has no images", domain.select([]))
    wrong("bars has no labels", replace(domain, labels=None))
    wrong(r"labels from 0 to 3 and 2 class names", replace(domain, class_names=("a", "b")))
    wrong(r"same classes in the same order", validation=replace(domain, class_names=("a", "b", "c", "d")))
    wrong("fewer than one batch of 200", options=quick.replace(batch_size=200))
    wrong("digits takes 1", replace(domain, images=domain.images.expand(-1, 3, -1, -1), preprocess=Preprocess()))
    wrong(r"returns \(1, 7\) for one image.*classes=4", network=zoo.build("digits", 7))
    wrong("the zoo has no network 'digit'", options=quick.replace(network="digit"))
    wrong("without weights of its backbone", options=quick.replace(network="shot_resnet50"))
    wrong("slow='backbone' matches no parameter", options=quick.replace(slow=("backbone",)))
    wrong("there is no preset 'cifer' .did you mean 'cifar'", options="cifer")
    wrong("ends in .safetensors", out=tmp_path / "a.pt")
    wrong("there is no folder", out=tmp_path / "no" / "a.safetensors")
    wrong("held_out=0.001 leaves", options=quick.replace(held_out=0.001))
    wrong("there is no device 'gpu'", device="gpu")
    if not torch.cuda.is_available():
        wrong("PyTorch sees no GPU", device="cuda")
    assert not list(tmp_path.iterdir())
