"""Claim: what an adapted network does on its target and still does on its source, per task, with their harmonic mean.

The cells are those of benchmarks/offline.py: one run, two tables. A prototype older than this repository saw, one
seed, photo → sketch, harmonic mean %: source 39.9, norm statistics 16.5, SHOT 23.7, VMP with σ² = 0.01 Var 33.5;
photo → cartoon: SHOT 78.0, norm statistics 72.2. No claim is made beyond the table that is written.

Command:   python benchmarks/generalized.py --data FOLDER --resnet50 FILE --cache FOLDER --fast [--deadline SECONDS]
           The same as `undrift bench generalized …`; --help names every flag.
           --set dataset=office-home           Office-Home, for which the paper has such a table
Hardware:  written into each cell and above each table; meant for one GPU.
Seeds:     as offline's: 0, 1, 2 for tier A, 0 for the rest.
Output:    generalized.json, .md, .png beside offline's, under --results.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "generalized", *sys.argv[1:]]))
