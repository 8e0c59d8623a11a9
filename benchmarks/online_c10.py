"""Claim: on streams of CIFAR-10-C (severity 5) all methods run on the same footing, published values beside.

Faithfulness, WRN-28-10 of at least 94.5 % clean, 15 × 10,000 images: norm statistics within 1.5 points of 20.4 % error,
CoTTA and ROID within 1.0 of 16.2, Tent below 21. What does not land there is explained, not tuned.

Command:   python benchmarks/online_c10.py --data FOLDER --wrn2810 FILE --fast [--settings all] [--deadline SECONDS]
           The same as `undrift bench online-c10 …`; --help names every flag. FOLDER holds cifar10/ (test images and
           wrn40_2.safetensors); FILE is the WRN-28-10 that benchmarks/train.py writes.
Hardware:  written into each cell and above each table; meant for one GPU, --images 200 --networks wrn40_2 for a CPU.
Seeds:     0, 1, 2 for tier A, 0 for tier B. Seed 0 takes the test images in their order, others permute them within
           each corruption; the seed is also that of the method's own noise. Corrupted images are the same for all.
Output:    online-c10.json, .md, a figure for each network and setting, and a JSON file per cell, under --results.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "online-c10", *sys.argv[1:]]))
