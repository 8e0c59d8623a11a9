"""`undrift adapt` ends with whether it helped, and with exit code 3 where it hurt."""

from pathlib import Path

from cli.conftest import MODEL, Run


def test_adapt_ends_with_whether_it_helped(run: Run) -> None:
    found = run("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "2", "--likelihood", "information")
    assert found.code == 0, found.err
    last = found.out.splitlines()[-1]
    assert "adaptation" in last
    assert "estimated without labels on 30 images, the source network is right on" in last


def test_adapt_that_hurt_ends_with_a_code_of_its_own(run: Run, work: Path) -> None:
    words = ("adapt", "target", *MODEL, "--epochs", "3", "--batch-size", "3", "--likelihood", "entropy", "--lr", "5")
    found = run(*words, "--out", "b.safetensors", "--json")
    assert found.code == 3, found.err
    verdict = found.json["verdict"]
    assert verdict["collapsed"] or verdict["helping"]["judgement"] == "hurt"
    assert verdict["helping"]["gain"]["value"] < 0
    assert (work / "b.safetensors").exists()  # a judgement without labels deletes nobody's work
    assert "HURT" in run(*words, "--out", "c.safetensors").out.splitlines()[-1]
