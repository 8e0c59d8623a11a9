"""Give the package index a README without links into the repository, which lead nowhere there."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]*\)")


def standalone(readme: str) -> str:
    r"""Return a README with the words of its relative links alone, and without its own pictures.

    >>> standalone("![curve](docs/a.png)\n\n[Speed](docs/speed.md), [PyTorch](https://pytorch.org)")
    'Speed, [PyTorch](https://pytorch.org)'
    """
    parts = CODE.split(readme)
    parts[::2] = [LINK.sub(r"\1", PICTURE.sub("", text)) for text in parts[::2]]
    return "".join(parts)


class ReadmeOfTheIndex(MetadataHookInterface):
    """Sets the long description; named in pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the project's metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text)}
