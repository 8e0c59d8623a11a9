"""Make the likelihood that the flags name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from undrift._errors import OptionError
from undrift.cli.flags import flag

NAMES = ("entropy", "information", "shot", "consistency")


@dataclass(frozen=True)
class LikelihoodFlags:
    """A likelihood and its settings."""

    likelihood: str | None = flag(None, f"what a step asks: {', '.join(NAMES)}", "NAME", main=True)
    beta: float | None = flag(None, "weight of the cross-entropy to pseudo-labels (shot; 0.3 in the paper)")
    features: str | None = flag(None, "submodule that gives the features (shot and other methods)", "NAME")
    statistics_first: bool = flag(False, "update norm statistics before the first pseudo-labels (shot)")
    class_prior: str | None = flag(None, "class frequencies, such as 0.2,0.8 (shot, information)", "NUMBERS")
    weight: float | None = flag(None, "weight of the consistency relative to the entropy (consistency)")


OF_EACH = {
    "entropy": (),
    "information": ("class_prior",),
    "shot": ("beta", "features", "statistics_first", "class_prior"),
    "consistency": ("weight",),
}


def make_likelihood(given: dict[str, Any], usual: str) -> Callable[..., Any]:
    """Return the likelihood that the flags describe; `usual` is its name if none is given."""
    import difflib

    from undrift import likelihood

    settings = dict(given)
    name = settings.pop("likelihood", usual)
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OptionError(f"there is no likelihood {name!r}; needed: one of {', '.join(NAMES)}.{hint}")
    foreign = [f"--{key.replace('_', '-')}" for key in settings if key not in OF_EACH[name]]
    if foreign:
        owners = [n for n in NAMES if settings.keys() & set(OF_EACH[n])]
        raise OptionError(
            f"{', '.join(foreign)} does not belong to {name}; it belongs to {' and '.join(owners)}. Leave it out, or "
            f"choose --likelihood {owners[0]}."
        )
    settings = read_settings(settings)
    if name == "entropy":
        return likelihood.entropy
    if name == "information":
        return likelihood.Information(**settings)
    if name == "shot":
        return likelihood.Shot(**settings)
    return likelihood.Consistency(base=likelihood.entropy, **settings)


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags as settings; raise if a number is not one."""
    settings = dict(given)
    problems = [
        f"{k}={v!r} is not a number" for k, v in settings.items() if k in ("beta", "weight") and isinstance(v, str)
    ]
    if "class_prior" in settings:
        try:
            settings["class_prior"] = [float(part) for part in settings["class_prior"].split(",")]
        except ValueError:
            problems.append(f"class_prior={settings['class_prior']!r} is not a list of numbers, such as 0.2,0.8")
    if problems:
        raise OptionError("; ".join(problems) + ". `undrift adapt --help-all` explains them.")
    return settings
