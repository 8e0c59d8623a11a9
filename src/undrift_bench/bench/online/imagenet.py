"""`online-imagenet`: ImageNet-C at severity 5 on 5,000 validation images, ResNet-50."""

from undrift.images import TensorDomain
from undrift_bench import data
from undrift_bench.bench.harness.networks import RESNET50
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.online.benchmark import OnlineBenchmark


def clean(request: Request) -> TensorDomain:
    """Return the validation images in an order drawn once with seed 0, as their files are sorted by class."""
    return data.imagenet(request.data, seed=0).hold("cpu")


benchmark = OnlineBenchmark(
    "online-imagenet",
    "ImageNet-C, severity 5, online",
    "imagenet",
    (RESNET50,),
    clean,
    images=5_000,
    batch=64,
    note="Seed 0 is one fixed shuffle of 5,000 validation images, 5 a class, corrupted at 224×224 after the centre "
    "crop. Published values are of other 5,000 images; CoTTA's are means of ten orders of the corruptions.",
)
