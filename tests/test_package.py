"""The package as a user installs it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import undrift

ROOT = Path(__file__).parents[1]


def test_all_is_sorted_and_complete() -> None:
    assert list(undrift.__all__) == sorted(undrift.__all__)
    assert all(hasattr(undrift, name) for name in undrift.__all__)


def test_the_built_wheel_installs_and_imports(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("undrift-*.whl")
    there = zipfile.ZipFile(wheel).namelist()
    assert "undrift/py.typed" in there
    assert not [name for name in there if name.startswith("undrift_bench")]
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


def test_core_does_not_import_what_it_does_not_need() -> None:
    heavy = ("torchvision", "timm", "PIL", "matplotlib", "sklearn")
    code = f"import sys, undrift; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "undrift", "methods", "--help"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Usage: undrift methods" in result.stdout
    wrong = subprocess.run([sys.executable, "-m", "undrift", "inspect", "nothing.safetensors"], capture_output=True)
    assert wrong.returncode == 1
