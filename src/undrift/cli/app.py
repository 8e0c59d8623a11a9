"""List the commands, run one of them, and turn its outcome into an exit code."""

import difflib
import importlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from undrift.cli.extensions import extensions
from undrift.cli.signals import sigterm_as_ctrl_c
from undrift.system.malloc import keep_freed
from undrift.system.version import own_version

COMMANDS = {
    "adapt": "Adapt a network to unlabelled images and write a domain file.",
    "predict": "Answer images, with how sure the answers are.",
    "stream": "Adapt and answer batch by batch, as images arrive.",
    "evaluate": "Score a network on labelled images.",
    "inspect": "Show what a domain file (or a source model) holds.",
    "packs": "List the domain files of a folder.",
    "export": "Write the adapted network for other programs.",
    "corrupt": "Make CIFAR-10-C or ImageNet-C from clean images.",
    "methods": "List every method by name.",
}

OK, ERROR, USAGE, HURT, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
_ABOUT = (
    "Adapt a network to a new domain without its source data. Every command takes --json, --quiet and --help-all. "
    "Exit codes: 0 done, 1 bad input or output, 2 wrong usage, 3 adaptation hurt, 130 Ctrl-C, 143 SIGTERM."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if arguments is not None:  # called from Python: leave the process's memory, streams and signals alone
        return _run(list(arguments))
    keep_freed()
    _print_anything()
    with sigterm_as_ctrl_c() as came:
        code = _run(sys.argv[1:])
    return TERMINATED if came and code == INTERRUPTED else code


def _run(given: Sequence[str]) -> int:
    try:
        outcome = make_app(given)(list(given), prog_name="undrift", standalone_mode=False)
    except KeyboardInterrupt:  # before the command began, or after it ended
        print("stopped; nothing was written.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        # A usage error. Its base class is click's own or, in newer versions of typer, a copy inside typer.
        if not hasattr(error, "format_message"):
            raise
        return _usage(error, given)
    return outcome if isinstance(outcome, int) else OK


def _print_anything() -> None:
    """Print "?" for characters that the terminal's encoding lacks, so that no command fails because of an arrow."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def make_app(given: Sequence[str]) -> typer.Typer:
    """Return the application. It imports the command that is asked for; the others are only names in the help."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    wanted = next((word for word in given if not word.startswith("-")), None)
    for name, (help_line, module) in commands().items():
        run = importlib.import_module(module).run if name == wanted else _stub
        app.command(name, help=run.__doc__ if name == wanted else help_line, short_help=help_line)(run)
    app.callback(help=_ABOUT)(_version)
    return app


def commands() -> dict[str, tuple[str, str]]:
    """Return help line and module of each command, including those of installed extensions."""
    own = {name: (help_line, f"undrift.cli.{name}") for name, help_line in COMMANDS.items()}
    return own | {name: found for extension in extensions() for name, found in extension.COMMANDS.items()}


def _stub() -> None:
    """Stand in for a command that was not asked for."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"undrift {own_version()}")
        raise typer.Exit(OK)


def _version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Take the options before a command; their callbacks do the work."""


def _usage(error: Any, given: Sequence[str]) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return USAGE
    message = str(error.format_message()).splitlines()[0]
    wrong = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption":
        message = f"No such option: {wrong}.{_did_you_mean(str(wrong), error.ctx)}"
    elif message.startswith("No such command") and "Did you mean" not in message:  # typer before 0.20
        close = difflib.get_close_matches(next(word for word in given if not word.startswith("-")), commands(), n=1)
        message += f" Did you mean {close[0]!r}?" if close else ""
    where = error.ctx.command_path if getattr(error, "ctx", None) else "undrift"
    print(f"undrift: {message}\nTry `{where} --help`.", file=sys.stderr)
    if "--json" in given:
        print(json.dumps({"error": "Usage", "message": message}))
    return int(error.exit_code)


def _did_you_mean(wrong: str, context: Any) -> str:
    known = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    close = difflib.get_close_matches(wrong.partition("=")[0].replace("_", "-"), known, n=1)
    return f" Did you mean {' or '.join(close)}?" if close else ""
