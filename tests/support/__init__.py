"""Small networks and randomly drawn layers that the tests share."""

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import undrift

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def varied(net: nn.Module, x: Tensor) -> nn.Module:
    """Return the network with a last layer that gives these images many different answers."""
    *_, last = (module for module in net.modules() if isinstance(module, nn.Linear))
    was = net.training
    with torch.no_grad():
        logits = net.eval()(x)
        last.weight.div_(logits.std(0)[:, None])
        last.bias.copy_((last.bias - logits.mean(0)) / logits.std(0))
    return net.train(was)


def convnet() -> nn.Module:
    """Return a small classifier with every kind of thing in it: stride, groups, two norms, a head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def learnables(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sources(model: undrift.Perturbed) -> dict[str, Tensor]:
    """Return the source's values of what is trained of the network itself, by the same names."""
    names = [name for name in learnables(model) if name.startswith("net.")]
    with model.off() as net:
        own = dict(net.named_parameters())
        return {name: own[name.removeprefix("net.")].detach().clone() for name in names}


@st.composite
def layers_with_input(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Draw a layer of any perturbed type and shape, in float64, and an input for it."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["conv", "transposed", "linear"]))
    batch = draw(st.integers(1, 3))
    if kind == "linear":
        lead = draw(st.sampled_from([(batch,), (batch, 3), (batch, 2, 3)]))
        inputs = draw(st.integers(1, 5))
        return nn.Linear(inputs, draw(st.integers(1, 5))).double(), torch.randn(*lead, inputs).double()
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    size = [draw(st.integers(6, 8)) for _ in range(dims)]
    window = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    x = torch.randn(batch, inputs, *size).double()
    if kind == "transposed":
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        layer = TRANSPOSED[dims](inputs, outputs, window, stride, padding, extra, groups, dilation=dilation)
        return layer.double(), x
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    word = draw(st.sampled_from(["numbers", "numbers", "same", "valid"]))
    if word == "same":
        stride = (1,) * dims
    layer = CONVOLUTIONS[dims](
        inputs, outputs, window, stride, padding if word == "numbers" else word, dilation, groups, padding_mode=mode
    )
    return layer.double(), x
