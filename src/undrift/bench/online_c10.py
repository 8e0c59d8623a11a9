"""`online-c10`: CIFAR-10-C at severity 5, two WideResNets, and six ways in which a stream can come."""

from undrift import data
from undrift.bench.networks import WRN28_10, WRN40_2
from undrift.bench.online import Online
from undrift.bench.request import Request
from undrift.bench.settings import SETTINGS
from undrift.data import TensorDomain


def clean(request: Request) -> TensorDomain:
    """Return CIFAR-10's test images."""
    return data.cifar10(request.data)


benchmark = Online(
    "online-c10",
    "CIFAR-10-C, severity 5, online",
    "cifar10",
    (WRN28_10, WRN40_2),
    clean,
    images=10_000,
    batch=200,
    settings=SETTINGS,
    note="Published values are of RobustBench's WRN-28-10; both networks here were trained by us. The corruptions are "
    "made by `undrift.data.corrupt`.",
)
