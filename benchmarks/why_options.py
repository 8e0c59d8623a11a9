"""What the scripts that ask why a stream came out as it did are told: images, weights, and where answers go."""

import argparse
from pathlib import Path

import torch


def options(question: str | None, images: int) -> argparse.ArgumentParser:
    """Return a parser of the options that they share, to which each adds its own.

    Args:
        question: the script's docstring.
        images: of each corruption, unless others are asked for.
    """
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--frost", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=images, help="of each corruption in the streams")
    return parser
