"""Read and check a domain file without its network. The layout: docs/reference/format.md."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from undrift._errors import DataError, OptionError, UndriftError
from undrift.images.preprocess import Preprocess
from undrift.options import Options
from undrift.packs.file_bytes import damaged, read_bytes
from undrift.packs.sections import Sections
from undrift.packs.shift import Shift
from undrift.posterior.perturbed import Perturbed
from undrift.system.version import own_version

LOG_VAR = ".log_var"
COUNTS = "num_batches_tracked"


@dataclass(frozen=True)
class Sigma:
    """How large the noise of one layer is.

    Attributes:
        layer: its name.
        variances: how many log-variances it has: one per kernel, or one per weight.
        mean: the mean σ; `least` and `most` are its range.
        l1: Σσ over the variances, the paper's measure of a layer's uncertainty.
        relative: mean, least and most of σ over the standard deviation of its kernel.
    """

    layer: str
    variances: int
    mean: float
    least: float
    most: float
    l1: float
    relative: tuple[float, float, float]

    @classmethod
    def of(cls, layer: str, log_var: Tensor, relative: tuple[float, float, float]) -> "Sigma":
        """Return the numbers of one layer."""
        sigma = (0.5 * log_var.detach().double()).exp()
        mean, least, most, l1 = (float(v) for v in (sigma.mean(), sigma.min(), sigma.max(), sigma.sum()))
        return cls(layer, sigma.numel(), mean, least, most, l1, relative)


def sigmas(model: Perturbed) -> tuple[Sigma, ...]:
    """Return how large the noise of each layer of a perturbed network is, in the network's order."""
    out = []
    for slot, noise in zip(model.noise, model.noises(), strict=True):
        ratio = noise.relative_std().double()
        relative = (float(ratio.mean()), float(ratio.min()), float(ratio.max()))
        out.append(Sigma.of(slot.replace("/", "."), noise.log_var, relative))
    return tuple(out)


@dataclass(frozen=True)
class DomainFile:
    """The content of a domain file; prints as a table.

    Attributes:
        path: where it was read from.
        size: bytes of the file.
        undrift: the version of undrift that wrote it.
        fingerprint: of the source network it was learned on.
        source: the source network's name, if one was given.
        options: every choice that was made.
        preprocess: what happens to an image first, if known.
        classes: the names of the classes, if known.
        sigmas: how large the noise of each layer is, in the network's order.
        tensors: log-variances, norm state, and trained weights that are stored exactly, by name.
        shifts: the compressed shifts of trained weights, by the weight's name; in a large network's file, of norm
            state and biases too.
        router: tensors by which a router knows the domain, by name, such as `<norm layer>.input_mean`.
        facts: what the pack says of itself, as JSON values: `created`, `images`, `estimate`, `name`, and what a method
            or router put there.
    """

    path: Path
    size: int
    undrift: str
    fingerprint: str
    source: str | None
    options: Options
    preprocess: Preprocess | None
    classes: tuple[str, ...] | None
    sigmas: tuple[Sigma, ...]
    tensors: Mapping[str, Tensor] = field(repr=False)
    shifts: Mapping[str, Shift] = field(repr=False, default_factory=dict)
    router: Mapping[str, Tensor] = field(repr=False, default_factory=dict)
    facts: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def name(self) -> str:
        """The pack's name: the one it was saved with, or that of its file."""
        return self.facts.get("name") or self.path.stem

    @property
    def created(self) -> str | None:
        """The day on which it was saved first, in UTC, such as "2026-11-19"; None if unknown."""
        return self.facts.get("created")

    @property
    def images(self) -> int | None:
        """On how many images it was adapted; None if unknown."""
        return self.facts.get("images")

    @property
    def estimate(self) -> float | None:
        """The accuracy on its domain, estimated without labels; None if there is no estimate."""
        return self.facts.get("estimate")

    def __str__(self) -> str:
        header = ("layer", "variances", "mean σ", "least", "most", "Σσ", "σ/std")
        body = [
            (s.layer, f"{s.variances:,}", *(f"{v:.3g}" for v in (s.mean, s.least, s.most, s.l1, s.relative[0])))
            for s in self.sigmas
        ]
        widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
        lines = [
            "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in (header, *body)
        ]
        plain = Options().as_dict()
        chosen = [f"{name}={value!r}" for name, value in self.options.as_dict().items() if value != plain[name]]
        return "\n".join(
            [
                f"{self.path.name}: {self.size:,} bytes, undrift {self.undrift}",
                f"source network  {self.source or 'not named'} (fingerprint {short(self.fingerprint)})",
                f"options         {', '.join(chosen) or 'the defaults'}",
                f"made            {self.created or 'unknown when'}, on {self._images()}",
                f"trained weights {self._mean()}",
                f"preprocessing   {self.preprocess or 'not given'}",
                f"classes         {', '.join(map(_quoted, self.classes)) if self.classes else 'not given'}",
                lines[0],
                "─" * len(lines[0]),
                *lines[1:],
            ]
        )

    __repr__ = __str__  # what a notebook shows

    def _images(self) -> str:
        return "an unknown number of images" if self.images is None else f"{self.images:,} images"

    def _mean(self) -> str:
        shifts = [shift for shift in self.shifts.values() if len(shift.shape) > 1]
        if not shifts:
            return "none compressed"
        bits = 8 * sum(shift.nbytes for shift in shifts)
        weights = sum(math.prod(shift.shape) for shift in shifts)
        return f"{weights:,} compressed, {bits / weights:.2f} bits each in memory"


def _quoted(name: str) -> str:
    """Return a class name for a list, quoted if it would look like two or none."""
    return repr(name) if "," in name or name != name.strip() or not name.isprintable() else name


def short(fingerprint: str) -> str:
    """Return the beginning of a fingerprint, enough for people to compare."""
    return f"{fingerprint[:8]}…"


def inspect(path: str | os.PathLike[str]) -> DomainFile:
    """Return the content of a domain file, checked as far as possible without the network.

    Raises:
        DataError: there is no such file, or it is no domain file, or it is cut short or damaged, or a newer undrift
            wrote it with options that this one does not know.
    """
    place = Path(path)
    content, header = read_bytes(place)
    try:
        tensors = safetensors.torch.load(content)
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise damaged(place, str(error)) from error
    try:
        parts = Sections.read(tensors, header)
        for name, tensor in (*parts.tensors.items(), *parts.router.items()):
            whole = name in parts.router and tensor.dtype == torch.int8  # a router may keep bytes
            if not whole and (wrong := problem(name, tensor)):
                raise ValueError(f"{name} {wrong}")
        relative = json.loads(header["relative_std"])
        layers = {name.removesuffix(LOG_VAR) for name in parts.tensors if name.endswith(LOG_VAR)}
        if layers != relative.keys():
            raise ValueError(f"header and log-variances name different layers: {sorted(layers ^ set(relative))}")
        preprocess, classes = json.loads(header["preprocess"]), json.loads(header["classes"])
        return DomainFile(
            path=place,
            size=len(content),
            undrift=header["undrift"],
            fingerprint=header["fingerprint"],
            source=header.get("source"),
            options=Options().replace(**_known("option", json.loads(header["options"]), Options)),
            preprocess=None
            if preprocess is None
            else Preprocess.from_dict(_known("preprocessing", preprocess, Preprocess)),
            classes=None if classes is None else tuple(str(c) for c in classes),
            sigmas=tuple(Sigma.of(n, parts.tensors[n + LOG_VAR], _three(v)) for n, v in relative.items()),
            tensors=parts.tensors,
            shifts=parts.shifts,
            router=parts.router,
            facts=parts.facts,
        )
    except KeyError as error:
        raise damaged(place, f"its header has no {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(place, str(error)) from error
    except UndriftError as error:
        # The checksum is right, so another copy would say the same.
        raise DataError(
            f"{place} was written by undrift {header['undrift']} with what this undrift {own_version()} does not know "
            f"({str(error).rstrip('.')}); needed: options and preprocessing of this version. Update undrift, or run "
            "`undrift adapt` again."
        ) from error


def _known(what: str, values: dict[str, Any], kind: type[Options | Preprocess]) -> dict[str, Any]:
    """Return the values; raise if a name is unknown to this version."""
    if unknown := sorted(values.keys() - {f.name for f in fields(kind)}):
        raise OptionError(f"no {what} is called {', '.join(unknown)}")
    return values


def problem(name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with one tensor's values, or None; a log-variance of −inf means no noise."""
    if name == COUNTS:
        return None if tensor.dtype == torch.int64 and tensor.ndim == 1 else f"is {tensor.dtype}, not a row of int64"
    if tensor.dtype not in (torch.float32, torch.float64):
        return f"is {tensor.dtype}, not float32"
    bad = tensor.isnan() | tensor.isposinf() if name.endswith(LOG_VAR) else ~tensor.isfinite()
    if count := int(bad.sum()):
        return f"holds {count} of {tensor.numel()} values that are NaN or infinite"
    if name.endswith("running_var") and bool((tensor < 0).any()):
        return "holds negative variances"
    return "is empty" if tensor.numel() == 0 else None


def _three(values: Any) -> tuple[float, float, float]:
    mean, least, most = (float(v) for v in values)
    if not all(math.isfinite(v) for v in (mean, least, most)):
        raise ValueError(f"relative_std holds {values}")
    return mean, least, most
