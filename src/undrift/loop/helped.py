"""Ask the source network and the adapted one about a bounded sample of images: did adaptation help?"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.answer.views import AUTO, VIEWS, SafeViews, combined
from undrift.judge.accuracy import Helping, helping
from undrift.loop.indexed_loader import even
from undrift.posterior.batch import to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import one_pass

MOST = 500
"""Images that are looked at: 500 give a standard error of two points, from at most 4,000 forward passes of an image."""

VALUES = 2**26
"""Values that a sample holds at most: 256 MB of float32, 445 images of 224 × 224."""

Ask = Callable[[Tensor], Tensor]


class Sample:
    """Images of a domain at even distances, as those of one class often come together.

    Args:
        size: images of the domain.
    """

    def __init__(self, size: int) -> None:
        self.size, self.largest = size, 1
        self._parts: list[Tensor] = []

    def of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass batches on, and keep the sample of them."""
        self._parts = []
        for places, images in batches:
            most = max(1, min(MOST, VALUES // max(1, images[0].numel()))) if len(images) else MOST
            self.largest = max(self.largest, len(images))
            kept = places * most % self.size < most if most < self.size else places >= 0
            self._parts.append(images[kept.to(images.device)].cpu())
            yield places, images

    def batches(self) -> list[Tensor]:
        """Return the images in batches as large as the domain's, mixed; those of several sizes in their own batches."""
        parts = [part for part in self._parts if len(part)]
        if len({part.shape[1:] for part in parts}) != 1:
            return parts
        images = torch.cat(parts)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        return list(images[order].split(even(self.largest, len(images))))


@torch.no_grad()
def compare(
    model: Perturbed, batches: Sequence[Tensor], names: Sequence[str] | None = None, given: Tensor | None = None
) -> Helping:
    """Return whether the adapted network is right more often than its source, estimated on these images.

    Args:
        batches: images, all finite.
        names: views under which no label changes; None tests which are safe for the adapted network.
        given: what the adapted network answered when it met these images, as log-probabilities; None asks it now.
    """
    batches = [to_device(images, model) for images in batches]
    flat = any(images.ndim != 4 or min(images.shape[-2:]) < 2 for images in batches)
    with evaluating(model):
        if flat or names is None or tuple(names) == (AUTO,):
            names = () if flat else _safe(model, batches)
        views = combined(names)
        adapted = torch.stack([_all(_once(model), batches, view) for view in views])
        with model.off() as net, evaluating(net):
            source = torch.stack([_all(lambda images: forward(model, images), batches, view) for view in views])
    if given is not None:
        adapted[0] = given
    return helping(source, adapted)


def _once(model: Perturbed) -> Ask:
    def ask(images: Tensor) -> Tensor:
        with one_pass(model):
            model.key.step.zero_()  # the same noise every time
            return forward(model, images)

    return ask


def _safe(model: Perturbed, batches: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the views that the adapted network's answers survive."""
    ask, test = _once(model), SafeViews(tuple(VIEWS))
    for images in batches:
        logits = ask(images)
        for name, view in VIEWS.items():
            test.look(logits, name, ask(view(images)))
    return test.passed or ()


def _all(ask: Ask, batches: Sequence[Tensor], view: Ask) -> Tensor:
    """Return the logits of every image's view, on the CPU, as not every device has float64."""
    return torch.cat([ask(view(images)).float().cpu() for images in batches])
