"""Make command-line options from the fields of a dataclass, and `--help-all`, which shows those that `--help` hides.

Values are passed on as text. The dataclass checks them, and lists all errors at once.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer

Run = Callable[..., Any]


def flag(default: Any, help: str, metavar: str | None = None, *, main: bool = False) -> Any:  # noqa: A002
    """Return a dataclass field for the command line; where some fields are `main`, `--help` shows only these."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, "main": main})


def takes(
    group: type,
    into: str,
    panel: str,
    *,
    names: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
    defaults: object | None = None,
) -> Callable[[Run], Run]:
    """Give a command one option per field of a dataclass; the command gets those that were given, as a dict.

    Args:
        into: the command's argument for the dict.
        panel: the heading over these options in the help. Hidden options have their own group as heading.
        names: second names of some options: {"adapt_lr": "--lr"}.
        hidden: options that this command shows with `--help-all` only.
        defaults: an instance whose values the help shows as defaults; without it, those of the fields.
    """
    hints, fields = get_type_hints(group), dataclasses.fields(group)
    some = any(f.metadata.get("main") for f in fields)
    shown = [f for f in fields if (f.metadata.get("main") or not some) and f.name not in hidden]
    others = [f for f in fields if f not in shown]

    def decorate(run: Run) -> Run:
        @wraps(run)
        def with_flags(**given: Any) -> Any:
            values = {f.name: given.pop(f.name) for f in fields}
            chosen = {n: _value(v, hints[n]) for n, v in values.items() if v is not None and v != []}
            return run(**given, **{into: chosen})

        second = names or {}
        extra = []
        for f in (*shown, *others):
            heading = panel if f in shown else (f.metadata.get("group") or panel).capitalize()
            default = f.default if defaults is None else getattr(defaults, f.name)
            text = _help(f, hints[f.name], default)
            extra.append(_parameter(f, hints[f.name], second.get(f.name), heading, f in others, text))
        return signed(with_flags, [p for p in parameters_of(run) if p.name != into] + extra)

    return decorate


def parameters_of(run: Run) -> list[inspect.Parameter]:
    """Return a command's parameters with their types, as typer reads them."""
    hints = get_type_hints(run, include_extras=True)
    parameters = inspect.signature(run).parameters.values()
    return [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]


def signed(run: Run, parameters: list[inspect.Parameter]) -> Run:
    """Return a function with these parameters as its signature, all of them keywords."""
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    # Typer reads both the signature and the annotations.
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in named}
    return run


def switch(name: str, option: str, help: str, **settings: Any) -> inspect.Parameter:  # noqa: A002
    """Return the parameter of an option without a value."""
    annotation = Annotated[bool, typer.Option(option, help=help, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def help_all(parameters: list[inspect.Parameter]) -> inspect.Parameter:
    """Return `--help-all` for a command with these parameters; it is hidden where it would show no more."""
    settings = (part for p in parameters for part in getattr(p.annotation, "__metadata__", ()))
    more = any(getattr(part, "hidden", False) for part in settings)
    return switch(
        "help_all",
        "--help-all",
        "Show every option and exit.",
        is_eager=True,
        callback=_print_all,
        hidden=not more,
    )


def _print_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]  # every option and argument of typer has it
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


def _parameter(
    f: "dataclasses.Field[Any]", hint: Any, second: str | None, panel: str, hidden: bool, text: str
) -> inspect.Parameter:
    option = "--" + f.name.replace("_", "-")
    names = (option,) if second is None else (option, second)
    shown: dict[str, Any] = {
        "help": text,
        "rich_help_panel": panel,
        "show_default": False,
        "hidden": hidden,
    }
    kind: Any
    if hint is bool:
        kind, names = Optional[bool], (f"{option}/--no-{option[2:]}",)  # noqa: UP045
    else:
        kind = Optional[list[str]] if get_origin(hint) is tuple else Optional[str]  # noqa: UP045
        shown["metavar"] = f.metadata.get("metavar") or _metavar(hint)
    annotation = Annotated[kind, typer.Option(*names, **shown)]
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(hint: Any) -> str:
    if hint is int or int in get_args(hint):
        return "N"
    return "X" if float in (hint, *get_args(hint)) else "NAME"


def _help(f: "dataclasses.Field[Any]", hint: Any, default: object) -> str:
    """Return the help line with its choices and default: columns of their own would take half the width."""
    text = f.metadata["help"]
    if get_origin(hint) is Literal:
        text = f"{', '.join(get_args(hint))}: {text}"
    elif text.split()[0].isalpha():  # not "module:function"
        text = text[:1].upper() + text[1:]
    if default not in (None, (), "", False):
        text += f" (default {', '.join(default) if isinstance(default, tuple) else default})"
    return f"{text}."


def _value(given: Any, hint: Any) -> Any:
    """Return text as a number where the field holds one; text that is none stays, for the dataclass to refuse."""
    if isinstance(given, list):
        return tuple(given)
    kinds = (hint, *get_args(hint))
    for kind in (int, float):
        if kind in kinds and isinstance(given, str):
            try:
                return kind(given)
            except ValueError:
                continue
    return given
