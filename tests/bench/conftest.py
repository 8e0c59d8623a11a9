"""A tree of PACS in miniature, for the offline benchmarks."""

from pathlib import Path

import pytest

from tree_support import plant
from undrift_bench.data.pacs_domains import PACS


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    for shade, domain in enumerate(("photo", "sketch")):
        plant(tmp_path / "data" / "pacs" / domain, PACS.class_names, 4, 60 * shade)
    return tmp_path / "data"
