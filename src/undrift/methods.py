"""Every method by name: what may change × which loss × when.

    print(undrift.methods.table())                          # all of them, with their attributes
    undrift.stream(net, camera, method="tent")
    undrift.adapt(net, images, method="vmp-shot:released")

A name may carry a variant after a colon: a preset of VMP ("vmp:paper", "vmp:released"), or its authors' values for
another benchmark ("tent:imagenet").
"""

from collections.abc import Sequence

from torch import nn

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed
from undrift.recipes import offline, online, ours, plain, prepared
from undrift.recipes.method import Loop, Method
from undrift.system.validate import a_type

METHODS: dict[str, Method] = {
    row.name: row for rows in (plain.ROWS, online.ROWS, offline.ROWS, prepared.ROWS, ours.ROWS) for row in rows
}

DEFAULT = "undrift"
"""The method of `adapt` and `stream` for a plain network."""

__all__ = ["DEFAULT", "METHODS", "Method", "chosen", "get", "names", "table"]


def names(loop: Loop | None = None) -> list[str]:
    """Return the names of all methods, or of those that a loop ("stream" or "adapt") can run.

    Examples:
        >>> "shot" in names("adapt"), "shot" in names("stream")
        (True, False)
    """
    return [name for name, method in METHODS.items() if loop is None or loop in method.loops]


def get(name: str, loop: Loop | None = None) -> Method:
    """Return the method of that name.

    Args:
        name: a name, optionally with ":variant".
        loop: the loop that will run it; a method may differ between its loops.

    Examples:
        >>> get("vmp:released").options.answer
        'before'
    """
    if not isinstance(name, str):
        raise OptionError(f"method is {a_type(name)} ({name!r}); needed: a name. undrift.methods.names() lists them.")
    plain_name, _, variant = name.partition(":")
    if plain_name not in METHODS:
        raise OptionError(f"there is no method {name!r}{_suggest(plain_name, METHODS)}. Methods: {', '.join(METHODS)}.")
    method = METHODS[plain_name]
    if loop is not None and loop not in method.loops:
        other = f'undrift.{method.loops[0]}(net, …, method="{name}")'
        raise OptionError(f"{name} does not run in undrift.{loop}; it needs another loop: {other}.")
    method = method if loop is None else method.in_loop(loop)
    return method.variant(variant) if variant else method


def chosen(
    name: str | None, loop: Loop, model: object, likelihood: object = None, keepers: Sequence[object] = ()
) -> Method | None:
    """Return the method that a loop runs on a network: the named one, the default of a plain network, or none.

    `DEFAULT` applies to a plain network without other arguments: a perturbed one already has its scheme, and with a
    likelihood or keepers the caller combines the parts.
    """
    if name is None:
        inner = (model, getattr(model, "module", None), root_of(model)) if isinstance(model, nn.Module) else ()
        plain = bool(inner) and not any(isinstance(each, Perturbed) for each in inner)
        name = DEFAULT if plain and likelihood is None and not keepers else None
    if name is None:
        return None
    return get(name, loop).for_network(model) if isinstance(model, nn.Module) else get(name, loop)


def table() -> str:
    """Return all methods with their attributes, as Markdown."""
    header = "| method | by | what changes | when | uncertainty | source-free | needs | variants |"
    lines = [header, "|" + "---|" * 8]
    for m in METHODS.values():
        when = " and ".join({"stream": "stream", "adapt": "epochs"}[loop] for loop in m.loops)
        source_free = "yes" if m.source_free else "no"
        cells = [
            f"`{m.name}`",
            m.reference,
            m.changes,
            when,
            m.mutual_info,
            source_free,
            m.needs or "–",
            ", ".join(m.variants) or "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
