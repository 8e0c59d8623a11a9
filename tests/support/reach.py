"""Count the tests that reach into private modules, and the lines that patch something: python tests/support/reach.py.

A module is reached by an import, or by dots (`undrift.posterior.state.restore`); -v names the files. Public is what the
reference documents: `undrift`, the pages of its verbs, `images`, `likelihood`, `methods`, `keep`, `options`,
`shift`, the command line; and the packages of `undrift_bench` by the names that they export.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERBS = ("perturb", "objective", "adapt", "stream", "predict", "evaluate")
ROOMS = ("images", "images.corrupt", "likelihood", "methods", "keep", "options", "cli", "shift")
BENCH = ("bench", "data", "zoo", "train", "demo", "demo.__main__", "cli")
DOTTED = re.compile(r"undrift(_bench)?([.][a-z_]+)+")
PUBLIC = {"undrift", "undrift_bench", *(f"undrift.{n}" for n in VERBS + ROOMS), *(f"undrift_bench.{n}" for n in BENCH)}


def exported(module: str) -> tuple[str, ...]:
    """Return the `__all__` of a package."""
    place = ROOT.joinpath("src", *module.split("."), "__init__.py")
    for node in ast.parse(place.read_text("utf-8")).body if place.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def private(tree: ast.AST) -> Iterator[str]:
    """Yield the private modules that a test imports, or reaches by dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and DOTTED.fullmatch(name := ast.unparse(node)):
            found = [_source(*name.rsplit(".", 1))]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [_source(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (name for name in found if name.startswith("undrift") and name not in PUBLIC)


def _source(module: str, name: str) -> str:
    """Return the module that an imported name is, or comes from."""
    if module in PUBLIC and name in exported(module):
        return module
    place = ROOT.joinpath("src", *module.split("."), name)
    is_module = place.with_suffix(".py").exists() or place.is_dir()
    return f"{module}.{name}" if is_module or re.match("_[a-z]", name) else module


def main() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    texts = {file: file.read_text("utf-8") for file in files}
    reach = {file: sorted(set(private(ast.parse(text)))) for file, text in texts.items()}
    for file in files if "-v" in sys.argv else ():
        if reach[file]:
            print(file.relative_to(ROOT), *reach[file])
    core = sum(any(name.startswith("undrift.") for name in names) for names in reach.values())
    print(f"{core} of {len(files)} files reach into undrift, {sum(map(bool, reach.values()))} into it or undrift_bench")
    lines = [line for text in texts.values() for line in text.splitlines()]
    ours = [line for line in lines if re.search(r"monkeypatch[.]", line)]
    others = [line for line in lines if re.search(r"mock[.]patch|\b(patch|patched|without)[.]set", line)]
    print(f"{len(ours)} lines monkeypatch, {len(others)} more patch by other means")


if __name__ == "__main__":
    main()
