"""Claim: each figure of the paper's analysis is drawn from cells of its own, on one task, with one seed.

Parts: sigma (σ per layer against A-distance), prior (scale, adaptive against isotropic), sharing (per kernel against
per weight), layers (left without noise), schemes (offline and CIFAR-100-C), samples (draws in training and in test),
beta (0.1 to 2). One seed: differences of less than a point say nothing, and the figures say so.

Command:   python benchmarks/analysis.py --data FOLDER --resnet50 FILE --cache FOLDER --fast [--only sigma,prior]
           The same as `undrift bench analysis …`; --help names every flag. FOLDER holds pacs/, cifar10/, cifar100/.
           --settings cifar10-c                the streams alone, which take seconds a cell
           --set task=photo-cartoon            another task of PACS; --set epochs=5 shortens every adaptation
Hardware:  written into each cell and above the tables; meant for one GPU.
Seeds:     0.
Output:    analysis.json, .md, a figure a part (analysis-sigma.png, …), and a JSON file a cell, under --results. What
           `offline` or another part has run already is taken over, not run again.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "analysis", *sys.argv[1:]]))
