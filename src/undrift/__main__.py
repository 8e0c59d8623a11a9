"""`python -m undrift` is `undrift`: for machines where a package's programs are not on the path."""

from undrift.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
