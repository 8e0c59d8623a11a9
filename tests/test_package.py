"""The package as a user installs it."""

import ast
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import release
import undrift

ROOT = Path(__file__).parents[1]
BROUGHT = {"torch", "numpy", "safetensors", "typer", "rich"}
"""What `pip install undrift` brings, with what these bring themselves."""


def _names(requirements: list[str]) -> set[str]:
    """Return the names of those that are needed here, without any extra."""
    wanted = [Requirement(text) for text in requirements]
    return {_plain(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_theirs(names: set[str]) -> set[str]:
    """Return distributions and all that they require."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        found.add(name := waiting.pop())
        try:
            waiting |= _names(metadata.requires(name) or []) - found
        except metadata.PackageNotFoundError:
            continue  # another platform's
    return found


def test_all_is_sorted_and_complete() -> None:
    assert list(undrift.__all__) == sorted(undrift.__all__)
    assert all(hasattr(undrift, name) for name in undrift.__all__)


def test_the_built_wheel_installs_and_imports(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("undrift-*.whl")
    there = zipfile.ZipFile(wheel).namelist()
    assert "undrift/py.typed" in there
    assert "undrift/images/corrupt/apply.py" in there
    assert not [name for name in there if name.startswith("undrift_bench")]
    (about,) = [name for name in there if name.endswith(".dist-info/METADATA")]
    required = re.findall(r"(?m)^Requires-Dist: (.*)$", zipfile.ZipFile(wheel).read(about).decode())
    assert _names(required) - _names(metadata.requires("torch") or []) == BROUGHT
    place = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = (
        "import sys, torch, undrift; "
        f"assert undrift.__file__.startswith({str(place)!r}), undrift.__file__; "
        "print(undrift.perturb(torch.nn.Linear(2, 3)))"
    )
    # The editable install must not stand in for the wheel.
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(place)!r}); {code}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "1 of 1 layers perturbed" in result.stdout


@pytest.mark.slow
def test_the_release_builds_and_its_wheel_runs_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    release.main(["--out", str(tmp_path / "dist"), "--borrow"])
    assert "the README's example ran" in capsys.readouterr().out


def test_every_module_is_python_3_10() -> None:
    for file in (ROOT / "src" / "undrift").rglob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"), file.name, feature_version=(3, 10))


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {metadata.version('undrift')}\n" in text


JOURNEY = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises
import torch, undrift
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3))
images = torch.rand(8, 3, 8, 8)
model = undrift.perturb(net)
undrift.adapt(model, images, epochs=1, batch_size=4)
undrift.save(model, "domain.safetensors")
probs = undrift.predict(model, images, samples=2).probs
model.remove()
undrift.load(net, "domain.safetensors").remove()
answered = sum(len(p.label) for p in undrift.stream(net, images.split(4), method="tent"))
print(undrift.judge.metrics.scored(probs, torch.zeros(8, dtype=torch.long)).nll > 0, answered)
import undrift.cli.adapt, undrift.cli.stream, undrift.cli.predict
"""


def test_adapting_needs_nothing_but_what_pip_brings(tmp_path: Path) -> None:
    needed = _with_theirs(BROUGHT)
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if module.isidentifier() and not {_plain(owner) for owner in owners} & (needed | {"undrift"})
    }
    assert {"PIL", "matplotlib", "sklearn", "pytest", "undrift_bench"} <= others
    result = subprocess.run(
        [sys.executable, "-c", JOURNEY, *sorted(others)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert result.stdout == "True 8\n"


@pytest.mark.slow
def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "undrift", "methods", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Usage: undrift methods" in result.stdout
    wrong = subprocess.run([sys.executable, "-m", "undrift", "inspect", "nothing.safetensors"], capture_output=True)
    assert wrong.returncode == 1
