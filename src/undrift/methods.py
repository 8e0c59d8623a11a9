"""Every method by name: what may change × what is asked × when.

    print(undrift.methods.table())                          # all of them, with their attributes
    undrift.stream(net, camera, method="tent")
    undrift.adapt(net, images, method="vmp-shot:released")

A name may carry a variant after a colon: a preset of VMP ("vmp:paper", "vmp:released"), or its authors' values for
another benchmark ("tent:imagenet").
"""

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.recipes import offline, online, ours, plain, prepared
from undrift.recipes.method import Loop, Method

METHODS: dict[str, Method] = {
    row.name: row for rows in (plain.ROWS, online.ROWS, offline.ROWS, prepared.ROWS, ours.ROWS) for row in rows
}

__all__ = ["METHODS", "Method", "get", "names", "table"]


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
        name: a name, with ":variant" where one is meant.
        loop: the loop that is to run it.

    Examples:
        >>> get("vmp:released").options.answer
        'before'
    """
    if not isinstance(name, str):
        raise OptionError(
            f"method is a {type(name).__name__} ({name!r}); needed: a name. undrift.methods.names() lists them."
        )
    plain_name, _, variant = name.partition(":")
    if plain_name not in METHODS:
        raise OptionError(f"there is no method {name!r}{_suggest(plain_name, METHODS)}. Methods: {', '.join(METHODS)}.")
    method = METHODS[plain_name]
    if loop is not None and loop not in method.loops:
        other = f'undrift.{method.loops[0]}(net, …, method="{name}")'
        raise OptionError(f"{name} does not run in undrift.{loop}; it needs another loop: {other}.")
    return method.variant(variant) if variant else method


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
