"""Adaptation steps of all rivals as functions of a batch, for `undrift bench speed`.

A step is forward, KL where there is one, backward, optimiser; one sample; batch statistics in norm layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.likelihood import entropy
from undrift.loop.cuda_graph import Captured
from undrift.objective import step_loss
from undrift.perturb import perturb
from undrift.posterior.perturbed import Perturbed
from undrift_bench import zoo
from undrift_bench.zoo.wideresnet import WideResNet

Step = Callable[[Tensor], None]
STEPS = ("tent", "vmp", "fine-tune", "released")


@dataclass(frozen=True)
class Case:
    """A network and its batch.

    Attributes:
        network: a name of `NETWORKS`.
        batch: images per step.
        side: height and width of an image.
        classes: outputs.
        width: widening of a WideResNet.
        samples: draws a step.
    """

    network: str
    batch: int
    side: int
    classes: int = 10
    width: int = 10
    samples: int = 1

    def build(self) -> nn.Module:
        """Return the network with fresh weights."""
        torch.manual_seed(0)
        if self.network == "WRN-28":
            return WideResNet(28, self.width, self.classes)
        if self.network == "WRN-40":
            return WideResNet(40, self.width, self.classes)
        return zoo.build("resnet50", classes=self.classes) if self.network == "ResNet-50" else ViT(self.classes)


class ViT(nn.Module):
    """A ViT-S/16 written out: patches, twelve blocks of attention and MLP with linear layers, LayerNorm."""

    def __init__(self, classes: int, width: int = 384, depth: int = 12, heads: int = 6, patches: int = 196) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×224×224."""
        rows = self.patch(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1).to(rows), rows], dim=1) + self.place.to(rows)
        logits: Tensor = self.head(self.norm(self.blocks(rows))[:, 0])
        return logits


class Block(nn.Module):
    """Attention and a two-layer MLP, each after a LayerNorm, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return N×rows×width."""
        n, rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        inner = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, rows, width)
        x = x + self.proj(inner)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def images(batch: int, side: int, device: torch.device, low: bool) -> Tensor:
    """Return random images, channels-last where precision is `low`."""
    x = torch.rand(batch, 3, side, side, device=device)
    return x.to(memory_format=torch.channels_last) if low else x


def make_step(
    kind: str, case: Case, device: torch.device, compiled: bool = False, low: bool = True, graphs: bool = False
) -> Step:
    """Return a step of one rival.

    Args:
        kind: one of `STEPS`.
        compiled: the loss as one graph of torch.compile.
        low: channels-last and bfloat16 autocast; else contiguous and float32 (tf32 on a GPU).
        graphs: the whole step is one CUDA graph, so that none of its kernels waits for Python. (The compiler's own
            graphs leave out the optimiser, and wait at each step for what guards a compiled function.)
    """
    loss, parameters, _ = make_loss(kind, case, device, low)
    if compiled:
        loss = torch.compile(loss, fullgraph=True)
    fused = True if device.type == "cuda" else None
    optimiser = torch.optim.Adam(parameters, lr=1e-5, fused=fused, capturable=graphs)

    def step(x: Tensor) -> None:
        for sample in range(case.samples if kind == "vmp" else 1):
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                value = loss(x)
            value.backward()
            del value, sample
        optimiser.step()
        optimiser.zero_grad()

    return Captured(step) if graphs else step


def make_loss(
    kind: str, case: Case, device: torch.device, low: bool = True
) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter], nn.Module]:
    """Return a rival's loss as a function of a batch, what its gradient may change, and the network under it."""
    net = case.build().to(device)
    if low:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return *_LOSSES[kind](net, case), net


def vmp_network(net: nn.Module, **changes: Any) -> Perturbed:
    """Return the network as these measurements perturb it: a variance per kernel everywhere, batch statistics."""
    return perturb(net, linear_sharing="kernel", norm_statistics="batch", **changes)


def _tent(net: nn.Module, case: Case) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:  # noqa: ARG001
    net.train().requires_grad_(False)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d | nn.LayerNorm)]
    for layer in norms:
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    parameters = [p for layer in norms for p in layer.parameters()]
    for parameter in parameters:
        parameter.requires_grad_()
    return lambda x: entropy(net(x).float()), parameters


def _fine_tune(net: nn.Module, case: Case) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    loss, _ = _tent(net, case)
    return loss, list(net.requires_grad_().parameters())


def _vmp(net: nn.Module, case: Case) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    model = vmp_network(net).eval()

    def loss(x: Tensor) -> Tensor:
        return step_loss(model, x, 10_000) / case.samples

    return loss, [p for p in model.parameters() if p.requires_grad]


def _released(net: nn.Module, case: Case) -> tuple[Callable[[Tensor], Tensor], list[nn.Parameter]]:
    """The released formulation, rebuilt: a second convolution of x² + 0.01 with σ² spread over the whole kernel."""
    loss, parameters = _tent(net, case)
    log_vars = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            start = layer.weight.detach().flatten(1).var(1).mul(1e-6).add(1e-10).log()
            log_vars.append((log_var := nn.Parameter(start), start + 13.8))
            layer.register_forward_hook(_second_convolution(log_var))

    def with_kl(x: Tensor) -> Tensor:
        kl = sum(((q - p).exp() - 1 - (q - p)).mean() for q, p in log_vars) / len(log_vars)
        return loss(x) + 0.005 * kl

    return with_kl, parameters + [q for q, _ in log_vars]


def _second_convolution(log_var: nn.Parameter) -> Callable[..., Tensor]:
    def hook(layer: nn.Conv2d, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        var = log_var.exp()[:, None, None, None].expand_as(layer.weight)
        size = F.conv2d(args[0] ** 2 + 1e-2, var, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        return output + size.sqrt() * torch.randn_like(output)

    return hook


_LOSSES = {"tent": _tent, "vmp": _vmp, "fine-tune": _fine_tune, "released": _released}
