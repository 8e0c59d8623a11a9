"""Print a perturbed network: one row per layer, and the totals."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from undrift.posterior import layers
from undrift.posterior.noise import Noise
from undrift.posterior.select import plain_name, slot

if TYPE_CHECKING:
    from undrift.posterior.perturbed import Perturbed


@dataclass(frozen=True)
class LayerRow:
    """One layer: what is done to it, or why nothing is, and its number of learnables."""

    layer: str
    type: str
    perturbed: str
    relative_std: str
    learnables: int


@dataclass(frozen=True)
class Totals:
    """What a perturbed network learns: counts of scalars, and bytes."""

    log_variances: int
    norm_affine: int
    trained: int
    weights: int
    learnable_bytes: int
    network_bytes: int

    @property
    def learnables(self) -> int:
        """Log-variances, norm affine and trained weights together."""
        return self.log_variances + self.norm_affine + self.trained

    @property
    def unshared(self) -> int:
        """The number of learnables with one variance per weight."""
        return self.weights + self.norm_affine


def totals(model: "Perturbed") -> Totals:
    """Return the exact counts of what the model learns."""
    noises = model.noises()
    affine = {id(p): p for policy in model.norms for p in policy.parameters() if p.requires_grad}.values()
    free = {id(p): p for part in model.trained for p in part.parameters() if p.requires_grad}.values()
    trained = [*free, *model.low_rank.parameters()]
    own = {id(t): t for t in (*model.net.parameters(), *model.net.buffers())}.values()
    return Totals(
        log_variances=sum(n.log_var.numel() for n in noises),
        norm_affine=sum(p.numel() for p in affine),
        trained=sum(p.numel() for p in trained),
        weights=sum(n.weights for n in noises),
        learnable_bytes=sum(n.log_var.nbytes for n in noises) + sum(p.nbytes for p in (*affine, *trained)),
        network_bytes=sum(t.nbytes for t in own),
    )


def rows(model: "Perturbed") -> list[LayerRow]:
    """Return one row per layer that is or could be perturbed and one per norm layer, in the network's order."""
    choices = {id(c.layer): c for c in model.choices}
    policies = {id(p.layer): p for p in model.norms}
    inner = {id(m) for c in model.choices if layers.kind(c.layer) == "attention" for m in c.layer.modules()}
    by_name = dict(zip(model.noise, model.noises(), strict=True))
    out: list[LayerRow] = []
    seen: set[int] = set()
    for name, module in model.net.named_modules():
        if choice := choices.get(id(module)):
            names = [slot(choice.name, w) for w in layers.weight_names(module)]
            noises = [by_name[n] for n in names if n in by_name]
            fresh = [n for n in noises if id(n) not in seen]
            seen.update(id(n) for n in noises)
            if choice.why_not is not None:
                what, relative = f"no: {choice.why_not}", ""
            else:
                what = _how(model, module, noises[0]) if noises else "with the layer it shares its weight with"
                relative = " ".join(f"{float(n.relative_std().mean()):.3g}" for n in noises)
            count = sum(n.log_var.numel() for n in fresh)
            out.append(LayerRow(choice.name or "(root)", type(module).__name__, what, relative, count))
        elif policy := policies.get(id(module)):
            affine = [p for p in policy.parameters() if p.requires_grad]
            statistics = f"statistics: {policy.statistics}, " if policy.statistics else ""
            what = f"{statistics}affine {'trained' if affine else 'fixed'}"
            out.append(
                LayerRow(policy.name or "(root)", type(module).__name__, what, "", sum(p.numel() for p in affine))
            )
        elif id(module) not in inner and any(p is not None and p.ndim > 1 for p in module._parameters.values()):
            what = "no: not a convolution, linear or attention layer"
            out.append(LayerRow(plain_name(name) or "(root)", type(module).__name__, what, "", 0))
    return out


def _how(model: "Perturbed", layer: nn.Module, noise: Noise) -> str:
    convolution = layers.kind(layer) in {"conv", "conv_transpose"}
    sharing = model.options.conv_sharing if convolution else model.options.linear_sharing
    unit = {"weight": "weight", "kernel": "kernel" if convolution else "row"}[sharing]
    if layers.is_standard(layer):
        energy = "" if noise.energy == "square" or model.options.estimator == "drawn" else f", {noise.energy}"
        return f"one variance per {unit}, {model.options.estimator}{energy}"
    return f"one variance per {unit}, drawn (it has a forward of its own)"


def render(model: "Perturbed") -> str:
    """Return the table as text."""
    header = ("layer", "type", "perturbed", "σ/std", "learnables")
    body = [
        (r.layer, r.type, r.perturbed, r.relative_std, f"{r.learnables:,}" if r.learnables else "") for r in rows(model)
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(5)]
    lines = [
        "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (header, *body)
    ]
    lines.insert(1, "─" * len(lines[0]))
    return (
        f"Perturbed {type(model.net).__name__}\n" + "\n".join(line.rstrip() for line in lines) + "\n" + summary(model)
    )


def summary(model: "Perturbed") -> str:
    """Return the totals as one line."""
    t = totals(model)
    perturbed = sum(c.why_not is None for c in model.choices)
    weights = f" + {t.trained:,} weights" if t.trained else ""
    return (
        f"{perturbed} of {len(model.choices)} layers perturbed: {t.learnables:,} learnables = {t.log_variances:,} "
        f"log-variances + {t.norm_affine:,} norm affine{weights} ({t.unshared:,} with one variance per weight); "
        f"{_size(t.learnable_bytes)} beside a network of {_size(t.network_bytes)}"
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
