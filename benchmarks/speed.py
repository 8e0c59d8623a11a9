"""Claim: a Bayesian adaptation step costs little more than Tent's; ratios of one run, on whatever machine it finds.

WRN-28-10 at batch 200, ResNet-50 and ViT-S/16 at batch 64 on a GPU (channels-last bfloat16, uncompiled and compiled),
WRN-40-2 at batch 64 in float32 on a CPU; medians of 30 steps (7 on a CPU), each case in a process of its own. Growth
over batch, image, width, samples and classes; kernel launches and waits; predictions; start-up. NOTES.md has what was
predicted.

    python benchmarks/speed.py [--only steps]        # the same as: undrift bench speed
    python benchmarks/speed.py --pages               # measures nothing: tables and figures of the records again
"""

import sys
from pathlib import Path

from undrift.cli import main
from undrift_bench.bench.speed.benchmark import pages

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    if sys.argv[1:] == ["--pages"]:
        for record in (RESULTS / "speed-cpu.json", RESULTS / "speed-cuda.json"):
            print(*pages(record), sep="\n")
    else:
        sys.exit(main(["bench", "speed", *sys.argv[1:]]))
