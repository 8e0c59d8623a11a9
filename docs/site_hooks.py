"""MkDocs hooks: put the records, notes, examples and changelog, which lie outside docs/, on the site.

In the repository a page links to them as `../../benchmarks/results/offline.md`. On the site the same files lie below
the root of the pages, so each such link loses the one `../` that would lead out of docs/.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/NOTES.md", "benchmarks/results/*.*", "examples/*.*")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages link to."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at the copies on the site; leave records out of the search."""
    if not page.file.abs_src_path or not Path(page.file.abs_src_path).is_relative_to(ROOT / "docs"):
        page.meta["search"] = {"exclude": True}
        return re.sub(r"\]\((?:\.\./)*docs/", lambda link: link[0].replace("docs/", ""), markdown)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(rf"\]\({re.escape(up)}\.\./(?=benchmarks/|examples/|CHANGELOG|CONTRIBUTING)", f"]({up}", markdown)
