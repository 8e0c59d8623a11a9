"""Build the release, check it, and run the README's example from its wheel in an empty environment.

python tests/support/release.py --out dist            # installs what undrift depends on, as a user's pip does
python tests/support/release.py --out dist --borrow   # takes it from this environment: no network

Raises, and so ends with 1, at the first thing that is not as a release must be.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, **settings: object) -> str:
    """Return what a command printed; raise with its output if it failed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **settings)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def built(out: Path) -> Path:
    """Build the source distribution, and the wheel from it; return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *out.glob("undrift-*"))
    (wheel,) = out.glob("undrift-*.whl")
    return wheel


def check_pure(wheel: Path) -> None:
    """Check that one wheel serves every Python, and holds the library alone."""
    assert wheel.name.endswith("-py3-none-any.whl"), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    others = [n for n in names if not n.startswith(("undrift/", "undrift-"))]
    assert not others, others
    assert not [n for n in names if n.endswith((".so", ".pyd", ".pyc"))], "compiled files in the wheel"


def check_links(wheel: Path) -> None:
    """Check that the description on a package index has no link into the repository, and lost nothing else."""
    metadata = zipfile.ZipFile(wheel).read(f"{'-'.join(wheel.stem.split('-')[:2])}.dist-info/METADATA")
    text = metadata.decode().partition("\n\n")[2]
    links = [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith(("https://", "http://"))]
    assert not links, f"these lead nowhere on a package index: {', '.join(links)}"
    headings = re.findall(r"^## .*", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^## .*", text, re.MULTILINE) == headings


def environment(folder: Path, wheel: Path, borrow: bool) -> Path:
    """Return the Python of a new environment with the wheel in it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    if borrow:
        (site,) = folder.glob("lib/python*/site-packages")
        # On the path behind the wheel; this environment's own .pth files, an editable undrift's too, are not read.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel)
    else:
        run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    return python


def example() -> tuple[str, str]:
    """Return the README's code, and the output that it shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None, "the README shows no output"
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)), shown[1]


def words(text: str) -> list[str]:
    """Return a text without its numbers: rounding differs between machines."""
    return re.split(r"\d+(?:\.\d+)?", text)


def main(arguments: list[str] | None = None) -> None:
    """Build, check, install and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="an empty folder, or none yet")
    parser.add_argument("--borrow", action="store_true")
    given = parser.parse_args(arguments)
    if given.out.exists() and any(given.out.iterdir()):
        raise SystemExit(
            f"{given.out} is not empty; needed: a folder for this release alone. Delete it, or name another."
        )
    out = given.out.absolute()
    wheel = built(out)
    check_pure(wheel)
    check_links(wheel)
    code, shown = example()
    with tempfile.TemporaryDirectory() as work:
        python = environment(Path(work) / "env", wheel, given.borrow)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        told = run(python, "-c", "import undrift; print(undrift.__file__)", cwd=work, env=plain)
        assert told.startswith(str(Path(work).resolve())), f"not the wheel's: {told}"
        printed = run(python, "-c", code, cwd=work, env=plain)
        assert words(printed) == words(shown), f"the README's example printed\n{printed}"
        if not given.borrow:  # a borrowed environment names extensions that are not in the new one
            run(python, "-m", "undrift", "--help", cwd=work, env=plain)
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; built, checked, installed; the README's example ran")


if __name__ == "__main__":
    main()
