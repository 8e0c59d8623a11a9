"""The part of source training that BACS needs: a posterior over the weights of a CIFAR-10 network (diagonal SWAG).

Five more epochs of a trained network at a constant rate (PETAL's), whose last four ends make mean and variance. Then

    python benchmarks/posterior.py --data ../shared/data/cifar10 --weights wrn.safetensors --out posterior.safetensors
    undrift bench online-c10 --only bacs --set posterior=posterior.safetensors …
"""

import argparse
import time
from pathlib import Path

from undrift_bench import data, zoo
from undrift_bench.train import collect_moments


def main() -> None:
    """Train on, and write the posterior."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", default="wrn28_10")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int, help="training images, for a trial")
    asked = parser.parse_args()
    domain = data.cifar10(asked.data, train=True, preprocess=zoo.preprocess(asked.network))
    begun = time.perf_counter()
    moments = collect_moments(
        zoo.load(asked.network, asked.weights),
        domain if asked.limit is None else domain.select(range(asked.limit)),
        device=asked.device,
    )
    size = moments.save(asked.out)
    print(f"{asked.out.name}: {size / 1e6:.1f} MB of {moments.count} iterates, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
