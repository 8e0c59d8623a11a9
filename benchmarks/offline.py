"""Claim: over whole target domains all source-free methods run on the same footing, the paper's values beside.

PACS (12 tasks, ResNet-50) is what we can measure; it stands in for Office-31 and Office-Home, for which the same script
prints the paper's tables in their shape. A prototype older than this repository saw, one seed, photo → sketch, accuracy
% on the target: source 25.1, norm statistics 43.2, SHOT 25.5, SHOT's norm affine 47.8, VMP with σ² = 0.01 Var 52.6. No
claim is made beyond the table that is written.

Command:   python benchmarks/offline.py --data FOLDER --resnet50 FILE --cache FOLDER --fast [--deadline SECONDS]
           The same as `undrift bench offline …`; --help names every flag. FOLDER holds pacs/photo.tar, …
           --dataset office31 --root FOLDER    Office-31 (or office-home), which lie in FOLDER as they are published
           --settings photo-sketch             a task; --tier A the six main ones; --only shot,vmp-shot:paper rows
Hardware:  written into each cell and above each table; meant for one GPU. Decoded images (2 GB of PACS) are kept under
           --cache and on the device, source networks under --cache/sources: trained once for each domain and seed.
Seeds:     0, 1, 2 for tier A (photo and sketch as sources), 0 for the rest. A seed has its own 80/20 split, source
           network, order of images and noise.
Output:    offline.json, .md, .png, and a JSON file per cell, under --results. `generalized` reads the same cells.
"""

import sys

from undrift.cli import main


def flags(given: list[str]) -> list[str]:
    """Return the command line with --dataset NAME and --root FOLDER as `undrift bench` has them."""
    found, words = [], iter(given)
    for word in words:
        name, _, value = word.partition("=")
        if name == "--dataset":
            found += ["--set", f"dataset={value or next(words, '')}"]
        else:
            found.append(word.replace("--root", "--data", 1) if name == "--root" else word)
    return found


if __name__ == "__main__":
    sys.exit(main(["bench", "offline", *flags(sys.argv[1:])]))
