"""Claim: on streams of ImageNet-C (severity 5) all methods run on the same footing, published values beside.

5,000 validation images per corruption, as in CoTTA and RobustBench, batches of 64.

Command:   python benchmarks/online_imagenet.py --data FOLDER --resnet50 FILE --fast [--deadline SECONDS]
           The same as `undrift bench online-imagenet …`; --help names every flag. FOLDER holds imagenet/val5k.tar;
           FILE is an ImageNet ResNet-50 in the first layout (resnet50_imagenet.safetensors).
Hardware:  written into each cell and above each table; one GPU with 16 GiB to spare for the images.
Seeds:     0, 1, 2 for tier A, 0 for tier B. Seed 0 is one fixed shuffle of the images, others permute them within each
           corruption; the seed is also that of the method's own noise.
Output:    online-imagenet.json, .md, a figure, and a JSON file per cell, under --results.
"""

import sys

from undrift.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "online-imagenet", *sys.argv[1:]]))
