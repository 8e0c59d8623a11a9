"""Pictures of the analyses: what they say, that nothing of it is cut off or covered, and that no number is hidden."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from undrift_bench.bench.analysis import figures
from undrift_bench.bench.analysis.figures import Panels, dots, lines
from undrift_bench.bench.analysis.scores import ACCURACY, NLL, Score, finding, spaced, window
from undrift_bench.bench.analysis.sigma import correlations, spearman

COLLAPSED: Panels = {
    "CIFAR-10-C": {
        "adaptive, where σ starts": {"0.001": Score(78.0, 0.9), "0.1": Score(77.0, 0.84), "1.0": Score(48.8, 1.52)},
        "isotropic, where σ starts": {"0.001": Score(77.5, 0.85), "0.1": Score(10.1, 2.49), "1.0": Score(9.6, 2.77)},
        "isotropic": {"0.001": Score(77.5, 0.85), "0.1": Score(77.5, 0.85), "1.0": Score(77.5, 0.85)},
    }
}
LAYERS: Panels = {
    name: {
        "": {
            "all layers of the network\n9,616 learnables": Score(77.15, 0.842),
            "all but backbone.layer1": Score(78.18, 0.874),
            "the last layer alone": Score(77.05, 0.927),
        }
    }
    for name in ("PACS", "CIFAR-10-C")
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, laid out as they were saved."""
    pytest.importorskip("matplotlib")
    kept: list[Any] = []
    save = figures._save

    def keep(figure: Any, path: Path, **more: Any) -> int:
        kept.append(figure)
        return save(figure, path, **more)

    monkeypatch.setattr(figures, "_save", keep)
    return kept


def boxes(figure: Any) -> dict[str, Any]:
    """Where the texts are, in pixels."""
    figure.draw_without_rendering()
    texts = [part._suptitle for part in (figure, *figure.subfigs)]
    texts += [text for part in figure.subfigs for legend in part.legends for text in legend.get_texts()]
    for axes in figure.get_axes():
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis, coordinate in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            texts += [text for text in axis.get_ticklabels() if low <= text.get_position()[coordinate] <= high]
    found = {f"{place} {text.get_text()}": text for place, text in enumerate(texts) if text.get_text()}
    return {name: text.get_window_extent() for name, text in found.items() if text.get_visible()}


def panel(figure: Any, measure: str) -> Any:
    (found,) = (axes for axes in figure.get_axes() if measure in axes.get_ylabel() + axes.get_xlabel())
    return found


@pytest.mark.parametrize("which", ["lines", "dots"])
def test_no_text_is_cut_off_or_covers_another(tmp_path, drawn, which):
    if which == "lines":
        lines(tmp_path / "a.png", "How much does the scale of the prior matter?", "λ of the prior", COLLAPSED)
    else:
        dots(tmp_path / "a.png", "Which layers need the noise?", LAYERS)
    (figure,) = drawn
    found = boxes(figure)
    width, height = figure.bbox.width, figure.bbox.height
    assert len(found) > 15
    for text, box in found.items():
        assert min(box.x0, box.y0) > -1, text
        assert box.x1 < width + 1, text
        assert box.y1 < height + 1, text
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert not first.padded(-2).overlaps(second.padded(-2)), (one, other)


def test_a_collapsed_curve_leaves_the_rest_readable_and_is_written(tmp_path, drawn):
    lines(tmp_path / "a.png", "title", "λ", COLLAPSED)
    accuracy, nll = (panel(drawn[0], name) for name in ("accuracy", "NLL"))
    assert 70 < accuracy.get_ylim()[0] < 77 < 78 < accuracy.get_ylim()[1] < 80
    assert nll.get_ylim()[1] < 1.1
    assert {text.get_text() for text in accuracy.texts} == {"↓ 48.8", "↓ 10.1", "↓ 9.6"}
    assert {text.get_text() for text in nll.texts} == {"↑ 1.52", "↑ 2.49", "↑ 2.77"}
    assert all(accuracy.get_ylim()[0] < tick for tick in accuracy.get_yticks())


def test_curves_on_one_another_are_all_seen(tmp_path, drawn):
    same = {"0.1": Score(70.0, 1.0), "1.0": Score(71.0, 1.0)}
    lines(tmp_path / "a.png", "title", "λ", {"PACS": {"first": same, "second": same, "third": same}})
    curves = panel(drawn[0], "accuracy").get_lines()
    # A later curve is drawn over an earlier one, so it has to be the smaller.
    for size in ("get_markersize", "get_linewidth"):
        sizes = [getattr(line, size)() for line in curves]
        assert sizes == sorted(set(sizes), reverse=True)
    assert len({line.get_marker() for line in curves}) == 3


def test_dots_stand_where_their_numbers_say_on_an_axis_that_is_near_them(tmp_path, drawn):
    dots(tmp_path / "a.png", "title", {"PACS": LAYERS["PACS"]})
    for name, place in (("accuracy", 0), ("NLL", 1)):
        axes, scores = panel(drawn[0], name), [score[place] for score in LAYERS["PACS"][""].values()]
        assert [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"] == scores
        assert [float(text.get_text()) for text in axes.texts] == scores
        low, high = axes.get_xlim()
        assert low < min(scores) < max(scores) < high
        assert high - low < 4 * (max(scores) - min(scores))


def test_an_axis_is_cut_only_where_numbers_lie_far_off():
    assert window([77.0, 78.0, 76.0, 72.0], ACCURACY) == (72.0, 78.0)
    assert window([77.0, 78.0, 10.0, 77.0], ACCURACY) == (76.5, 78.5)
    assert window([40.0, 60.0], ACCURACY) == (40.0, 60.0)
    assert window([78.0, 77.0, 75.0, *[10.0] * 5], ACCURACY) == (75.0, 78.0)  # most of them collapsed
    assert window([0.8, 0.85, 0.9, 2.5], NLL) == (0.8, 0.9)
    assert window([0.8416, 0.8417], NLL) == pytest.approx((0.83165, 0.85165))
    assert window([70.0], ACCURACY) == (69.0, 71.0)


def test_values_lie_on_a_logarithmic_axis_where_they_span_it():
    assert spaced({"10.0", "0.1", "1.0"}) == {"0.1": -1.0, "1.0": 0.0, "10.0": 1.0}
    assert list(spaced({"0", "50", "1", "2"}).values()) == pytest.approx([-0.30103, 0.0, 0.30103, 1.69897])
    assert spaced({"3", "1"}) == {"1": 1.0, "3": 3.0}
    assert spaced({"0"}) == {"0": 0.0}


def test_a_picture_says_which_value_is_best_or_that_none_is():
    curves = {"SHOT": {"0.1": Score(40.0, 1.5), "2.0": Score(60.0, 2.0)}}
    said = "accuracy 40.0–60.0 %, best at 2.0, SHOT; NLL 1.50–2.00, best at 0.1, SHOT"
    assert finding("PACS", curves) == f"PACS: {said}"
    alike = {"": {"a\n5 learnables": Score(70.2, 0.85), "b": Score(70.0, 0.7)}}
    assert finding("C", alike) == "C: accuracy alike (within 0.2 points); NLL 0.70–0.85, best “b”"


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [3, 3, 9]) == pytest.approx(1)
    record = {
        "sigma": {
            "a": {"l1": 1.0, "relative": 0.1, "start_relative": 0.1},
            "b": {"l1": 2.0, "relative": 0.3, "start_relative": 0.1},
            "c": {"l1": 3.0, "relative": 0.2, "start_relative": 0.1},
        },
        "a_distance": {"a": 0.5, "b": 2.0, "c": 1.0},
    }
    assert correlations(record) == pytest.approx((0.5, 1.0, 1.0))
