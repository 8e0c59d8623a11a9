"""Write the table of docs/reference/methods.md from `undrift.methods`: `python docs/make_methods.py`."""

import re
from pathlib import Path

from undrift import methods

PAGE = Path(__file__).parent / "reference" / "methods.md"


def page(text: str) -> str:
    """Return the page with the present table between its markers."""
    block = f"<!-- methods -->\n{methods.table()}\n<!-- /methods -->"
    return re.sub("<!-- methods -->\n.*?<!-- /methods -->", lambda _: block, text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
