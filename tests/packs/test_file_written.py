"""A domain file is small, the same for the same state, and written whole or not at all."""

import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import undrift
from faults import full_disk
from file_support import adapted, saved_file
from support import convnet, images
from undrift import fingerprint, save
from undrift.images import Preprocess
from undrift_bench import zoo


def test_a_wide_resnet_28_10_file_is_small_and_its_fingerprint_quick(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = zoo.build("wrn28_10")
    net = net.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(1)
    classes = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    start = time.perf_counter()
    fingerprint(net)
    seconds = time.perf_counter() - start
    model = undrift.perturb(net, preprocess=Preprocess(), classes=classes)
    size = save(model, tmp_path / "w.safetensors", source="WRN-28-10, CIFAR-10")
    print(f"WRN-28-10: {size:,} bytes, fingerprint {seconds:.2f} s")
    assert size <= 230_000
    assert seconds < 5  # 0.2 s alone; the machine is shared


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def test_a_vit_s_file_with_a_variance_a_row_is_below_a_megabyte(tmp_path: Path) -> None:
    with torch.device("meta"):
        blocks = nn.Sequential(*(Block(384) for _ in range(12)))
        parts = {"patch": nn.Conv2d(3, 384, 16, 16), "blocks": blocks, "norm": nn.LayerNorm(384)}
        net: nn.Module = nn.ModuleDict({**parts, "head": nn.Linear(384, 1000)})
    net = net.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.fill_(1)
    model = undrift.perturb(net, linear_sharing="kernel")
    size = save(model, tmp_path / "v.safetensors")
    print(f"ViT-S: {size:,} bytes")
    assert size < 1_000_000


def test_the_same_state_is_the_same_file(tmp_path: Path) -> None:
    model = adapted(convnet())
    contents = {save(model, tmp_path / "a") and (tmp_path / "a").read_bytes() for _ in range(3)}
    assert len(contents) == 1
    assert set(safetensors.torch.load_file(tmp_path / "a")) >= {"0.log_var", "1.running_mean", "num_batches_tracked"}


# Writing ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    return saved_file(tmp_path)


def test_a_full_disk_leaves_what_was_there(saved: tuple[nn.Module, Path]) -> None:
    net, path = saved
    before = path.read_bytes()
    model = undrift.perturb(net)

    with full_disk(), pytest.raises(undrift.DataError, match=r"clinic-b.*disk is full.*untouched.*Free some space"):
        save(model, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert torch.isfinite(model(images())).all()


def test_a_diverged_state_is_not_saved(tmp_path: Path) -> None:
    model = undrift.perturb(convnet())
    with torch.no_grad():
        model.noises()[1].log_var[0] = float("nan")
    with pytest.raises(undrift.DataError, match=r"3\.log_var holds 1 of 8.*lower the learning rate"):
        save(model, tmp_path / "b.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_source_may_be_named_by_a_path(tmp_path: Path) -> None:
    model = adapted(convnet())
    for source, name in ((Path("a") / "b.pt", str(Path("a") / "b.pt")), ("net \udcff", r"net \udcff")):
        save(model, tmp_path / "n.safetensors", source=source)
        assert undrift.inspect(tmp_path / "n.safetensors").source == name


@pytest.mark.parametrize(
    ("source", "classes", "match"),
    [
        (7, None, r"source=7 is an int.*needed: a name.*Give text"),
        (b"net", None, r"source=b'net' is a bytes"),
        (None, ("cat", "d\udcffg"), r"class name 'd\\udcffg' holds half a character.*needed.*model\.classes"),
    ],
)
def test_names_that_no_file_can_hold_are_refused_before_anything_is_written(
    source: object, classes: tuple[str, ...] | None, match: str, tmp_path: Path
) -> None:
    model = adapted(convnet())
    model.classes = classes
    with pytest.raises(undrift.OptionError, match=match):
        save(model, tmp_path / "n.safetensors", source=source)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
