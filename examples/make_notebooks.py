"""Write the notebooks from the scripts beside them: python examples/make_notebooks.py.

A line `# %%` starts a cell of code, `# %% [markdown]` one of text. Notebooks have no outputs: run them to see some.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("own_network", "stream", "packs")


def cell(kind: str, text: str) -> dict[str, object]:
    """Return one cell, text without its comment signs."""
    lines = text.strip("\n").splitlines(keepends=True)
    if kind:
        return {"cell_type": "markdown", "metadata": {}, "source": [re.sub("^# ?", "", line) for line in lines]}
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}


def notebook(script: str) -> str:
    """Return a script in cells as the JSON of a notebook."""
    _, *parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)
    cells = [cell(kind.strip(), text) for kind, text in zip(parts[::2], parts[1::2], strict=True)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all."""
    for name in NAMES:
        script = (HERE / f"{name}.py").read_text(encoding="utf-8")
        (HERE / f"{name}.ipynb").write_text(notebook(script), encoding="utf-8")


if __name__ == "__main__":
    main()
