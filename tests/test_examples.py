"""The examples are short, run, and their notebooks are current."""

from pathlib import Path

import pytest
from make_notebooks import NAMES, notebook

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
IN_LOOPS = ("accelerate_loop", "hugging_face_pipeline", "lightning_callback")  # real_models/test_examples.py runs them
LINES = 40


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_their_scripts(name: str) -> None:
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8") == notebook(script), (
        "run python examples/make_notebooks.py"
    )


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(
    name: str, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    shown: list[int] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf().number) or plt.close("all"))
    script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
    assert shown or name == "packs"
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", IN_LOOPS)
def test_examples_in_other_loops_are_short(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES
    compile(text, name, "exec")
