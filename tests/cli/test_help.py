"""`--help` fits one screen and shows what matters first; `--help-all` shows every option in its group."""

import dataclasses
import re
from collections.abc import Iterator

import pytest

import undrift
from faults import environment
from undrift.options import GROUPS

from .conftest import MODEL, Run

OPTIONS = {"--" + f.name.replace("_", "-"): f.metadata for f in dataclasses.fields(undrift.Options)}
MAIN = {name for name, about in OPTIONS.items() if about["main"]}


@pytest.fixture(autouse=True)
def screen() -> Iterator[None]:
    with environment(COLUMNS="80", TERMINAL_WIDTH="80"):
        yield


def shown(text: str) -> set[str]:
    """Return the options that a help text lists."""
    return {name for line in re.findall(r"^│[ *]+(--[a-z,-]+)", text, re.M) for name in line.split(",")}


@pytest.mark.parametrize(
    ("command", "lines", "main"),
    [
        ("adapt", 45, MAIN - {"--stream-lr", "--answer"}),
        ("stream", 50, MAIN - {"--adapt-lr"}),
        ("evaluate", 40, set()),
        ("predict", 40, set()),
        ("export", 40, set()),
        ("corrupt", 40, set()),
    ],
)
def test_help_is_one_screen(run: Run, command: str, lines: int, main: set[str]) -> None:
    found = run(command, "--help")
    assert found.code == 0
    assert len(found.out.splitlines()) <= lines
    assert shown(found.out) & OPTIONS.keys() == main
    assert "--help-all" in shown(found.out)


@pytest.mark.parametrize("command", ["adapt", "stream", "evaluate"])
def test_help_all_shows_every_option_in_its_group(run: Run, command: str) -> None:
    with environment(COLUMNS="160", TERMINAL_WIDTH="160"):
        few = run(command, "--help").out
        found = run(command, "--help-all")
        assert run(command, "--help").out == few  # one command shows all, the next few again
    assert found.code == 0
    assert shown(found.out) >= shown(few) | OPTIONS.keys() | {"--seed", "--json", "--quiet", "--beta", "--device"}
    panels = {
        title.split()[0].lower(): shown(body) for title, body in re.findall(r"╭─ (.+?) ─+╮\n(.*?)╰", found.out, re.S)
    }
    for group in GROUPS:
        rest = {name for name, about in OPTIONS.items() if about["group"] == group} - MAIN
        assert rest <= panels.get(group, set())


@pytest.mark.parametrize("command", ["adapt", "stream"])
def test_help_shows_the_values_of_the_default_method(run: Run, command: str) -> None:
    found = " ".join(run(command, "--help-all").out.replace("│", " ").split())  # lines may be wrapped
    options = undrift.methods.get("undrift", command).options
    assert options.init_fraction != undrift.Options().init_fraction
    for name in ("init_fraction", "kl_weight", f"{command}_lr"):
        help_of_it = found.partition("--" + name.replace("_", "-"))[2].partition(" --")[0]
        assert f"(default {getattr(options, name)})" in help_of_it


def test_hidden_options_work_and_are_suggested(run: Run) -> None:
    words = ("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "1", "--seed", "3", "--json")
    assert run(*words, "--prior-scale", "2").json["options"]["prior_scale"] == 2.0
    found = run(*words, "--prior-scal", "2")
    assert (found.code, "Did you mean --prior-scale?" in found.err) == (2, True), found.err
