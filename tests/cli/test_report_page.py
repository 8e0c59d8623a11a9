"""`--report` writes a page beside the other results; `--tensorboard` writes events where TensorBoard is installed."""

import sys
from pathlib import Path

import pytest

from faults import missing

from .conftest import MODEL, Run, StopWhen

STREAM = ("stream", "target", *MODEL, "--answers", "a.csv", "--batch-size", "10", "--method", "tent")


def test_adapt_writes_a_page_of_its_images(run: Run, work: Path) -> None:
    words = ("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "1", "--report")
    found = run(*words, "page.html", "--json")
    assert found.code == 0, found.err
    assert found.json["wrote"][-1] == "page.html"
    page = (work / "page.html").read_text()
    assert page.endswith("</html>\n")
    assert "red" in page
    assert "data:image/png" in page
    again = run(*words, "page.html")
    assert (again.code, "page.html is there already" in again.err) == (1, False)
    wrong = run(*words, "page.pdf", "--force")
    assert (wrong.code, "does not end in .html" in wrong.err) == (2, True)


def test_a_stopped_stream_goes_on_with_its_page(stop_when: StopWhen, run: Run, work: Path) -> None:
    words = [*STREAM, "--state", "s.state", "--state-every", "1", "--report", "page.html"]
    stop_when("a.csv", 11, *words)
    stopping = [word.replace("tiny_of_tests:make", "tiny_of_tests:stopping") for word in words]
    (work / "stop").write_text("nothing any")
    found = run(*stopping, "--json")
    assert found.code == 0, found.err
    page = (work / "page.html").read_text()
    assert "mean confidence over 30 images" in page  # those of the first run among them


def test_evaluate_compares_with_the_source_network(run: Run, work: Path, adapted: Path) -> None:
    words = ("evaluate", "--target", "target", *MODEL, "--report", "page.html")
    assert run(*words).code == 0
    assert "of the answers are wrong on target" in (work / "page.html").read_text()
    found = run(*words, "--domain", adapted, "--force")
    assert found.code == 0, found.err
    page = (work / "page.html").read_text()
    assert "source network" in page
    assert "counted with labels" in page
    several = run("evaluate", "--target", "target", "--target", "source", *MODEL, "--report", "both.html")
    assert several.code == 0, several.err
    assert "Every score of the source network" in (work / "both.html").read_text()
    generalized = run(
        "evaluate", "--target", "target", "--source", "source", *MODEL, "--report", "g.html", "--domain", adapted
    )
    assert generalized.code == 0, generalized.err
    assert "Every score of the source network" in (work / "g.html").read_text()


def test_tensorboard_that_is_missing_is_named_before_any_work(run: Run, work: Path) -> None:
    with missing("tensorboard"):
        sys.modules.pop("torch.utils.tensorboard", None)
        found = run(*STREAM, "--tensorboard", "events")
    assert found.code == 1
    assert 'undrift[tensorboard]"' in found.err
    assert not (work / "a.csv").exists()


@pytest.mark.slow
def test_tensorboard_gets_the_steps(run: Run, work: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "2", "--batch-size", "10")
    assert run(*words, "--tensorboard", "events").code == 0
    events = EventAccumulator(str(work / "events")).Reload()
    assert [e.step for e in events.Scalars("adapt/entropy")] == [1, 2, 3, 4, 5, 6]
