"""Keep parameters that matter on the source near their source values (EATA's Fisher term)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift._types import Keeper
from undrift.answer.forward import finite_rows, forward
from undrift.images import FileDomain, TensorDomain
from undrift.posterior.batch import images_of, to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import extra_pass, keeping_noise, named_learnables, named_sources
from undrift.system.validate import a_type


class Fisher(Keeper):
    """Add β Σ F (θ − θ_source)², F the mean over source batches of the squared gradient of their loss.

        F = mean_b (∂/∂θ mean_{i in b} CE(p_i, argmax p_i))²

    As in EATA's code, the mean gradient of a batch is squared, so the size of the source batches matters. The mean
    network sees them as it sees the target: norm layers with batch statistics use those of the source batch. Images
    with NaN or infinite values are skipped and counted.

    Args:
        source: clean source images: a tensor, an `undrift.images` domain, or batches (a loader; labels are not read).
        beta: β; 1 on CIFAR, 2000 on ImageNet.
        fisher_images: largest number of source images to use.
        fisher_batch: images per batch if `source` is a tensor or a domain; a loader has its own.

    Attributes:
        importance: F, by the name of the parameter.
        skipped: source images that were not finite.
    """

    def __init__(
        self, source: Any = None, beta: float = 1.0, fisher_images: int = 2000, fisher_batch: int = 200
    ) -> None:
        if source is None:
            raise OptionError(
                "no source images were given; the Fisher term of EATA is measured on clean images of the source domain "
                "(2,000, without labels). Give source=…, a tensor or a loader (from the shell --set source=FOLDER); "
                "without them there is method='eta'."
            )
        if isinstance(source, str) or not isinstance(source, Tensor | FileDomain | TensorDomain | Iterable):
            raise DataError(
                f"source is {a_type(source)}; images of the source domain are a tensor or an iterable of "
                "batches. For a folder use undrift.images.domain."
            )
        if not 0 <= beta < float("inf") or fisher_images < 1 or fisher_batch < 1:
            raise OptionError(
                f"beta={beta!r}, fisher_images={fisher_images!r}, fisher_batch={fisher_batch!r}: they start at 0, 1 "
                "and 1. EATA's are 1 (CIFAR) or 2000 (ImageNet), 2000, and the stream's batch."
            )
        self.source, self.beta, self.fisher_images, self.fisher_batch = source, beta, fisher_images, fisher_batch
        self.importance: dict[str, Tensor] = {}
        self.skipped = 0

    def __repr__(self) -> str:
        # Without the images: F is part of the state.
        return f"Fisher(beta={self.beta}, fisher_images={self.fisher_images}, fisher_batch={self.fisher_batch})"

    def start(self, model: Perturbed) -> None:
        """Measure F on the source images."""
        trained = named_learnables(model)
        parameters = list(trained.values())
        sums = [torch.zeros_like(p) for p in parameters]
        batches = self.skipped = 0
        if parameters:
            with torch.inference_mode(False), torch.enable_grad(), evaluating(model), keeping_noise(model.key):
                for images in self._batches():
                    with extra_pass(model, noisy=False):
                        logits = forward(model, to_device(images.clone() if images.is_inference() else images, model))
                    loss = F.cross_entropy(logits, logits.detach().argmax(dim=1))
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                    for total, gradient in zip(sums, gradients, strict=True):
                        if gradient is not None:
                            total += gradient.square()
                    batches += 1
            if batches == 0:
                found = f"no finite image ({self.skipped} with NaN or infinity)" if self.skipped else "no batch"
                raise DataError(f"source has {found}; the Fisher term needs at least one image. Check the loader.")
        self.importance = {name: total / batches for name, total in zip(trained, sums, strict=True)}
        # Check here, once: later every loss would be NaN and every step left out, without a word about the source.
        if wrong := [name for name, value in self.importance.items() if not bool(value.isfinite().all())]:
            raise DataError(
                f"the squared gradients of the source images' loss are not finite in {wrong[0]} ({len(wrong)} in all); "
                "the Fisher term needs finite ones. Check the network's answers to the source images: they may be "
                "preprocessed differently, or overflow in half precision."
            )

    def _batches(self) -> Iterator[Tensor]:
        """Yield the finite source images, at most `fisher_images`."""
        source, left = self.source, self.fisher_images
        if isinstance(source, Tensor):
            source = source.split(self.fisher_batch)
        elif isinstance(source, FileDomain | TensorDomain):
            source = source.named_batches(self.fisher_batch)
        for item in source:
            images = images_of(item)
            sound = finite_rows(images)
            self.skipped += len(images) - int(sound.sum())
            images = images[sound][:left]
            if len(images):
                yield images
            left -= len(images)
            if left == 0:
                return

    def penalty(self, model: Perturbed) -> Tensor | None:
        """Return β Σ F (θ − θ_source)²."""
        sources = named_sources(model)
        terms = [
            (self.importance[name].to(p) * (p - sources[name].to(p)).square()).sum()
            for name, p in named_learnables(model).items()
        ]
        return self.beta * torch.stack(terms).sum() if terms else None

    def state_dict(self) -> dict[str, Any]:
        """Return F, as a resumed stream keeps what was measured at its start."""
        return dict(self.importance)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.importance = dict(state)
