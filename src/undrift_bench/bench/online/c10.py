"""`online-c10`: CIFAR-10-C at severity 5, two WideResNets, six kinds of stream."""

from undrift.images import TensorDomain
from undrift_bench import data
from undrift_bench.bench.harness.networks import WRN28_10, WRN40_2
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.settings import SETTINGS


def clean(request: Request) -> TensorDomain:
    """Return CIFAR-10's test images."""
    return data.cifar10(request.data)


benchmark = OnlineBenchmark(
    "online-c10",
    "CIFAR-10-C, severity 5, online",
    "cifar10",
    (WRN28_10, WRN40_2),
    clean,
    images=10_000,
    batch=200,
    settings=SETTINGS,
    note="Published values are of RobustBench's WRN-28-10; both networks here were trained by us. The corruptions are "
    "made by `undrift.corrupt`.",
)
