"""Two tiny networks, a source and a shifted domain, and the numbers that are taken of answers and adapted networks.

Nothing here is trained: weights are drawn from a seed, norm statistics are those of one pass over the source, and the
classifier is the prototypes of the source's classes. So rounding has nowhere to grow before a method starts.

All that is not a name of `undrift.__all__` goes through the functions under "What a redesign may move".
"""

import copy
import math
from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift

CLASSES, SIDE, COUNT = 5, 12, 48
Numbers = dict[str, float | str]

# What a redesign may move.


def with_masks(net: nn.Module) -> nn.Module:
    """Return the network with G-SFDA's two feature masks behind its bottleneck, seeded."""
    torch.manual_seed(2)
    from undrift_bench.zoo import masked

    return masked(net)


def variants(method: str) -> list[str]:
    """Return the names of a method's variants."""
    return list(undrift.methods.get(method).variants)


def corruptions() -> tuple[str, ...]:
    """Return the names of all corruptions."""
    from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT

    return (*CORRUPTIONS, *DEVELOPMENT)


def log_vars(model: undrift.Perturbed) -> list[Tensor]:
    """Return the log-variances of each perturbed weight, in the network's order."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith("log_var")]


def adapted_state(model: undrift.Perturbed) -> dict[str, Tensor]:
    """Return the network's own weights and norm layers as they are now, by the names of the plain network."""
    return model.net.state_dict()


# Networks.


class Convolutional(nn.Module):
    """Convolutions with batch norms, a linear bottleneck and a classifier, called as a residual network's parts are.

    No layer in front of a batch norm has a bias: its gradient would be rounding, which Adam makes as large as any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.layer2 = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layer4 = nn.Sequential(
            nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.bottleneck = nn.Sequential(nn.Linear(72, 10, bias=False), nn.BatchNorm1d(10))
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(self.bottleneck(self.layer4(x).flatten(1)))


class Tokens(nn.Module):
    """Patches, attention and a linear bottleneck, with group and layer norms; a key's bias would have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 8, 4, stride=4), nn.GroupNorm(2, 8)
        self.before = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.bottleneck = nn.Linear(72, 10)
        self.fc = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(self.patches(x)).flatten(2).transpose(1, 2)
        seen = self.before(tokens)
        tokens = tokens + self.attention(seen, seen, seen, need_weights=False)[0]
        return self.fc(self.bottleneck(self.norm(tokens).flatten(1)))


class RotationHead(nn.Module):
    """TTT's second head: from what `layer2` gives to four logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8 * 36, 4)
        drawn(self, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc(features.flatten(1))


def drawn(net: nn.Module, seed: int) -> nn.Module:
    """Draw all parameters: weights that keep the size of what they see, scales around 1, shifts around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * math.sqrt(2 / parameter[0].numel()))
            else:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
    return net


@cache
def domain(shifted: bool) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and labels: five patterns in noise; the target has less contrast and other colours."""
    generator = torch.Generator().manual_seed(11 if shifted else 10)
    labels = torch.arange(COUNT) % CLASSES
    coarse = torch.rand(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(9))
    patterns = F.interpolate(coarse + 0.7 * coarse.flip(3), SIDE, mode="bilinear") / 1.7
    images = 0.5 * patterns[labels] + 0.5 * torch.rand(COUNT, 3, SIDE, SIDE, generator=generator)
    if shifted:
        images = 0.5 * images + torch.tensor([0.3, 0.1, 0.0]).view(3, 1, 1)
    return images, labels


@cache
@torch.no_grad()
def _source(kind: type[nn.Module]) -> nn.Module:
    net, (images, labels) = drawn(kind(), 1), domain(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    net.train()(images)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 0.1
    seen: list[Tensor] = []
    hook = net.bottleneck.register_forward_hook(lambda _module, _args, output: seen.append(output))
    net.eval()(images)
    hook.remove()
    means = torch.stack([seen[0][labels == c].mean(0) for c in range(CLASSES)])
    scale = 3 / (means - means.mean(0)).square().sum(1).mean()
    net.fc.weight.copy_(scale * (means - means.mean(0)))
    net.fc.bias.copy_(scale * (means.mean(0).square().sum() - means.square().sum(1)) / 2)
    return net


def convolutional() -> nn.Module:
    """Return a copy of the network with batch norms."""
    return copy.deepcopy(_source(Convolutional))


def tokens() -> nn.Module:
    """Return a copy of the network with attention."""
    return copy.deepcopy(_source(Tokens))


def exact() -> nn.Module:
    """Return a network whose every bit is known: its weights are small multiples of a power of two."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, CLASSES))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(((torch.arange(parameter.numel()) * 37) % 101 - 50).view(parameter.shape) / 256)
    return net.eval()


def posterior(net: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return a posterior for BACS: beside the network's weights, as wide as half of them."""
    weights = {name: p.detach() for name, p in net.named_parameters()}
    return {
        "mean": {name: 1.02 * p for name, p in weights.items()},
        "var": {name: 0.25 * p.square() + 0.01 for name, p in weights.items()},
    }


def target() -> Tensor:
    """Return the images to adapt to."""
    return domain(True)[0]


def batches() -> list[Tensor]:
    """Return the images to adapt to as a stream: four batches of twelve."""
    return list(target().split(12))


def labelled(shifted: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return a domain's images with their labels, in batches of sixteen."""
    images, labels = domain(shifted)
    return list(zip(images.split(16), labels.split(16), strict=True))


def seed(number: int = 0) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(number)


# Numbers.


def checksum(values: Tensor) -> float:
    """Return a mean of all values in which places differ in weight, so that none can take another's place."""
    flat = values.detach().double().flatten()
    return float((flat * (1 + (torch.arange(len(flat)) % 7) / 7)).mean())


def of_tensor(values: Tensor, name: str = "") -> Numbers:
    """Return a checksum, the size, and the first row of a tensor."""
    first = values.detach().double().reshape(len(values), -1)[0][:CLASSES].tolist()
    out: Numbers = {f"{name}checksum": checksum(values), f"{name}size": float(values.detach().double().norm())}
    return out | {f"{name}first.{number}": value for number, value in enumerate(first)}


def of_prediction(answer: undrift.Prediction, name: str = "") -> Numbers:
    """Return the numbers of an answer."""
    entropies = {f"{name}entropy": float(answer.entropy.mean()), f"{name}mutual_info": float(answer.mutual_info.mean())}
    return of_tensor(answer.probs, name) | entropies


def after(model: undrift.Perturbed) -> Numbers:
    """Return what a network says when all is done: two draws, in few numbers."""
    answer = undrift.predict(model, target(), samples=2, generator=5)
    return {
        "after.checksum": checksum(answer.probs),
        "after.size": float(answer.probs.double().norm()),
        "after.mutual_info": float(answer.mutual_info.mean()),
    }


def of_model(model: undrift.Perturbed, start: Mapping[str, Tensor]) -> Numbers:
    """Return how far weights, norm layers and log-variances have moved from their start, and the mean σ."""
    now = adapted_state(model)
    moved = [(now[name] - value).double().square().sum() for name, value in start.items() if value.is_floating_point()]
    out: Numbers = {"moved": math.sqrt(sum(map(float, moved)))}
    if not (found := log_vars(model)):
        return out
    fresh = (tokens if isinstance(model.net, Tokens) else convolutional)()
    began = _row(log_vars(undrift.perturb(fresh, model.options)))
    ended = _row(found)
    way = float((ended - began).norm())
    # Log-variances have seven digits: less of a way is their rounding.
    return out | {"sigma": float((ended / 2).exp().mean()), "log_var moved": way if way > 1e-4 else 0.0}


def _row(values: list[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in values])


def of_history(history: undrift.History) -> Numbers:
    """Return the first and the last step of an adaptation, and its verdict."""
    out: Numbers = {"steps": len(history.steps), "idle": history.idle_steps, "bad": history.bad_steps}
    for when, rows in (("first", history.steps[:1]), ("last", history.steps[-1:])):
        for row in rows:
            for name in ("loss", "likelihood", "kl", "entropy", "lr"):
                out[f"{when}.{name}"] = getattr(row, name)
    assert history.verdict is not None
    for when in ("before", "after"):
        survey = getattr(history.verdict, when)
        out |= {f"{when}.entropy": survey.entropy, f"{when}.diversity": survey.diversity}
    return out


def of_stream(stream: undrift.Stream, start: Mapping[str, Tensor]) -> Numbers:
    """Return the numbers of all answers of a stream, of its last step, and of what it left."""
    answers, out = list(stream), Numbers()
    for number, answer in enumerate(answers):
        out |= {f"{number}.checksum": checksum(answer.probs), f"{number}.entropy": float(answer.entropy.mean())}
    last = answers[-1]
    out |= {f"last.first.{number}": p for number, p in enumerate(last.probs[0].tolist())}
    out |= {f"last.{name}": stream.latest[name] for name in ("loss", "likelihood", "kl")}
    out["last.mutual_info"] = float(last.mutual_info.mean())
    report = stream.report
    counts = {name: getattr(report, name) for name in ("steps", "missed", "resets", "skipped")}
    return out | counts | of_model(stream.model, start)
