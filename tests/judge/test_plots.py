"""Pictures are drawn without a screen, say what they show, and are whole PNG files."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import undrift
from faults import missing
from support import convnet, learnables
from undrift import Report, inspect, save
from undrift.judge import findings, plots
from undrift.judge.metrics import Reliability

from .test_report import continual, generalized, offline, result

TWO = ((0.0, 0.1), (0.2, 0.3))


def is_png(path: Path) -> bool:
    content = path.read_bytes()
    return content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"


def test_sigma_of_a_model_and_of_a_file(tmp_path: Path) -> None:
    model = undrift.perturb(convnet())
    assert "nothing has moved it" in findings.sigma_finding(plots.sigmas(model))
    with torch.no_grad():
        for parameter in learnables(model).values():
            parameter += torch.rand_like(parameter)
        model.noises()[1].log_var += 3
    size = plots.sigma(model, tmp_path / "a.png")
    assert size == (tmp_path / "a.png").stat().st_size
    assert is_png(tmp_path / "a.png")
    save(model, tmp_path / "b.safetensors")
    plots.sigma(inspect(tmp_path / "b.safetensors"), tmp_path / "b.png")
    assert is_png(tmp_path / "b.png")
    assert "largest in 3:" in findings.sigma_finding(inspect(tmp_path / "b.safetensors").sigmas)
    silent = undrift.perturb(convnet(), init_fraction=0.0)
    plots.sigma(silent, tmp_path / "c.png")
    assert findings.sigma_finding(plots.sigmas(silent)) == "No noise: σ is 0 in every layer"


def test_reports(tmp_path: Path) -> None:
    for name, report in (("o", offline()), ("g", generalized()), ("c", continual())):
        report.plot(tmp_path / f"{name}.png")
        assert is_png(tmp_path / f"{name}.png")
    plots.reliability(offline(), tmp_path / "r.png")
    plots.domains({"tent": offline(), "vmp": offline()}, tmp_path / "d.png")
    assert is_png(tmp_path / "r.png")
    assert is_png(tmp_path / "d.png")
    with pytest.raises(undrift.DataError, match=r"other has the domains .*A → B"):
        plots.domains({"one": offline(), "other": generalized()}, tmp_path / "e.png")
    with pytest.raises(undrift.DataError, match="no reports"):
        plots.domains({}, tmp_path / "e.png")
    assert not (tmp_path / "e.png").exists()


def test_risk_against_coverage(tmp_path: Path) -> None:
    plots.risk_coverage(offline(), tmp_path / "one.png")
    plots.risk_coverage({"tent": offline(), "vmp": generalized()}, tmp_path / "two.png")
    assert is_png(tmp_path / "one.png")
    assert is_png(tmp_path / "two.png")
    results = tuple(dataclasses.replace(r, risks=risks) for r, risks in zip(offline().results, TWO, strict=True))
    report = dataclasses.replace(offline(), results=results)
    assert findings.mean_risks(report) == pytest.approx([0.1, 0.2])
    said = findings.risks_finding({"": report})
    assert said == "10.0 % error in the surest half, 20.0 % in all\n(AURC × 100: 6.2)"
    worse = tuple(dataclasses.replace(r, scores=dataclasses.replace(r.scores, aurc=0.5)) for r in results)
    said = findings.risks_finding({"source": dataclasses.replace(report, results=worse), "vmp": report})
    assert said == "vmp errs least among its surest:\nAURC × 100 is 6.2 (source 50.0)"


def test_a_report_without_curves_is_drawn_without_them(tmp_path: Path) -> None:
    old = dataclasses.replace(offline(), results=tuple(dataclasses.replace(r, risks=()) for r in offline().results))
    assert old.plot(tmp_path / "r.png") < offline().plot(tmp_path / "s.png")
    with pytest.raises(undrift.DataError, match=r"tent has no risk–coverage curve.*needed.*Run the evaluation again"):
        plots.risk_coverage({"vmp": offline(), "tent": old}, tmp_path / "no.png")
    with pytest.raises(undrift.DataError, match="no results"):
        plots.risk_coverage(Report("offline", ()), tmp_path / "no.png")
    assert not (tmp_path / "no.png").exists()


def test_titles_state_the_finding() -> None:
    assert findings.domains_finding({"": offline()}) == "Worst on snow (30.0 % error), best on fog (10.0 %)"
    named = {"source": generalized(), "vmp": offline()}
    assert findings.domains_finding(named) == "vmp errs least: 20.0 % on average (source 25.0 %)"
    assert findings.reliability_finding(offline().results[0].reliability) == (
        "Overconfident (ECE 17.0 %):\nsure of 82.0 %, right on 65.0 %"
    )
    mixed = Reliability((10, 10), (0.4, 0.9), (0.6, 0.7))
    assert findings.reliability_finding(mixed).startswith("Calibrated on average, not bin by bin (ECE 20.0 %)")
    shy = Reliability((10,), (0.6,), (0.9,))
    assert findings.reliability_finding(shy).startswith("Underconfident")
    assert findings.reliability_finding(Reliability((10,), (0.9,), (0.9,))).startswith("Well calibrated")


def test_pooled_bins_are_those_of_all_images() -> None:
    a, b = Reliability((1, 0), (0.4, 0.0), (1.0, 0.0)), Reliability((3, 2), (0.2, 0.9), (0.0, 1.0))
    both = findings.pooled([a, b])
    assert both.counts == (4, 2)
    assert both.confidence == pytest.approx((0.25, 0.9))
    assert both.accuracy == pytest.approx((0.25, 1.0))


def test_pyplot_is_left_alone_and_other_names_are_refused(tmp_path: Path) -> None:
    had = "matplotlib.pyplot" in sys.modules
    offline().plot(tmp_path / "a.png")
    assert ("matplotlib.pyplot" in sys.modules) == had
    with pytest.raises(undrift.OptionError, match=r"does not end in \.png.*a\.png"):
        offline().plot(tmp_path / "a.pdf")
    with pytest.raises(undrift.DataError, match="no folder"):
        offline().plot(tmp_path / "no" / "a.png")


def test_without_matplotlib(tmp_path: Path) -> None:
    with missing("matplotlib"), pytest.raises(undrift.UndriftError, match=r"undrift\[plot\]"):
        offline().plot(tmp_path / "a.png")


def test_a_domain_without_noise_has_no_sigma_to_draw(tmp_path: Path) -> None:
    model = undrift.perturb(convnet(), layers=())
    save(model, tmp_path / "tent.safetensors")
    for given, named in ((model, "this model"), (inspect(tmp_path / "tent.safetensors"), r"tent\.safetensors")):
        with pytest.raises(undrift.DataError, match=rf"{named} has no layer with noise.*needed.*leave the picture out"):
            plots.sigma(given, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_names_between_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    strange = Report("offline", tuple(result(name, 0.9) for name in (r"$\foo$", "a$b$", "$^$")))
    strange.plot(tmp_path / "r.png")
    plots.domains({r"$\bar$": strange, "$_$": strange}, tmp_path / "d.png")
    plots.sigma(undrift.perturb(torch.nn.ModuleDict({r"$\foo$": torch.nn.Linear(3, 2)})), tmp_path / "s.png")
    assert all(is_png(tmp_path / f"{name}.png") for name in "rds")
