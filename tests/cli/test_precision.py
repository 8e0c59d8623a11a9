"""Networks whose weights are in half precision: every command takes them, or says that it is the precision."""

from pathlib import Path

import pytest

from .conftest import MODEL, Run

MODULE = """
import tiny_of_tests
import torch


def half():
    return tiny_of_tests.make().half()


def brain():
    return tiny_of_tests.make().bfloat16()


def mixed():
    network = tiny_of_tests.make()
    network.head.half()
    return network
"""


@pytest.fixture
def halves(work: Path) -> None:
    (work / "halves_of_tests.py").write_text(MODULE)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("function", ["half", "brain"])
def test_every_command_takes_a_network_in_half_precision(run: Run, function: str) -> None:
    model = ("--model", f"halves_of_tests:{function}", *MODEL[2:])
    domain = ("--domain", "b.safetensors")
    for words in (
        ("adapt", "target", "--out", "b.safetensors", "--epochs", "1", "--likelihood", "information"),
        ("predict", "target", *domain),
        ("evaluate", "--target", "target", *domain),
        ("stream", "target", "--answers", "s.csv", "--method", "norm-stats"),
        ("export", *domain, "--images", "target", "--format", "torch.export", "--crop", "8", "--out", "e.pt2"),
    ):
        found = run(*words, *model)
        assert found.code == 0, (words, found.err)


@pytest.mark.usefixtures("halves")
def test_a_stream_says_that_adam_needs_another_precision_than_float16(run: Run) -> None:
    found = run("stream", "target", "--answers", "s.csv", "--model", "halves_of_tests:half", *MODEL[2:])
    assert found.code == 2
    assert "is in float16, in which Adam's averages" in found.err
    assert not Path("s.csv").exists()


@pytest.mark.usefixtures("halves")
def test_an_error_of_precision_is_not_called_one_of_size(run: Run) -> None:
    found = run("predict", "target", "--model", "halves_of_tests:mixed", *MODEL[2:])
    assert found.code == 1
    assert "its weights are in torch.float16, torch.float32); needed: one precision" in found.err
    assert "network.float()" in found.err
    assert "--resize" not in found.err
