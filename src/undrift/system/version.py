"""The version of the installed undrift, which files and reports name."""

import importlib.metadata


def own_version() -> str:
    """Return the version of this undrift."""
    try:
        return importlib.metadata.version("undrift")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
