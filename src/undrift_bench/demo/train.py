"""Train the source network that the demo comes with: `python -m undrift_bench.demo.train digits.safetensors`.

Eight epochs of `undrift_bench.train` on 80 % of MNIST's 5,000 digits, without a look at the other 20 % (the last epoch
is kept, not the best). One thread: the same machine then gives the same bytes.
"""

import argparse
from pathlib import Path

import torch

from undrift_bench.demo.setting import source_images
from undrift_bench.train import TrainedSource, TrainOptions, train_source

OPTIONS = TrainOptions(
    network="digits", epochs=8, batch_size=64, held_out=0.0, evaluate_every=1, lr=0.1, pad=2, flip=False
)


def train(path: Path) -> TrainedSource:
    """Write the source network to `path`, in about half a minute."""
    training, _ = source_images()
    return train_source(training, path, OPTIONS, device="cpu", resume=False, overwrite=True)


def main() -> None:
    """Train it from the command line."""
    parser = argparse.ArgumentParser(description="Train the source network of undrift's demo.")
    parser.add_argument("path", type=Path, help="a .safetensors file to write")
    torch.set_num_threads(1)
    done = train(parser.parse_args().path)
    print(f"{done.path}: {done.path.stat().st_size:,} bytes, {len(done.history)} epochs, {done.seconds:.0f} s")


if __name__ == "__main__":
    main()
