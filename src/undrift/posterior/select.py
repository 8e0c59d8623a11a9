"""Choose the layers to perturb, and explain why the others are not."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from undrift._errors import CannotPerturb, OptionError
from undrift.options import Options, _suggest
from undrift.posterior import layers


@dataclass(frozen=True)
class Choice:
    """A layer that could be perturbed; `why_not` is None if it is."""

    name: str
    layer: nn.Module
    why_not: str | None


def plain_name(name: str) -> str:
    """Return a module's name without the prefix that torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def one_of(names: Iterable[str]) -> str:
    """Return the sentence of an error that lists the names of modules."""
    listed = ", ".join(name for name in names if name)
    if not listed:
        return "The network has no submodules: leave it out."
    return f"Name one of the network's: {listed[:300]}{'…' if len(listed) > 300 else '.'}"


def matching(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches the name or one of its parents', or None."""
    parts = name.split(".")
    parents = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((p for p in patterns if any(fnmatch.fnmatchcase(parent, p) for parent in parents)), None)


def choose(net: nn.Module, options: Options) -> list[Choice]:
    """Return every convolution, linear and attention layer, with the reason if it is left out; raise if all are."""
    chosen = candidates(net, options)
    # layers=() asks for no noise: a scheme that changes only norm layers or weights.
    if options.layers and all(c.why_not for c in chosen):
        found = ", ".join(f"{c.name}: {c.why_not}" for c in chosen) or "no convolution, linear or attention layer"
        raise CannotPerturb(
            f"nothing to perturb in {type(net).__name__}: {found}. Change layers=, exclude=, frozen= or types=."
        )
    return chosen


def candidates(net: nn.Module, options: Options) -> list[Choice]:
    """Return every convolution, linear and attention layer, with the reason if it is left out."""
    # The out-projection of an attention is a Linear that is never called; it belongs to its parent.
    inner = {id(a.out_proj) for a in net.modules() if isinstance(a, nn.MultiheadAttention)}
    modules = [(plain_name(n), m) for n, m in net.named_modules() if id(m) not in inner]
    _check_patterns(options, [n for n, _ in modules])
    candidates, refusals = [], []
    for name, module in modules:
        what = f"{name or 'the network'} ({type(module).__module__}.{type(module).__name__})"
        if layers.is_lazy(module):
            raise CannotPerturb(f"{what} is lazy: it has no weights yet. Run one batch through the network first.")
        why_not = _left_out(name, layers.kind(module), options)
        if why_not is None and (refusal := layers.refusal(module)):
            refusals.append(f"{what} {refusal}. Leave it out: exclude={name!r}.")
        elif layers.kind(module) is not None:
            candidates.append(Choice(name, module, why_not))
    if refusals:
        raise CannotPerturb("\n".join(refusals))
    return _counted(candidates, options)


def _left_out(name: str, kind: str | None, options: Options) -> str | None:
    if pattern := matching(name, options.frozen):
        return f"frozen ({pattern})"
    if pattern := matching(name, options.exclude):
        return f"excluded ({pattern})"
    if not matching(name, options.layers):
        return "not in layers"
    if kind is not None and kind not in options.types:
        return f"{kind} is not in types"
    return None


def _counted(candidates: Sequence[Choice], options: Options) -> list[Choice]:
    """Apply first/last k, which count the layers that are left."""
    left = [c for c in candidates if c.why_not is None]
    kept = left[options.skip_first : max(0, len(left) - options.skip_last)]
    first = kept if options.first is None else kept[: options.first]
    last = kept if options.last is None else kept[-options.last :]
    chosen = {id(c) for c in (kept if options.first is options.last is None else [])}
    chosen |= {id(c) for c in first if options.first is not None} | {id(c) for c in last if options.last is not None}
    given = {name: getattr(options, name) for name in ("first", "last", "skip_first", "skip_last")}
    by = ", ".join(f"{name}={value}" for name, value in given.items() if value != getattr(Options, name))
    return [c if c.why_not or id(c) in chosen else Choice(c.name, c.layer, f"left out by {by}") for c in candidates]


def _check_patterns(options: Options, names: Sequence[str]) -> None:
    for option in ("layers", "exclude", "frozen", "train", "fast"):
        for pattern in getattr(options, option):
            if not any(matching(name, [pattern]) for name in names):
                # G-SFDA derives train from features, so the caller may never have given it.
                whence = f" A method may have {option} from its features=." if option in ("train", "fast") else ""
                raise OptionError(
                    f"{option}={pattern!r} matches no module{_suggest(pattern, names)}; needed: a name, or a pattern "
                    f"such as 'layer4*'. {one_of(names)}{whence}"
                )


def slot(layer: str, weight: str) -> str:
    """Return the name a weight's noise is registered under: module names may not hold dots."""
    own = layer.replace(".", "/") or "(root)"
    return own if weight == "weight" else f"{own}/{weight.replace('.', '/')}"
