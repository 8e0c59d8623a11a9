"""Question: how many modules does one call pass through, and how often does control switch between them?

Three journeys on a small network (two convolutions, two batch norms, a linear layer), each made once to warm up and
then counted: `perturb` and `adapt` over two batches, a ROID stream of two batches, `predict` with ten samples. Modules
are those of undrift whose Python functions ran; a switch is a call from one of them in another module than the call
before it. Fewer of both is code that is easier to follow; calls that the interpreter sees are counted, not time.

Command:   python benchmarks/journeys.py [--each]
Hardware:  any; the counts are those of the CPU's code, and the same on every machine. Some seconds.
Seeds:     0.
Output:    a table on the terminal; with --each the modules of every journey, by calls.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import undrift

SIZE, BATCH = 12, 8


def network() -> nn.Module:
    """Return a small classifier with what most have: convolutions, batch norms, a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


def batches() -> list[Tensor]:
    """Return two batches of images."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(BATCH, 3, SIZE, SIZE, generator=generator) for _ in range(2)]


def perturb_and_adapt() -> Callable[[], object]:
    """Return the paper's method over one epoch of two batches."""
    net, images = network(), batches()
    return lambda: undrift.adapt(undrift.perturb(net), images, epochs=1)


def roid_stream() -> Callable[[], object]:
    """Return a stream with ROID over two batches."""
    net, images = network(), batches()
    return lambda: list(undrift.stream(net, images, method="roid", seed=0))


def predict() -> Callable[[], object]:
    """Return a prediction of one batch by ten draws."""
    model, images = undrift.perturb(network()), batches()[0]
    return lambda: undrift.predict(model, images, samples=10)


JOURNEYS = {
    "perturb + adapt, two batches": perturb_and_adapt,
    "a ROID stream of two batches": roid_stream,
    "predict with ten samples": predict,
}


def walked(journey: Callable[[], object]) -> tuple[Counter[str], int]:
    """Return the calls by module of undrift, and how often two calls in a row were of different modules."""
    calls, switches, last = Counter[str](), 0, ""

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal switches, last
        if event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "undrift":
            return
        calls[module] += 1
        switches += bool(last) and module != last
        last = module

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        journey()
    finally:
        sys.setprofile(before)
    return calls, switches


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="list the modules of each journey, by calls")
    each = parser.parse_args().each
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", undrift.UndriftWarning)  # nobody trained this network
    print(f"| {'journey':30} | modules | switches | calls |")
    print(f"|{'-' * 32}|{'-' * 8}:|{'-' * 9}:|{'-' * 6}:|")
    for name, make in JOURNEYS.items():
        make()()  # imports, and what is made once
        calls, switches = walked(make())
        print(f"| {name:30} | {len(calls):7} | {switches:8} | {calls.total():5} |")
        for module, count in calls.most_common() if each else ():
            print(f"    {count:5}  {module}")


if __name__ == "__main__":
    main()
