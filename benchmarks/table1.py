"""Claim: what each method can do and needs, as in the paper's Table 1, follows from the methods' own attributes.

Where the paper says otherwise than our attributes do, its word stands in brackets.

Command:   python benchmarks/table1.py [--results FOLDER]        the same as `undrift bench table1`
Hardware:  any; nothing is run. Seeds: none.
Output:    table1.json and table1.md under --results.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "table1", *sys.argv[1:]]))
