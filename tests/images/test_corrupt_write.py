"""Writers: the published layouts, whole or not at all, continued and not repeated; the contact sheet."""

import importlib.util
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import undrift
from faults import full_disk
from undrift.images import FileDomain, Preprocess, TensorDomain
from undrift.images.corrupt import contact_sheet, corrupt, write_cifar_c, write_imagenet_c
from undrift_bench import data

pil = pytest.importorskip("PIL.Image")


@pytest.fixture
def cifar() -> TensorDomain:
    """Six small pictures with labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return TensorDomain("CIFAR-10 test", images, torch.arange(6))


@pytest.fixture
def imagenet(tmp_path: Path) -> FileDomain:
    """A tree of three classes with two pictures each, out of order."""
    rng = np.random.default_rng(0)
    for name in ("2", "0", "1"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for file in ("b.png", "a.png"):
            pil.fromarray(rng.integers(0, 256, (80, 90, 3), dtype=np.uint8)).save(tmp_path / "val" / name / file)
    return data.imagenet(tmp_path / "val", preprocess=Preprocess(resize=72, crop=70))


def spoil(path: Path) -> None:
    """Make a picture unreadable and leave its size."""
    path.write_bytes(bytes(path.stat().st_size))


def test_cifar_c_is_stacked_by_severity_and_read_back(tmp_path: Path, cifar: TensorDomain) -> None:
    written = write_cifar_c(cifar, tmp_path, ("fog", "contrast"), seed=4, quiet=True)
    assert (written.made, written.kept) == (("fog.npy", "contrast.npy"), ())
    stack, labels = np.load(tmp_path / "fog.npy"), np.load(tmp_path / "labels.npy")
    assert (stack.shape, stack.dtype) == ((30, 32, 32, 3), np.uint8)
    assert labels.tolist() == [*range(6)] * 5
    for severity in range(1, 6):
        expected = corrupt(cifar.images, "fog", severity, seed=4)
        assert torch.equal(data.cifar10_c(tmp_path, "fog", severity).images, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contrast.npy", "fog.npy", "labels.npy", "undrift.json"]


def test_cifar_c_keeps_what_is_finished_and_leaves_no_part(tmp_path: Path, cifar: TensorDomain) -> None:
    write_cifar_c(cifar, tmp_path, ("fog",), quiet=True)
    before = (tmp_path / "fog.npy").stat().st_mtime_ns

    with full_disk(), pytest.raises(OSError, match="No space left"):
        write_cifar_c(cifar, tmp_path, ("fog", "contrast"), quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fog.npy", "labels.npy", "undrift.json"]
    written = write_cifar_c(cifar, tmp_path, ("fog", "contrast"), quiet=True)
    assert (written.made, written.kept) == (("contrast.npy",), ("fog.npy",))
    assert (tmp_path / "fog.npy").stat().st_mtime_ns == before


def test_a_folder_begun_from_something_else_is_refused(tmp_path: Path, cifar: TensorDomain) -> None:
    write_cifar_c(cifar, tmp_path, ("contrast",), quiet=True)
    with pytest.raises(undrift.DataError, match=r"begun from something else \(seed 0, now 1\); needed.*another folder"):
        write_cifar_c(cifar, tmp_path, ("contrast",), seed=1, quiet=True)
    with pytest.raises(undrift.DataError, match=r"images 6, now 5; content"):
        write_cifar_c(cifar.select(range(5)), tmp_path, ("contrast",), quiet=True)


def test_a_misspelt_corruption_stops_before_the_first_file(tmp_path: Path, cifar: TensorDomain) -> None:
    with pytest.raises(undrift.OptionError, match="Did you mean 'contrast'"):
        write_cifar_c(cifar, tmp_path / "new", ("fog", "contrasst"), quiet=True)
    assert not (tmp_path / "new").exists()


def test_imagenet_c_is_the_published_tree(tmp_path: Path, imagenet: FileDomain) -> None:
    out = tmp_path / "out"
    written = write_imagenet_c(imagenet, out, ("gaussian_noise",), severities=(1, 5), quiet=True)
    assert written.made == ("gaussian_noise/1", "gaussian_noise/5")
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.*"))
    names = [f"{label}/{file}.JPEG" for label in "012" for file in "ab"]
    assert files == [f"gaussian_noise/{severity}/{name}" for severity in (1, 5) for name in names] + ["undrift.json"]
    # images are numbered by class and file, so the last one is number 5
    source = next(source for source in imagenet.sources if source.name.endswith("2/b.png"))
    expected = corrupt(source.read(imagenet.preprocess)[None], "gaussian_noise", 5, first=5)[0]
    file = io.BytesIO()
    pil.fromarray(expected.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=85, optimize=True)
    assert (out / "gaussian_noise/5/2/b.JPEG").read_bytes() == file.getvalue()
    assert len(data.imagenet_c(out, "gaussian_noise", 5)) == 6


def test_imagenet_c_continues_and_names_what_it_cannot_read(tmp_path: Path, imagenet: FileDomain) -> None:
    out = tmp_path / "out"
    write_imagenet_c(imagenet, out, ("contrast",), severities=(2,), quiet=True)
    whole = (out / "contrast/2/1/b.JPEG").read_bytes()
    spoil(tmp_path / "val/0/a.png")
    (out / "contrast/.3.partial").mkdir()
    (out / "contrast/.3.partial/left by a killed run").touch()
    with pytest.warns(UserWarning, match="could not be read"):
        written = write_imagenet_c(imagenet, out, ("contrast",), severities=(2, 3), quiet=True)
    assert (written.made, written.kept) == (("contrast/3",), ("contrast/2",))
    assert written.skipped == ("0/a.JPEG",)
    assert len(list((out / "contrast/3").rglob("*.JPEG"))) == 5
    assert (out / "contrast/2/1/b.JPEG").read_bytes() == whole
    assert not list(out.rglob(".*"))
    # Nothing is read now, and what is not in the folders is still said.
    again = write_imagenet_c(imagenet, out, ("contrast",), severities=(2, 3), quiet=True)
    assert (again.made, again.skipped) == ((), ("0/a.JPEG",))


def test_a_broken_image_does_not_change_the_noise_of_the_next(tmp_path: Path, imagenet: FileDomain) -> None:
    write_imagenet_c(imagenet, tmp_path / "whole", ("shot_noise",), severities=(3,), quiet=True)
    (tmp_path / "val/0/a.png").write_bytes(b"not a picture")
    with pytest.warns(UserWarning, match="could not be read"):
        write_imagenet_c(imagenet, tmp_path / "less", ("shot_noise",), severities=(3,), quiet=True)
    for path in (tmp_path / "less").rglob("*.JPEG"):
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(tmp_path / "less")).read_bytes()


def test_progress_is_shown(tmp_path: Path, cifar: TensorDomain, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar_c(cifar, tmp_path, ("contrast",))
    assert "contrast" in capsys.readouterr().out


def test_the_contact_sheet_is_a_png_of_all(tmp_path: Path, cifar: TensorDomain) -> None:
    if importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the frost pictures come with the wheel imagecorruptions, which is not installed")
    with pil.open(contact_sheet(cifar.images[0], tmp_path / "docs" / "sheet.png")) as sheet:
        assert sheet.format == "PNG"
        assert min(sheet.size) > 800
    with pytest.raises(undrift.DataError, match=r"needed: one, 3×H×W"):
        contact_sheet(cifar.images, tmp_path / "sheet.png")


def test_other_files_of_the_same_names_are_noticed(tmp_path: Path, imagenet: FileDomain) -> None:
    out, todo = tmp_path / "out", ("contrast",)
    write_imagenet_c(imagenet, out, todo, severities=(1,), quiet=True)
    other = imagenet.prepared(Preprocess(resize=72, crop=64))
    with pytest.raises(undrift.DataError, match=r"framing .*'crop': 70.*'crop': 64"):
        write_imagenet_c(other, out, todo, quiet=True)
    with pytest.raises(undrift.DataError, match=r"begun from something else \(device cpu, now cuda\)"):
        write_imagenet_c(imagenet, out, todo, device="cuda", quiet=True)
    with (tmp_path / "val/0/a.png").open("ab") as file:
        file.write(b"more")
    with pytest.raises(undrift.DataError, match=r"begun from something else \(paths and sizes"):
        write_imagenet_c(imagenet, out, todo, quiet=True)


def test_a_note_of_an_older_run_is_gone_on_with(tmp_path: Path, cifar: TensorDomain) -> None:
    write_cifar_c(cifar, tmp_path, ("contrast",), quiet=True)
    note = json.loads((tmp_path / "undrift.json").read_text())
    assert note["device"] == "cpu"
    assert "frost" not in note  # there is none yet, so its pictures may still be chosen
    (tmp_path / "undrift.json").write_text(json.dumps({k: v for k, v in note.items() if k != "device"}))
    assert write_cifar_c(cifar, tmp_path, ("contrast",), quiet=True).kept == ("contrast.npy",)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'{"skipped": 3}'])
def test_a_damaged_note_is_named(tmp_path: Path, cifar: TensorDomain, content: bytes) -> None:
    (tmp_path / "undrift.json").write_bytes(content)
    with pytest.raises(undrift.DataError, match=r"undrift\.json is damaged .*needed: the note .*another folder"):
        write_cifar_c(cifar, tmp_path, ("contrast",), quiet=True)


def test_images_that_cannot_be_corrupted_leave_no_folder(tmp_path: Path, cifar: TensorDomain) -> None:
    grey = TensorDomain("grey", cifar.images[:, :1], cifar.labels)
    with pytest.raises(undrift.DataError, match=r"shape \(6, 1, 32, 32\); needed: N×3×H×W"):
        write_cifar_c(grey, tmp_path / "out", ("contrast",), quiet=True)
    assert not (tmp_path / "out").exists()


def test_class_folders_need_not_be_utf8(tmp_path: Path, imagenet: FileDomain) -> None:
    odd = os.fsdecode(b"caf\xe9")
    (tmp_path / "val/0").rename(tmp_path / odd)
    sources = undrift.images.domain(tmp_path / odd).sources
    domain = FileDomain("odd", sources, torch.zeros(2, dtype=torch.long), (odd,), imagenet.preprocess)
    write_imagenet_c(domain, tmp_path / "out", ("contrast",), severities=(1,), quiet=True)
    assert len(list((tmp_path / "out/contrast/1" / odd).iterdir())) == 2
