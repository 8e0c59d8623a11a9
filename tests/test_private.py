"""Private names of PyTorch and Triton stand in one module, where the next version's changes are looked for."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import undrift

ROOT = Path(undrift.__file__).parent
LIBRARIES = ("torch", "triton", "functorch")


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of PyTorch and Triton that a module imports or reaches by dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.split(".")[0] in LIBRARIES]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found = [name] if re.fullmatch(r"(\w+\.)+\w+", name) and name.split(".")[0] in LIBRARIES else []
        else:
            continue
        yield from (name for name in found if re.search(r"\._[a-zA-Z]", name))


def test_no_other_module_uses_one() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.rglob("*.py")
        if path != ROOT / "system" / "private.py" and (names := sorted(set(private_names(path.read_text()))))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._guards import detect_fake_mode",
        "from torch.nn.modules.conv import _ConvNd",
        "import torch\ntorch._C._current_autograd_node()",
        "import torch\nx = torch.compiler._is_exporting_flag",
    ],
)
def test_they_are_found(source: str) -> None:
    assert list(private_names(source))


def test_public_names_are_no_private_ones() -> None:
    assert not list(private_names("import torch\nfrom torch import nn\ntorch.nn.Linear.__init__\ntorch.empty_like(x)"))
