"""TTT's second head: cut from any network's own end, trained along with the source, or refused with a reason."""

import math
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
import undrift_bench.train
from prepared_support import UNTRAINED, Fixed, Small, head_of, small
from support import images
from undrift.images import TensorDomain
from undrift.likelihood import Rotation
from undrift_bench import zoo
from undrift_bench.train import TrainOptions, train_rotation
from undrift_bench.train.rotation import WithRotation
from undrift_bench.train.schedule import factor


def test_what_comes_after_the_split_is_the_networks_own() -> None:
    net = small()
    x = images()
    head: Any = head_of(net, "layer2")
    assert {n.split(".")[1] for n, _ in head.named_parameters()} == {"norm2", "fc"}
    head.rest.fc = net.fc
    assert torch.equal(head(net.shared(x)), net(x))
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(144, 3))
    head = head_of(nested, "0.0")
    head.rest[2] = nested[2]
    assert torch.equal(head(nested[0][0](x)), nested(x))
    assert head_of(nested).split == "0"
    model = undrift.perturb(net, layers=())
    for split, says in (
        ("layer3", r"split='layer3' names no submodule \(did you mean 'layer2'.*Name one"),
        ("fc", "leaves no linear layer"),
    ):
        with pytest.raises(undrift.OptionError, match=says), Rotation(split).watch(model):
            pass


def test_ttts_network_shares_two_stages_of_three() -> None:
    net = zoo.resnet26_gn()
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == 26
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {8}
    head: Any = head_of(net)
    assert {name.split(".")[1] for name, _ in head.named_parameters()} == {"layer3", "norm", "fc"}
    assert head(torch.rand(2, 32, 16, 16)).shape == (2, 4)
    x = torch.rand(2, 3, 32, 32)
    head.rest.fc = net.fc
    assert torch.equal(head(net.layer2(net.layer1(net.conv1(x)))), net(x))


def test_source_training_with_the_rotation_loss(tmp_path: Path) -> None:
    assert [factor("steps", p) for p in (0.49, 0.5, 0.9)] == pytest.approx([1, 0.1, 0.01])
    both = WithRotation(small())
    both.head = Fixed(9.0, 0, 0, 0)
    wanted = (math.log(math.exp(9) + 3) * 4 - 9) / 4  # one of the four rotations is the one it says
    assert float(both.more_loss(images(2)).detach()) == pytest.approx(wanted, rel=1e-5)

    pixels, labels = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 2
    domain = TensorDomain("source", pixels, labels, ("a", "b"))
    options = TrainOptions(network="resnet26_gn", epochs=1, batch_size=4, held_out=0, schedule="steps", lr=0.1)
    out = tmp_path / "ttt.safetensors"
    trained = train_rotation(domain, out, options, device="cpu", progress=False)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["ttt.head.safetensors", "ttt.safetensors"]
    net, header = undrift_bench.train.load_source(out)
    assert (header.network, header.class_names) == ("resnet26_gn", ("a", "b"))
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(net(x), trained.network(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the head is trained, and nobody warns
        going = undrift.stream(net, [x], method="ttt", head=tmp_path / "ttt.head.safetensors", views=2)
        next(going)
    assert trained.curve in (None, tmp_path / "ttt.png")
    assert not list(tmp_path.glob("*joint*"))
    for left in ("ttt.safetensors", "ttt.head.safetensors", "ttt.png"):
        with pytest.raises(undrift.OptionError, match=f"{left} is there already"):
            train_rotation(domain, out, options)
        (tmp_path / left).unlink(missing_ok=True)
        if trained.curve is None and left == "ttt.head.safetensors":
            break


class Wrapped(nn.Module):
    """A network that says its logits in some other way than as a tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, inner = how, small()
        self.conv1, self.norm1, self.layer2 = inner.conv1, inner.norm1, inner.layer2
        self.norm2, self.fc = inner.norm2, inner.fc

    def forward(self, x: Tensor) -> Any:
        logits = Small.forward(self, x)  # type: ignore[arg-type]
        if self.how == "dict":
            return {"features": x, "logits": logits}
        return (logits, x) if self.how == "tuple" else SimpleNamespace(logits=logits)


def after_ttt(net: nn.Module, **settings: Any) -> Tensor:
    torch.manual_seed(3)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, images(4).split(2), method="ttt", views=4, stream_lr=0.05, **settings)
    return torch.cat([p.probs for p in going])


@pytest.mark.parametrize("how", ["dict", "tuple", "object"])
def test_ttt_takes_logits_however_the_network_says_them(how: str) -> None:
    assert torch.equal(after_ttt(Wrapped(how)), after_ttt(small()))
    both = WithRotation(Wrapped(how))
    assert both.more_loss(images(2)).isfinite()


@pytest.mark.parametrize("part", [pytest.param("all", marks=pytest.mark.slow), "stem"])
def test_ttt_looks_through_torch_compile(part: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        rest = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
        return nn.Sequential(OrderedDict(stem=first, middle=nn.Conv2d(4, 4, 3), rest=rest)).eval()

    for split in (None, "stem.0"):
        other = net()
        if part == "all":
            other = torch.compile(other, backend="eager")
        else:
            other.stem = torch.compile(other.stem, backend="eager")
        assert head_of(other).split == head_of(net()).split == "middle"
        assert torch.equal(after_ttt(other, split=split), after_ttt(net(), split=split))
        torch._dynamo.reset()


class Normalising(Small):
    """A network that normalises its images by itself, in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - torch.full((3, 1, 1), 0.5)) / 0.25)


class Tokens(Small):
    """A network that asks for more dimensions than its shared features have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * x.sum(3, keepdim=True))


def test_what_cannot_run_behind_the_split_by_itself_is_said() -> None:
    with pytest.raises(
        undrift.OptionError, match=r"'layer2' cannot be run by itself \(RuntimeError.*nn\.Module.*head="
    ):
        after_ttt(Normalising().eval())
    head = head_of(Tokens(), "layer2")
    with pytest.raises(undrift.OptionError, match=r"cannot be run by itself \(IndexError.*needed: .*shape \(2, 8\)"):
        head(torch.rand(2, 8))
    net = Normalising().eval()
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 4))
    list(undrift.stream(net, [images(2)], method="ttt", head=head, views=2))  # a head of one's own will do
