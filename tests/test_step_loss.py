"""A step's loss in one function: what its parts add up to, compiled or not."""

import copy

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def near(got: dict[str, Tensor], want: dict[str, Tensor], most: float) -> None:
    """Each gradient is off by so much of its own size at most."""
    assert got.keys() == want.keys()
    for name, other in want.items():
        assert float((got[name] - other).norm()) <= most * float(other.norm()) + 1e-7, name


@pytest.mark.parametrize("likelihood", [undrift.entropy, undrift.Information()])
@pytest.mark.parametrize("reduction", ["bound", "mean"])
def test_it_is_the_likelihood_and_the_divergence(likelihood: object, reduction: str) -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04, kl_reduction=reduction)
    ask = likelihood if likelihood is undrift.entropy else lambda logits: likelihood(logits, None)  # type: ignore[operator]
    model.reseed(1)
    parts = ask(model(images())) + undrift.kl_term(model, 50)
    want = gradients(parts, model)
    model.reseed(1)
    loss = undrift.step_loss(model, images(), 50, ask)
    assert torch.equal(loss, parts)
    near(gradients(loss, model), want, 0)


class Wrapped(nn.Module):
    """Answers with a dictionary, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def test_it_takes_whatever_a_classifier_returns() -> None:
    model = undrift.perturb(Wrapped())
    assert undrift.step_loss(model, images(), 50).isfinite()


def test_compiled_on_a_cpu_it_is_the_same() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04)
    model.reseed(1)
    want = gradients(undrift.step_loss(model, images(), 50), model)
    model.reseed(1)
    torch._dynamo.reset()
    loss = torch.compile(lambda x: undrift.step_loss(model, x, 50), fullgraph=True, backend="aot_eager")(images())
    near(gradients(loss, model), want, 1e-4)
    assert model.key.shared is None


class Every(nn.Module):
    """Layers of every kind: with and without groups, odd, strided, narrow and wide; attention with drawn weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64)
        self.grouped, self.odd = nn.Conv2d(64, 96, 3, 1, 1, groups=2), nn.Conv2d(96, 33, 1)
        self.wide, self.tokens = nn.Conv2d(33, 256, 3, 1, 1), nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1536), nn.Linear(1536, 256)
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(torch.relu(self.norm(self.stem(x)))).relu()
        x = self.wide(self.odd(x)).flatten(2).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.up(self.tokens(x))))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of several kinds
def test_compiled_on_a_gpu_it_is_the_same(order: torch.memory_format) -> None:
    """Noise and KL give log-variances one gradient there, by other kernels than in uncompiled code."""
    torch.manual_seed(0)
    net = Every().cuda().to(memory_format=order)  # type: ignore[call-overload]
    x = torch.rand(8, 3, 16, 16, device="cuda").to(memory_format=order)
    model = undrift.perturb(net, init_fraction=0.04, linear_sharing="kernel", norm_statistics="batch").eval()
    with torch.backends.cudnn.flags(allow_tf32=False):
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each.reseed(1)
        want = gradients(undrift.step_loss(twin, x, 1000), twin)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: undrift.step_loss(model, x, 1000), fullgraph=True)
        got = gradients(compiled(x), model)
    assert all(f"noise.{name}.log_var" in got for name in ("stem", "grouped", "odd", "up", "down", "head"))
    near(got, want, 5e-3)
    assert model.key.shared is None
