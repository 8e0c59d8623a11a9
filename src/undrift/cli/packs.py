"""`undrift packs`: list the packs of a folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from undrift.cli.app import ERROR
from undrift.cli.session import Session, command


@command
def run(
    session: Session,
    folder: Annotated[Path, typer.Argument(help="Folder with domain files.", show_default=False)],
) -> dict[str, Any]:
    """List the packs (domain files) of a folder.

    Shows name, size, the day each was made, on how many images, and what is estimated of it without labels.

    Damaged files are listed too; then the exit code is 1.

    Example: undrift packs packs/
    """
    from undrift.packs.folder import read_folder

    found = read_folder(folder)
    session.say(str(found))
    for error in found.damaged.values():
        session.code = ERROR
        session.warn(str(error))
    for name, files in found.shared_names.items():
        session.warn(
            f"{' and '.join(files)} are both called {name}; needed: a name for each, as answers name the pack. Rename "
            "a file, or save one with another name=…."
        )
    return {
        "packs": [
            {
                "name": pack.name,
                "path": pack.path,
                "bytes": pack.size,
                "created": pack.created,
                "images": pack.images,
                "estimate": pack.estimate,
                "facts": pack.facts,
                "source": pack.source,
                "fingerprint": pack.fingerprint,
            }
            for pack in found.packs
        ],
        "damaged": {file: str(error) for file, error in found.damaged.items()},
        "others": found.others,
    }
