"""`undrift corrupt` given twice: it goes on, and leaves what is there alone."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from faults import interrupted
from undrift.images import TensorDomain
from undrift_bench import data

from .conftest import Run

CORRUPT = ("corrupt", "cifar10", "--out", "C", "--name", "contrast", "--sheet", "s.png")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    domain = TensorDomain("CIFAR-10 test", images, torch.arange(4))
    monkeypatch.setattr(data, "cifar10", lambda *_, **__: domain)
    monkeypatch.setattr("undrift.images.corrupt.sheet.corrupt", lambda images, *_, **__: images)


def test_it_writes_zenodos_layout_and_a_sheet(run: Run) -> None:
    found = run("corrupt", "cifar10", "--out", "C", "--name", "contrast", "--name", "brightness", "--json")
    assert found.json["made"] == ["contrast.npy", "brightness.npy"]
    assert sorted(p.name for p in Path("C").iterdir()) == [
        "brightness.npy",
        "contrast.npy",
        "labels.npy",
        "undrift.json",
    ]
    assert run("corrupt", "cifar10", "--out", "C", "--name", "contrast", "--json").json["kept"] == ["contrast.npy"]
    picture = next(Path("source").rglob("*.png"))
    Image.open(picture).resize((32, 32)).save("one.png")
    assert run("corrupt", "one.png", "--sheet", "sheet.png").code == 0
    assert Path("sheet.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_command_goes_on_beside_its_sheet(run: Run) -> None:
    assert run(*CORRUPT).code == 0
    before = Path("s.png").stat().st_mtime_ns
    found = run(*CORRUPT, "--json")
    assert (found.code, found.json["kept"]) == (0, ["contrast.npy"]), found.err
    assert Path("s.png").stat().st_mtime_ns == before
    assert run(*CORRUPT, "--force").code == 0
    assert Path("s.png").stat().st_mtime_ns != before


def test_a_picture_that_was_there_first_is_not_lost(run: Run) -> None:
    Path("s.png").write_bytes(b"mine")
    found = run(*CORRUPT)
    assert (found.code, "s.png is there already" in found.err) == (1, True), found.err
    assert Path("s.png").read_bytes() == b"mine"
    assert not Path("C").exists()


def test_only_the_sheet_that_was_drawn_is_kept(run: Run) -> None:
    assert run(*CORRUPT[:-2]).code == 0
    Path("s.png").write_bytes(b"mine")
    found = run(*CORRUPT)
    assert (found.code, "s.png is there already" in found.err) == (1, True), found.err
    assert run(*CORRUPT[:-1], "t.png").code == 0
    found = run(*CORRUPT[:-1], str(Path("t.png").resolve()))
    assert (found.code, "t.png: kept" in found.out) == (0, True), found.err
    assert run(*CORRUPT).code == 1
    assert Path("s.png").read_bytes() == b"mine"


def test_a_stopped_run_goes_on_beside_its_sheet(run: Run) -> None:
    with interrupted("undrift.images.corrupt.write_cifar_c"):
        assert run(*CORRUPT).code == 130
    assert Path("s.png").exists()
    found = run(*CORRUPT, "--json")
    assert (found.code, found.json["made"]) == (0, ["contrast.npy"]), found.err


def test_a_sheet_of_another_seed_is_not_taken_for_the_folders(run: Run) -> None:
    assert run(*CORRUPT[:-2]).code == 0
    found = run(*CORRUPT, "--seed", "1")
    assert (found.code, "begun from something else (seed 0, now 1)" in found.err) == (1, True), found.err
    assert run(*CORRUPT).code == 1  # there already, and of seed 1


@pytest.mark.parametrize("wrong", [("--name", "fogg"), ("--severity", "1")])
def test_a_wrong_option_draws_and_begins_nothing(run: Run, wrong: tuple[str, str]) -> None:
    assert run(*CORRUPT, *wrong).code == 2
    assert not Path("s.png").exists()
    assert not Path("C").exists()


def test_grey_images_leave_nothing_behind(run: Run) -> None:
    found = run("corrupt", "digits:optdigits", "--out", "D", "--name", "contrast")
    assert (found.code, "needed: N×3×H×W" in found.err) == (1, True), found.err
    assert not Path("D").exists()
