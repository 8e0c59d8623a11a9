"""Run the command line with `python -m undrift`, for machines where scripts are not on the path."""

from undrift.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
