"""What adapt gives back prints, saves and plots."""

import json
from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

import undrift
from adapt_support import small
from faults import environment, missing
from support import images
from undrift import History
from undrift.adapt import adapt
from undrift.likelihood import entropy


def test_the_history_prints_saves_and_plots(tmp_path: Path) -> None:
    history = adapt(small(), images(8), entropy, epochs=2, batch_size=4)
    lines = str(history).splitlines()
    assert lines[0].split() == ["epoch", "step", "loss", "likelihood", "kl", "entropy", "balance", "lr"]
    assert len(lines) == 5  # the verdict has two
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history
    assert json.loads((tmp_path / "history.json").read_text())["verdict"]["collapsed"] is False
    pytest.importorskip("matplotlib")
    history.plot(tmp_path / "history.png")
    with pytest.raises(undrift.OptionError, match=r"ends in \.xyz.*needed: one of .*png.*history\.png"):
        history.plot(tmp_path / "history.xyz")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other.json").write_text("[1]")
    for path in ("other.json", "none.json"):
        with pytest.raises(undrift.DataError, match="not a history"):
            History.load(tmp_path / path)


def test_plotting_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    with missing("matplotlib"), pytest.raises(undrift.UndriftError, match=r"undrift\[plot\]"):
        History().plot(tmp_path / "history.png")


def test_the_bar_goes_to_stderr_and_shows_the_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    # Of eight images two classes are answered, and one class less is a collapse, which is warned of.
    with environment(COLUMNS="200"):
        adapt(small(), images(32), entropy, epochs=1, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert all(word in err for word in ("adapt", "loss", "kl", "entropy", "balance"))
    adapt(small(), TensorDataset(images(32)), entropy, epochs=1)
    assert capfd.readouterr().err == ""


def test_results_show_their_text_and_not_their_fields() -> None:
    history = adapt(small(), images(8), entropy, epochs=2, batch_size=4)
    assert repr(history) == str(history)
    assert repr(history.verdict) == str(history.verdict)
