"""A folder of Hugging Face's that does not say what its images must look like: the flags do."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults import installed

from .conftest import Run


@pytest.fixture
def bare(work: Path) -> Iterator[Path]:
    """Return a network's folder without preprocessor_config.json, and a package that reads it."""

    def network(_name: str, **_arguments: Any) -> Any:
        from tiny_of_tests import make  # type: ignore[import-not-found]

        made = make()
        made.config = SimpleNamespace(id2label={0: "red", 1: "green", 2: "blue"})
        return made

    def missing(name: str) -> Any:
        raise OSError(f"Can't load image processor for {name!r}")

    (work / "bare").mkdir()
    classifiers, processors = SimpleNamespace(from_pretrained=network), SimpleNamespace(from_pretrained=missing)
    with installed("transformers", AutoModelForImageClassification=classifiers, AutoImageProcessor=processors):
        yield work / "bare"


@pytest.mark.usefixtures("bare")
def test_what_images_get_can_be_said_by_flags(run: Run) -> None:
    words = ("predict", "target", "--model", "hf:bare", "--json")
    for flags in (("--preprocess", "none"), ("--mean", "0.5,0.5,0.5", "--crop", "6")):
        assert run(*words, *flags).json["warnings"] == []
    (warning,) = run(*words).json["warnings"]
    assert "the preprocessing of hf:bare is unknown (bare has no preprocessor_config.json)" in warning
    assert "--preprocess none" in warning
