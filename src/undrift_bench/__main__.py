"""`python -m undrift_bench` is `undrift-bench`."""

import sys

from undrift_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
