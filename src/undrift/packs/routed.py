"""Answer a batch with several packs: one pass of evidence, then the images of each pack together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.answer.average import average_finite
from undrift.answer.forward import blank_logits, finite_images, forward
from undrift.answer.predict_session import PredictSession, checked_samples, views_asked
from undrift.answer.prediction import Prediction
from undrift.packs.moments import watching
from undrift.packs.router import SOURCE, Routes
from undrift.posterior.kept_statistics import warn_of_mean
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import generator_or_seed

if TYPE_CHECKING:
    from undrift.packs.collection import Packs


@dataclass(frozen=True, repr=False)
class Routed(Prediction):
    """A `Prediction` whose rows come from several packs.

    Attributes:
        names: of the packs, "source" first: the columns of `evidence` and `sigmas`.
        choice: number of the pack that answered each image.
        nearest: number of the pack that each image is nearest to; another one than `choice` where that is too far.
        evidence: images × packs, how far an image is from a pack's domain, in the logarithm of a KL; the smaller the
            nearer. NaN for a pack without moments, and without routing (`with packs.using(…)`).
        sigmas: the same in standard deviations over the pack's own images; NaN for the source, which has none.
        known: whether some pack, or the source, knows the image; otherwise the source answered.
    """

    names: tuple[str, ...]
    choice: Tensor
    nearest: Tensor
    evidence: Tensor
    sigmas: Tensor
    known: Tensor

    @property
    def pack(self) -> tuple[str, ...]:
        """The name of the pack that answered each image."""
        return tuple(self.names[number] for number in self.choice.tolist())

    def why(self, image: int) -> str:
        """Return in words why an image got its pack.

        Examples: "night (0.4 σ)", "nothing here fits: nearest night, 3.1 σ away".
        """
        near = int(self.nearest[image])
        away = float(self.sigmas[image, near])
        if not bool(self.known[image]):
            return f"nothing here fits: nearest {self.names[near]}, {away:.1f} σ away"
        name = self.names[int(self.choice[image])]
        return name if away != away else f"{name} ({away:.1f} σ)"

    def cpu(self) -> "Routed":
        """Return the prediction on the CPU."""
        return _with(self, [getattr(self, name).cpu() for name in _TENSORS])


_TENSORS = [f.name for f in fields(Routed) if f.name != "names"]


def concatenated(parts: Sequence[Routed]) -> Routed:
    """Return the answers to several batches as one."""
    if not parts:
        raise DataError("there is no batch to answer; at least one is needed. Check the loader.")
    if len(parts) == 1:
        return parts[0]
    return _with(parts[0], [torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS])


def _with(like: Routed, tensors: Sequence[Tensor]) -> Routed:
    return Routed(**dict(zip(_TENSORS, tensors, strict=True)), names=like.names)


class RoutedSession:
    """The answers of one call of `Packs.predict`, batch by batch; noise continues from one batch to the next."""

    def __init__(
        self,
        packs: "Packs",
        samples: int | None,
        generator: torch.Generator | int | None,
        temperature: float,
        views: str | Sequence[str] | None,
    ) -> None:
        self.packs, self.samples, self.temperature, self.views = packs, samples, temperature, views
        self.generator = generator_or_seed(generator)
        self._sessions: dict[str, PredictSession] = {}
        checked_samples(packs.net, samples)
        views_asked(packs.net, views)

    def answer(self, batch: Tensor) -> Routed:
        """Return the answers to a batch; the network is in eval mode."""
        images, finite = finite_images(self.packs.net, batch)
        if len(images) == 0:
            blank = Prediction.unknown(0 if finite is None else len(finite), blank_logits(self.packs.net, images))
            return self._routed(blank, self._nowhere(images, len(blank), 0), None)
        logits, routes = self._look(images)
        answers: list[tuple[Tensor, Prediction]] = []
        for number in routes.choice.unique().tolist():
            rows = (routes.choice == number).nonzero()[:, 0]
            name = self.packs.names[number]
            if number == 0 and logits is not None and self.views is None:
                # The pass that gave the evidence is the source network's answer.
                answers.append((rows, Prediction.of((logits[rows] / self.temperature).softmax(1))))
            else:
                answers.append((rows, self._ask(name, images if len(rows) == len(images) else images[rows])))
        order = torch.cat([rows for rows, _ in answers]).argsort()
        whole = Prediction.cat([part for _, part in answers])
        whole = Prediction(whole.probs[order], whole.label[order], whole.entropy[order], whole.mutual_info[order])
        return self._routed(whole, routes, finite)

    def _look(self, images: Tensor) -> tuple[Tensor | None, Routes]:
        """Return the source network's logits and where each image belongs; without a look where a pack is named."""
        packs = self.packs
        if packs.forced is not None or len(packs) == 1:
            return None, self._nowhere(images, len(images), packs.names.index(packs.forced or SOURCE))
        router = packs.router
        with watching(packs.net) as watch:
            logits = forward(packs.net, images)
            seen = watch.moments()
        assert seen is not None, "a router that can choose knows norm layers of this network"
        return logits, router.routes(seen, packs.limit)

    def _ask(self, name: str, images: Tensor) -> Prediction:
        """Return the answer of one pack."""
        with self.packs.on(name) as model:
            samples = checked_samples(model, self.samples)
            if samples == 0 and isinstance(model, Perturbed):
                warn_of_mean(model)
            sides = views_asked(model, self.views)
            if name not in self._sessions:
                self._sessions[name] = PredictSession(model, self.generator, samples)

            def ask(batch: Tensor) -> Prediction:
                return average_finite(model, batch, None, samples, self.temperature, views=sides)

            return next(self._sessions[name].each([images], None, ask))

    def _nowhere(self, images: Tensor, count: int, number: int) -> Routes:
        """Return routes without evidence, for a pack chosen by name."""
        none = torch.full((count, len(self.packs)), torch.nan, device=images.device)
        choice = torch.full((count,), number, device=images.device)
        return Routes(none, none, choice, choice, torch.ones_like(choice, dtype=torch.bool))

    def _routed(self, answers: Prediction, routes: Routes, finite: Tensor | None) -> Routed:
        parts = {**vars(answers), **vars(routes)}
        if finite is not None and len(routes.choice) < len(finite):
            # An image that is not finite belongs to no pack and has no answer.
            row = (finite.cumsum(0) - 1).clamp_min(0)
            blank = Prediction.unknown(len(finite), answers.probs)
            empty = {**vars(blank), **vars(self._nowhere(answers.probs, len(finite), 0))}
            for name, value in parts.items():
                mask = finite.view(-1, *[1] * (value.ndim - 1))
                parts[name] = torch.where(mask, value[row], empty[name])
        return Routed(**parts, names=self.packs.names)
