"""Keep a network near the mean of a Gaussian over weights from source training (BACS, PETAL)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, PerturbationMismatch
from undrift._types import Keeper
from undrift.posterior.layers import kernels, per_weight
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name
from undrift.posterior.state import named_learnables, named_sources
from undrift.system.atomic import write_bytes
from undrift.system.validate import a_type
from undrift.system.warning import warn

FORMAT = "1"


class Moments:
    """Mean and variance of every weight over several iterates of source training (diagonal SWAG).

        μ = mean_t θ_t,   σ² = mean_t θ_t² − μ²

    Call `add` at the end of each of a few source epochs, then `save`.

    Args:
        net: the network; its parameters' names and shapes.

    Attributes:
        count: iterates so far.
        mean: μ by the parameter's name, in float64.

    Examples:
        >>> net = nn.Linear(1, 1, bias=False)
        >>> moments = Moments(net)
        >>> for value in (1.0, 3.0):
        ...     _ = nn.init.constant_(net.weight, value)
        ...     moments.add(net)
        >>> float(moments.mean["weight"]), float(moments.variance()["weight"])
        (2.0, 1.0)
    """

    def __init__(self, net: nn.Module) -> None:
        self.count = 0
        self.mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in _weights(net).items()}
        self._squares = {name: torch.zeros_like(mean) for name, mean in self.mean.items()}

    @torch.no_grad()
    def add(self, net: nn.Module) -> None:
        """Take the weights as they are now for one more iterate."""
        weights = _weights(net)
        _check_names(weights, self.mean, "this network")
        self.count += 1
        for name, weight in weights.items():
            # Differences from the mean, not squares, as a weight changes far less between epochs than its size.
            before = weight.double().to(self.mean[name].device) - self.mean[name]
            self.mean[name] += before / self.count
            self._squares[name] += before * (before - before / self.count)

    def variance(self) -> dict[str, Tensor]:
        """Return σ² by the parameter's name; needs two iterates."""
        if self.count < 2:
            raise OptionError(
                f"there are {self.count} iterates; a variance needs at least two. Call add(net) after more epochs."
            )
        return {name: squares / self.count for name, squares in self._squares.items()}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write mean and variance as one safetensors file and return its size in bytes."""
        tensors = {f"mean.{n}": v.float().cpu() for n, v in self.mean.items()}
        tensors |= {f"var.{n}": v.float().cpu() for n, v in self.variance().items()}
        header = {"undrift_moments": FORMAT, "iterates": str(self.count)}
        return write_bytes(path, safetensors.torch.save(tensors, header))


class Posterior(Keeper):
    """Add −log q(θ), times a weight, for a diagonal Gaussian q over all weights; start at its mean.

        posterior_weight · ½ Σ (θ − μ)² / (σ² + floor)

    Args:
        posterior: a file of `Moments.save`, a `Moments`, or a mapping with the mappings "mean" and "var" by the names
            of the network's parameters. None attaches an untrained one, with a warning: μ are the source's weights, σ²
            is `fraction` of the variance of each weight's kernel.
        posterior_weight: factor before −log q. PETAL's is 1e-9; BACS's is not published.
        floor: added to the variances; PETAL's 1e-6.
        fraction: of Var(kernel), for an untrained posterior.
    """

    recordable = True

    def __init__(
        self, posterior: Any = None, posterior_weight: float = 1e-9, floor: float = 1e-6, fraction: float = 0.01
    ) -> None:
        weight = posterior_weight
        if not 0 <= weight < float("inf") or not 0 < floor < float("inf") or not 0 <= fraction < float("inf"):
            raise OptionError(
                f"posterior_weight={weight!r}, floor={floor!r}, fraction={fraction!r}: they are numbers from 0 up, and "
                "floor is above 0. PETAL's weight and floor are 1e-9 and 1e-6."
            )
        self.weight, self.floor, self.fraction = weight, floor, fraction
        self._given = None if posterior is None else _read(posterior)
        self._terms: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    def start(self, model: Perturbed) -> None:
        """Put the network at μ."""
        own = {plain_name(n.removeprefix("net.")): p for n, p in named_learnables(model).items()}
        if self._given is None:
            warn(
                "no posterior= was given: an untrained one is attached, with the source's weights as its mean and "
                f"{self.fraction:g} of each kernel's variance. For BACS collect one at source training: "
                "undrift.keep.Moments."
            )
        mean, var = _untrained(model, self.fraction) if self._given is None else self._given
        _check_names(own, mean, "the posterior", all_of=False)
        self._terms = [(p, mean[n].to(p), var[n].to(p) + self.floor) for n, p in own.items()]
        with torch.no_grad():
            for parameter, centre, _ in self._terms:
                parameter.copy_(centre)

    def penalty(self, model: Perturbed) -> Tensor | None:  # noqa: ARG002
        """Return the weighted −log q of the weights, without its constant."""
        if not self._terms:
            return None
        parts = [((p - centre).square() / spread).sum() for p, centre, spread in self._terms]
        return 0.5 * self.weight * torch.stack(parts).sum()

    def __repr__(self) -> str:
        # A resumed run is recognised by this line.
        given = "untrained" if self._given is None else f"Σμ={sum(float(m.sum()) for m in self._given[0].values()):.6g}"
        return f"Posterior({given}, posterior_weight={self.weight}, floor={self.floor}, fraction={self.fraction})"


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): parameter.detach() for name, parameter in net.named_parameters()}


def _untrained(model: Perturbed, fraction: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the source's weights, and a fraction of the variance of each kernel (or vector)."""
    layers = {id(p): held.layer for held in (*model.norms, *model.trained) for p in held.parameters()}
    learned, mean, var = named_learnables(model), {}, {}
    for long, source in named_sources(model).items():
        name, source = plain_name(long.removeprefix("net.")), source.detach()
        mean[name] = source.clone()
        if source.ndim > 1:
            layer = layers[id(learned[long])]
            spread = per_weight(layer, kernels(layer, source).var(1, correction=0), source).expand_as(source)
        else:
            spread = source.var(correction=0).expand_as(source)
        var[name] = fraction * spread
    return mean, var


def _read(posterior: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return mean and variance of a posterior that the user gives."""
    if isinstance(posterior, Moments):
        return posterior.mean, posterior.variance()
    if isinstance(posterior, Mapping) and {"mean", "var"} <= posterior.keys():
        return posterior["mean"], posterior["var"]
    if not isinstance(posterior, str | os.PathLike):
        raise OptionError(
            f"posterior is {a_type(posterior)}; needed: a file of Moments.save, a Moments, or a mapping with "
            '"mean" and "var". Collect one at source training: undrift.keep.Moments(net).'
        )
    path = Path(posterior)
    try:
        with safe_open(path, framework="pt") as file:
            right = (file.metadata() or {}).get("undrift_moments") == FORMAT
            tensors = {name: file.get_tensor(name) for name in file.keys()} if right else {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); needed: a file of undrift.keep.Moments. Check it."
        ) from error
    if not right:
        raise DataError(f"{path} holds no moments; needed: a file of undrift.keep.Moments(net).save(…). Name that one.")
    parts = ({n.removeprefix(k): t for n, t in tensors.items() if n.startswith(k)} for k in ("mean.", "var."))
    mean, var = parts
    return mean, var


def _check_names(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], whose: str, all_of: bool = True) -> None:
    """Raise if weights have no moments of their shape, or (with `all_of`) if moments have no weight."""
    wrong = [n for n, t in own.items() if n not in theirs or theirs[n].shape != t.shape]
    wrong += [n for n in theirs if n not in own] if all_of else []
    if wrong:
        raise PerturbationMismatch(
            f"{whose} differs in {', '.join(wrong[:3])} ({len(wrong)} in all); needed: the same names and shapes. Use "
            "the network that the moments were collected from."
        )
