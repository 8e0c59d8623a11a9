"""The examples are short, run, and their notebooks are current."""

from pathlib import Path

import pytest
import torch
from make_notebooks import NAMES, notebook
from torch import nn
from torchmetrics.classification import MulticlassF1Score
from torchmetrics_report import judged

from support import same, snapshot

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
IN_LOOPS = (  # tests/real_models runs them, but for the last one
    "accelerate_loop",
    "hugging_face_pipeline",
    "lightning_callback",
    "monai_segmentation",
    "ray_predict",
    "torchmetrics_report",
)
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


@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
def test_a_report_holds_metrics_of_torchmetrics() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    loader = [(torch.rand(8, 3, 8, 8), torch.arange(8) % 3) for _ in range(3)]
    before = snapshot(net)
    found = judged(net, loader, 3, epochs=1, progress=False)
    assert [*found] == ["source", "adapted"]
    labels = torch.cat([y for _, y in loader])
    with torch.no_grad():
        told = torch.cat([net(x).argmax(1) for x, _ in loader])
    assert found["source"]["F1"] == pytest.approx(float(MulticlassF1Score(3)(told, labels)))
    assert found["source"]["error"] == pytest.approx(float((told != labels).float().mean()))
    assert all(0 <= value <= 1 for numbers in found.values() for value in numbers.values())
    assert same(snapshot(net), before)
