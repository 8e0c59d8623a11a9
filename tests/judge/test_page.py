"""The page of a run is one whole file: nothing is loaded, nothing escapes, and what is not known is left out."""

import base64
import dataclasses
import math
import re
from collections import deque
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import undrift
from adapt_support import small
from faults import full_disk
from support import convnet, images
from undrift import History, Prediction, Recording, Report
from undrift.adapt import adapt
from undrift.judge.accuracy import Estimate
from undrift.judge.page import charts, markup
from undrift.judge.page.thumbnail import SIDE, png, thumbnail
from undrift.likelihood import entropy

from .test_report import continual, generalized, offline, result

VOID = {"meta", "link", "br", "img", "path", "rect"}
EVIL = "<script>alert('x')</script>&\"\x00\udcff"


class Checked(HTMLParser):
    """Reads a page as strictly as HTML of our own can be read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert (value or "").startswith("data:"), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def checked(path: Path) -> Checked:
    """Return the page as it reads, once it is known to be whole and to need nothing else."""
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")
    found = Checked(page)
    assert not found.tags & {"script", "iframe", "object", "embed", "form"}
    assert "://" not in page
    assert not re.search(r"@import|url\(", page)
    assert not re.search(r"\bnan\b|\binf\b", page, re.IGNORECASE)
    return found


def answers(count: int, classes: int = 5, seed: int = 0) -> Prediction:
    logits = 3 * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))
    return Prediction.of(logits.softmax(1))


def test_labels_for_other_images_are_refused(tmp_path: Path) -> None:
    history = undrift.adapt(small(), images(24), undrift.entropy, epochs=1)
    for labels in (torch.zeros(3).long(), torch.zeros(25).long()):
        with pytest.raises(undrift.DataError, match=f"{len(labels)} labels for 24 images; needed: one per image"):
            history.page(tmp_path / "a.html", images(24), labels=labels)


def test_an_adaptation_with_images_and_labels(tmp_path: Path) -> None:
    model = small()
    model.classes = ("plain", EVIL, "c", "d", "e")
    history = adapt(model, images(24), entropy, epochs=2, batch_size=6)
    size = history.page(tmp_path / "a.html", images(24), labels=torch.arange(24) % 2)
    assert size == (tmp_path / "a.html").stat().st_size
    found = checked(tmp_path / "a.html")
    assert {"svg", "img", "h1", "details"} <= found.tags
    for words in ("counted with labels", "source network", "ECE", "surest", "Every option", "PyTorch", "σ"):
        assert words in found.text
    history.page(tmp_path / "b.html")
    assert "Every option" in checked(tmp_path / "b.html").text
    assert "img" not in checked(tmp_path / "b.html").tags


def test_asking_for_a_page_changes_nothing(tmp_path: Path) -> None:
    model = small()
    history = adapt(model, images(12), entropy, epochs=1)
    before, flags = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    history.page(tmp_path / "a.html", images(12))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags


def test_without_data_the_page_is_whole(tmp_path: Path) -> None:
    History().page(tmp_path / "a.html")
    assert "The network was adapted" in checked(tmp_path / "a.html").text
    stream = undrift.stream(convnet(), [], method="tent")
    stream.page(tmp_path / "b.html")
    stream.record()
    stream.page(tmp_path / "c.html")
    for name in ("b", "c"):
        assert "No image has come yet" in checked(tmp_path / f"{name}.html").text
    with pytest.raises(undrift.OptionError, match="no model"):
        History().page(tmp_path / "d.html", images(4))


@pytest.mark.parametrize("report", [offline(), generalized(), continual(), Report("offline", (result(EVIL, 0.5),))])
def test_an_evaluation_with_and_without_more(tmp_path: Path, report: Report) -> None:
    report.page(tmp_path / "a.html")
    seen = Recording(classes=[EVIL, "b", "c", "d", "e"])
    seen.add(images(6), answers(6), torch.arange(6) % 5, [EVIL, *map(str, range(5))])
    report.page(tmp_path / "b.html", seen, source=report)
    assert "Adaptation changed nothing" in checked(tmp_path / "b.html").text
    assert "wrong" in checked(tmp_path / "a.html").text


def test_old_reports_without_curves_have_a_page(tmp_path: Path) -> None:
    old = dataclasses.replace(result("fog", 0.9), risks=())
    Report("offline", (old,)).page(tmp_path / "a.html")
    checked(tmp_path / "a.html")


def test_a_recorded_stream_answers_bit_for_bit_the_same(tmp_path: Path) -> None:
    batches = images(60).split(6)

    def run(record: bool) -> tuple[list[torch.Tensor], undrift.Stream]:
        torch.manual_seed(0)
        stream = undrift.stream(convnet(), batches, method="tent", generator=torch.Generator().manual_seed(0))
        if record:
            stream.record()
        return [p.probs for p in stream], stream

    plain, _ = run(record=False)
    recorded, stream = run(record=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    stream.page(tmp_path / "a.html")
    found = checked(tmp_path / "a.html")
    assert "images60" in found.text
    assert "mean confidence over 60 images" in (tmp_path / "a.html").read_text()


def test_a_stream_says_when_it_was_reset_and_which_domain_it_was_in(tmp_path: Path) -> None:
    dark, bright = images(96), 5 + images(96, seed=1)
    stream = undrift.stream(convnet(), [*dark.split(48), *bright.split(48)], method="tent", packs=())
    stream.record()
    for _ in stream:
        pass
    stream.report.reset("collapsed")
    stream.page(tmp_path / "a.html")
    found = checked(tmp_path / "a.html").text
    assert "back to the start: collapsed" in found
    assert "another domain: new-2" in found
    assert "The domain changed once; the guard acted once" in found


def test_the_estimate_and_the_events_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, adapted, gain = Estimate(0.5, 0.05), Estimate(0.7, 0.05), Estimate(0.2, 0.04)
    helping = undrift.Helping(source, adapted, gain, 90, 5, 0.6, (5, 5), 2)
    monkeypatch.setattr(undrift.Stream, "health", helping)
    stream = undrift.stream(convnet(), [images(6)], method="tent")
    next(stream)
    stream.report.event("domain changed", "statistics fit no more")
    stream.report.event("went back", "to the start state; collapsed: one answer")
    stream.report.event("gather on", "batches are small")
    stream.report.reset("collapsed")  # what the second event tells already
    stream.page(tmp_path / "a.html")
    found = checked(tmp_path / "a.html").text
    for words in ("70 %", "50 %", "+20 ± 4 points", "Mind that 90 images are few", "went back: to the start state"):
        assert words in found
    assert "The domain changed once; the guard acted once; the stream adjusted itself once" in found


def test_a_recording_stays_small_and_keeps_every_image() -> None:
    seen = Recording()
    for number in range(2000):
        seen.add(images(2), answers(2, seed=number), torch.tensor([0, 1]))
    assert len(seen.curve) < 240
    assert sum(point.images for point in seen.curve) == 4000
    assert seen.adapted.images == sum(seen.adapted.confidence) == sum(seen.adapted.classes) == 4000
    assert all(len(kept) == 6 for kept in seen.shown.values())
    surest = [image.confidence for image in seen.shown["surest"]]
    assert surest == sorted(surest, reverse=True)
    assert all(image.truth != image.label for image in seen.shown["surest mistakes"])
    assert 0 < seen.error() < 1


def test_a_recording_goes_on_from_its_state(tmp_path: Path) -> None:
    one, other = Recording(), Recording()
    for number in range(5):
        one.add(images(4), answers(4, seed=number))
        one.compare(answers(4, seed=number + 1), answers(4, seed=number))
    torch.save(one.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for seen in (one, other):
        seen.add(images(4), answers(4, seed=9))
    assert one.adapted == other.adapted
    assert one.curve == other.curve
    assert one.agreement == other.agreement
    assert [i.name for i in one.shown["surest"]] == [i.name for i in other.shown["surest"]]


def test_images_without_an_answer_and_answers_for_each_pixel() -> None:
    seen = Recording()
    broken = torch.full((2, 5), math.nan)
    seen.add(images(2), Prediction.of(broken))
    assert (seen.adapted.images, seen.adapted.unanswered) == (0, 2)
    assert not any(seen.shown.values())
    pixels = Prediction.of(torch.randn(3, 4, 8, 8).softmax(1))
    seen.add(images(3), pixels, torch.zeros(3, 8, 8, dtype=torch.long))
    assert seen.adapted.images == 3
    assert sum(seen.adapted.classes) == 3 * 64
    seen.add(torch.rand(3, 7), answers(3, classes=4))  # not pictures
    assert len(seen.shown["surest"]) == 3


def test_thumbnails(tmp_path: Path) -> None:
    exact = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    (tmp_path / "a.png").write_bytes(png(thumbnail(exact)))
    assert np.array_equal(np.array(Image.open(tmp_path / "a.png")), exact.permute(1, 2, 0).numpy())
    preprocess = undrift.images.Preprocess(mean=(0.5,) * 3, std=(0.25,) * 3)
    shown = thumbnail((exact.float() / 255 - 0.5) / 0.25, preprocess)
    assert (shown.int() - exact.permute(1, 2, 0).int()).abs().max() <= 1
    assert max(thumbnail(torch.randn(1, 300, 200)).shape) == SIDE
    assert thumbnail(torch.full((4, 8, 8), math.nan)).shape == (8, 8, 3)


def test_charts_break_where_a_value_is_missing() -> None:
    x, y = charts.numbers(0, 4), charts.shares()
    points = [(0.0, 0.1), (1.0, 0.2), (2.0, math.nan), (3.0, 0.4), (math.inf, 0.1)]
    drawn = charts.line(points, x, y, "adapted")
    assert drawn.count("M") == 2
    assert charts.line([], x, y, "adapted") == charts.line([(0, math.nan)], x, y, "adapted") == ""
    assert charts.round_ticks(3, 3) == [3]
    assert charts.spread([math.nan]) == (0.0, 1.0)
    assert "nan" not in charts.bars([math.nan, 0.5], y, "adapted")
    assert markup.percent(math.nan) == markup.number(math.inf) == markup.percent(None) == "–"


def test_many_events_and_domains_stay_legible(tmp_path: Path) -> None:
    stream = undrift.stream(convnet(), images(40).split(4), method="tent")
    stream.record()
    for _ in stream:
        pass
    stream.report.resets_at = deque((n % 10, "collapsed") for n in range(500))
    stream.page(tmp_path / "a.html")
    assert "491 earlier ones" in checked(tmp_path / "a.html").text


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("before")
    with full_disk(), pytest.raises(undrift.DataError, match="disk is full"):
        offline().page(path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
    with pytest.raises(undrift.DataError, match="no folder"):
        History().page(tmp_path / "none" / "a.html")


def test_names_are_text() -> None:
    assert markup.text(EVIL) == "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;\N{REPLACEMENT CHARACTER}?"
    assert base64.b64encode(png(thumbnail(torch.zeros(3, 1, 1)))).startswith(b"iVBOR")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (0.3, 0.2, "Adaptation helped: 10.0 points fewer errors."),
        (0.2, 0.3, "Adaptation hurt: 10.0 points more errors."),
        (0.2, 0.21, "1.0 points more errors, which may be chance."),
        (0.2, 0.2, "Adaptation changed nothing."),
    ],
)
def test_what_may_be_chance_is_called_so(tmp_path: Path, before: float, after: float, says: str) -> None:
    one, other = (Report("offline", (result("fog", 1 - error),)) for error in (before, after))
    other.page(tmp_path / "a.html", source=one)
    assert says in checked(tmp_path / "a.html").text
