"""What a run must not lose or mistake: pictures of the user's, epochs in memory, the images it began with."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import undrift
import undrift_bench.train
from faults import full_disk
from undrift.images import FileDomain, Preprocess, TensorDomain
from undrift_bench.train import TrainOptions, train_source

from .test_run import Tiny, interrupt, photos


def test_a_picture_of_the_curves_name_is_not_lost(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out, picture = tmp_path / "a.safetensors", tmp_path / "a.png"
    picture.write_bytes(b"mine")
    with pytest.raises(undrift.DataError, match=r"a\.png is there already; needed: a new name"):
        train_source(domain, out, quick, progress=False)
    assert sorted(tmp_path.iterdir()) == [picture]
    assert picture.read_bytes() == b"mine"
    train_source(domain, out, quick.replace(epochs=1), overwrite=True, progress=False)
    assert picture.read_bytes() != b"mine"


def test_a_run_that_goes_on_draws_over_its_own_curve(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    interrupt(domain, out, quick, after=2)
    out.with_suffix(".png").write_bytes(b"written just before a kill")
    result = train_source(domain, out, quick, progress=False)
    assert result.curve is not None
    assert result.curve.read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_one_warning(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    said_of = pytest.warns(undrift.UndriftWarning, match=r"a\.checkpoint\.pt, .*No space left.*needed: room")
    with full_disk(3), said_of as said:
        result = train_source(domain, tmp_path / "a.safetensors", quick, progress=False)
    assert len(said) == 1
    assert len(result.history) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_while_it_is_written_to(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path.open

    def on_full(path: Path, mode: str = "r", *rest: object) -> object:
        return place(Path("/dev/full") if "checkpoint" in path.name else path, mode.replace("x", "w"), *rest)

    monkeypatch.setattr(Path, "open", on_full)
    with pytest.warns(undrift.UndriftWarning, match="No space left"):
        result = train_source(domain, tmp_path / "a.safetensors", quick, progress=False)
    assert len(result.history) == 4


def test_other_images_of_the_same_labels_are_another_run(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    interrupt(domain, out, quick, after=2)
    with pytest.raises(undrift.DataError, match=r"another run \(training checksum was .*old settings and images"):
        train_source(replace(domain, images=domain.images // 2), out, quick, progress=False)


def test_other_files_of_the_same_names_are_another_run(tmp_path: Path) -> None:
    domain, out = photos(tmp_path / "photos"), tmp_path / "a.safetensors"
    options = undrift_bench.train.train_preset("shot").replace(
        epochs=2, batch_size=6, held_out=0.2, checkpoint_seconds=0.0
    )

    def watch(row: object) -> None:
        raise KeyboardInterrupt

    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        train_source(domain, out, options, network=Tiny(), device="cpu", workers=0, progress=False, watch=watch)
    with Path(domain.sources[0].name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(undrift.DataError, match=r"another run \((training|validation) checksum was"):
        train_source(domain, out, options, network=Tiny(), device="cpu", workers=0, progress=False)


def test_a_checkpoint_from_before_checksums_is_gone_on_with(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    out = tmp_path / "a.safetensors"
    interrupt(domain, out, quick, after=2)
    checkpoint = out.with_suffix(".checkpoint.pt")
    content = torch.load(checkpoint, weights_only=True)
    content["run"] = {name: value for name, value in content["run"].items() if "checksum" not in name}
    torch.save(content, checkpoint)
    assert len(train_source(domain, out, quick, progress=False).history) == 4


def test_a_large_seed_trains(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    train_source(domain, tmp_path / "a.safetensors", quick.replace(seed=1700000000000000000, epochs=1), progress=False)
    with pytest.raises(undrift.OptionError, match=r"seed=\d+ is above"):
        quick.replace(seed=2**63)


def test_labels_of_any_whole_number_train_the_same(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    assert domain.labels is not None
    one = quick.replace(epochs=1)
    small = replace(domain, labels=domain.labels.to(torch.int16))
    whole = train_source(domain, tmp_path / "a.safetensors", one, progress=False)
    short = train_source(small, tmp_path / "b.safetensors", one, progress=False)
    assert short.history[0].loss == whole.history[0].loss


def test_what_would_be_mistaken_is_refused_before_a_step(
    domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    assert domain.labels is not None

    def wrong(message: str, bad: TensorDomain | FileDomain = domain, **more: object) -> None:
        with pytest.raises(undrift.DataError, match=message):
            train_source(bad, tmp_path / "a.safetensors", quick, progress=False, **more)  # type: ignore[arg-type]

    wrong(r"torch.float32 images of shape .*; needed: uint8", replace(domain, images=domain.images / 255))
    wrong(r"needed: uint8, N×C×H×W", replace(domain, images=domain.images[:, 0]))
    wrong(r"images of 3 channels and a preprocessing for 1", replace(domain, images=domain.images.repeat(1, 3, 1, 1)))
    wrong(r"120 images and torch.int64 labels of shape \(115,\)", replace(domain, labels=domain.labels[5:]))
    wrong(r"torch.float32 labels .*needed: one whole number", replace(domain, labels=domain.labels.float()))
    wrong(r"bars has one class \(all\); needed: two", replace(domain, labels=domain.labels * 0, class_names=("all",)))
    wrong(r"bars has one class \(0\); needed: two", replace(domain, labels=domain.labels * 0, class_names=()))
    other = domain.select(range(30)).prepared(Preprocess(mean=(0.9,), std=(0.1,)))
    wrong(r"another preprocessing .*mean: \(0.0,\) against \(0.9,\); std: .*validation.prepared", validation=other)
    wrong(r"torch.float32 images", validation=replace(domain, images=domain.images.float()))

    odd = os.fsdecode(b"caf\xe9")
    wrong(r"the folder 'caf\\udce9' has a name that is not UTF-8.*Rename", replace(domain, name=odd))
    wrong(r"the folder 'caf\\udce9'", replace(domain, class_names=("a", "b", "c", odd)))
    (tmp_path / "four.txt").write_text("".join(f"{i}.png\n" for i in range(4)))
    missing = undrift.images.domain(tmp_path / "four.txt").sources  # nothing is decoded before
    (tmp_path / "four.txt").unlink()
    wrong(r"not UTF-8", FileDomain("files", missing, torch.arange(4) % 2, ("a", odd)))
    assert not list(tmp_path.iterdir())
