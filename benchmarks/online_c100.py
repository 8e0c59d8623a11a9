"""Claim: on streams of CIFAR-100-C (severity 5) all methods run on the same footing, published values beside.

The network is a ResNeXt-29 trained on noisy labels (73.0 % clean), so errors lie above the published ones throughout:
compare rows with each other.

Command:   python benchmarks/online_c100.py --data FOLDER --fast [--deadline SECONDS]
           The same as `undrift bench online-c100 …`; --help names every flag. FOLDER holds cifar100/ (test images and
           resnext29.safetensors).
Hardware:  written into each cell and above each table; meant for one GPU, --images 200 for a CPU.
Seeds:     0, 1, 2 for tier A, 0 for tier B; see benchmarks/online_c10.py.
Output:    online-c100.json, .md, a figure, and a JSON file per cell, under --results.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "online-c100", *sys.argv[1:]]))
