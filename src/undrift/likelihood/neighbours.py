"""Agreement of neighbours in feature space: NRC (Yang et al. 2021) and AaD (Yang et al. 2022).

Both keep banks of the whole domain, filled once in eval mode before the first step. A batch's rows are overwritten
*before* the search, so each image finds itself first, and that one is dropped. ℓ(p, s) = −p·s: the authors pass p to
`kl_div`, which expects ln p, so that only a constant Σ s ln s is added and the logarithm is gone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift._types import Batches, Step
from undrift.likelihood.features import SeesFeatures, latest, look
from undrift.posterior.batch import device_of
from undrift.posterior.kept_statistics import move_statistics
from undrift.posterior.perturbed import Perturbed

_AT_ONCE = 2**24
"""Similarities computed at a time: a quarter of a gigabyte at most with what is made of them."""


class Banks:
    """L2-normalised features and softmax of every image, by its index in the data set, on the network's device.

    A batch that is written counts once its step is made (`keep`). Until then `undo` takes it back, so that half a step
    leaves no trace.

    Attributes:
        features: images × width.
        probs: images × classes.
        absent: 0 for an image that was seen, −∞ for one that was not; added to a similarity.
    """

    def __init__(self) -> None:
        self.features: Tensor | None = None
        self.probs: Tensor | None = None
        self.absent: Tensor | None = None
        self._before: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def fill(self, places: Tensor, features: Tensor, probs: Tensor, least: int) -> None:
        """Start with these images; a minimum of them must have finite features."""
        sound = torch.isfinite(features).all(1) & torch.isfinite(probs).all(1)
        if int(sound.sum()) < least:
            raise DataError(
                f"the domain has {int(sound.sum())} image{'' if int(sound.sum()) == 1 else 's'} with finite features; "
                f"needed: {least}, one more than the neighbours that are looked for. Give more images, or follow them "
                "as a stream: undrift.stream."
            )
        size = int(places.max()) + 1
        self.features = features.new_zeros(size, features.shape[1])
        self.probs = probs.new_zeros(size, probs.shape[1])
        self.absent = features.new_full((size,), -torch.inf)
        self._before = None
        self._put(places.to(features.device)[sound], F.normalize(features[sound], dim=1), probs[sound])

    def write(self, places: Tensor, features: Tensor, probs: Tensor) -> None:
        """Replace what is known of a batch's images by its normalised features and softmax."""
        self._make_room(int(places.max()) + 1)
        features_bank, probs_bank, absent = self.tensors()
        places = places.to(features_bank.device)
        self._before = places, features_bank[places], probs_bank[places], absent[places]
        self._put(places, features, probs)

    def keep(self) -> None:
        """Keep what was written, because its step was made."""
        self._before = None

    def undo(self) -> None:
        """Take back what was written since the last step that was made."""
        if self._before is not None:
            places, features, probs, absent = self._before
            for bank, old in zip(self.tensors(), (features, probs, absent), strict=True):
                bank[places] = old
            self._before = None

    def nearest(self, queries: Tensor, count: int) -> Tensor:
        """Return the indices of the images most similar (cosine) to each normalised query, the nearest first."""
        features, _, absent = self.tensors()
        rows = max(1, _AT_ONCE // len(features))
        return torch.cat([torch.addmm(absent, q, features.T).topk(count).indices for q in queries.split(rows)])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, softmax and the absent mask; the banks must be filled."""
        assert self.features is not None
        assert self.probs is not None
        assert self.absent is not None
        return self.features, self.probs, self.absent

    def state_dict(self) -> dict[str, Any]:
        """Return the banks as they were after the last whole step."""
        self.undo()
        return {"features": self.features, "probs": self.probs, "absent": self.absent}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a state."""
        tensors = (state[name] for name in ("features", "probs", "absent"))
        self.features, self.probs, self.absent = (None if t is None else t.to(device) for t in tensors)
        self._before = None

    def _put(self, places: Tensor, features: Tensor, probs: Tensor) -> None:
        features_bank, probs_bank, absent = self.tensors()
        features_bank[places], probs_bank[places] = features.to(features_bank), probs.to(probs_bank)
        absent[places] = 0

    def _make_room(self, size: int) -> None:
        # The first pass may have left out the last image, as a batch of one; an epoch's order does not.
        features, probs, absent = self.tensors()
        if (more := size - len(features)) > 0:
            self.features, self.probs = F.pad(features, (0, 0, 0, more)), F.pad(probs, (0, 0, 0, more))
            self.absent = F.pad(absent, (0, more), value=-torch.inf)


@dataclass(eq=False, kw_only=True)
class Remembering(SeesFeatures, ABC):
    """A likelihood with banks of the domain: fills them once, and adds each batch after its step.

    Args:
        features: name of the submodule whose output, flattened, is the features. None takes "bottleneck" where the
            network has one, else the input of its last linear layer.
        statistics_first: let moving norm statistics see the domain once before the banks are filled (see `Shot`).
    """

    divisible = True
    statistics_first: bool = False
    banks: Banks = field(init=False, repr=False, default_factory=Banks)
    _network: int | None = field(init=False, repr=False, default=None)  # whose domain the banks hold

    def __post_init__(self) -> None:
        wrong = [f"{n}={v!r}" for n, v in vars(self).items() if "neighbours" in n and v is not None and v < 1]
        if wrong:
            raise OptionError(f"{', '.join(wrong)}: needed: at least one neighbour. Its authors take 2 to 5.")

    @abstractmethod
    def most(self) -> int:
        """Return how many images the domain must hold."""

    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Fill the banks, before the first epoch only."""
        if self._network != model.key.ident:
            if self.statistics_first:
                move_statistics(model, batches)
            self.banks.fill(*look(model, batches, self.features), self.most())
            self._network = model.key.ident

    def follow(self, model: Perturbed) -> None:  # noqa: ARG002
        """Let the batch of the step that was made count."""
        self.banks.keep()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed adaptation needs: the banks."""
        return self.banks.state_dict()

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; `model` is the network that was restored with it."""
        self.banks.load_state_dict(state, device_of(model))
        self._network = None if self.banks.features is None else model.key.ident

    def batch(self, logits: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch's indices, its normalised features without gradient, and its softmax with gradient."""
        if step.indices is None or self._seen is None or self.banks.features is None:
            raise OptionError(
                f"{type(self).__name__} has no banks for this batch; it needs a pass over the domain before the first "
                "epoch, and at the features of each batch. Use it with undrift.adapt."
            )
        self.banks.undo()  # drop what a step left that was not made, or another draw of this step
        features = F.normalize(step.model.key.whole(latest(self._seen, self.features).detach()), dim=1)
        return step.indices, features, logits.softmax(1)


@dataclass(eq=False, kw_only=True)
class Nrc(Remembering):
    """Agreement with K neighbours, weighted by reciprocity, and with M neighbours of each, plus class balance.

        mean_i −[Σ_k A_ik p_i·s_k + 0.1 Σ_k Σ_m p_i·s_km] + Σ_c p̄_c ln(p̄_c + 1e-5)

    A_ik = 1 if i is among the M nearest of its k-th neighbour, else 0.1. Image i itself stays among the k·m, as in the
    authors' code.

    Args:
        features: see `Remembering`, as is `statistics_first`.
        neighbours: K.
        second_neighbours: M.
        late_neighbours: K in the second half of all steps; None keeps K.
        late_second_neighbours: M there.
        one_sided: A of a neighbour whose own nearest do not include i.
        ring: weight of the neighbours' neighbours.
        epsilon: constant under the logarithm.
        least_agreement: learn nothing where fewer pairs of neighbours have the same answer before the first step. A
            network whose answers are mostly wrong teaches them to the neighbours.

    Attributes:
        agreement: the share of such pairs; None before they are counted, or if nothing asks for it.

    Examples:
        >>> Nrc(neighbours=2, second_neighbours=3, late_neighbours=None, late_second_neighbours=None).most()
        4
    """

    neighbours: int = 3
    second_neighbours: int = 2
    late_neighbours: int | None = 5
    late_second_neighbours: int | None = 4
    one_sided: float = 0.1
    ring: float = 0.1
    epsilon: float = 1e-5
    least_agreement: float = 0.0
    agreement: float | None = field(init=False, repr=False, default=None)

    def most(self) -> int:
        """Return one more than the largest K or M, as the first found is the image itself."""
        late = (self.late_neighbours, self.late_second_neighbours)
        return 1 + max(self.neighbours, self.second_neighbours, *(n or 0 for n in late))

    @property
    def note(self) -> str:
        """Say why nothing is learned, if so."""
        if self.agreement is None or self.agreement >= self.least_agreement:
            return ""
        return (
            f"{self.agreement:.0%} of neighbouring images have the same answer, and undrift learns from neighbours "
            f"where {self.least_agreement:.0%} do. So no step was made: norm statistics alone, if there are any, have "
            "adapted. least_agreement=0 learns all the same."
        )

    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Fill the banks, and count how many neighbours agree, before the first epoch only."""
        if self._network != model.key.ident:
            super().refresh(model, batches)
            self.agreement = self._agreement() if self.least_agreement else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed adaptation needs: the banks, and how many neighbours agreed."""
        state = super().state_dict()
        return state if self.agreement is None else {**state, "agreement": self.agreement}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; `model` is the network that was restored with it."""
        super().load_state_dict(state, model)
        self.agreement = state.get("agreement")  # missing in older files

    def _agreement(self) -> float:
        """Return the share of neighbours that have the answer of the image, over up to 1,024 images."""
        features, probs, absent = self.banks.tensors()
        seen = (absent == 0).nonzero()[:, 0]
        some = seen[:: -(-len(seen) // 1024)]
        near = self.banks.nearest(features[some], self.neighbours + 1)[:, 1:]
        answers = probs.argmax(1)
        return float((answers[near] == answers[some, None]).double().mean())

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return the loss of one batch; None where too few neighbours agree."""
        if self.agreement is not None and self.agreement < self.least_agreement:
            return None
        places, features, p = self.batch(logits, step)
        self.banks.write(places, features, p.detach())
        first = _now(self.neighbours, self.late_neighbours, step)
        second = _now(self.second_neighbours, self.late_second_neighbours, step)
        near = self.banks.nearest(features, first + 1)[:, 1:]
        features_bank, probs, _ = self.banks.tensors()
        far = self.banks.nearest(features_bank[near.flatten()], second + 1)[:, 1:].unflatten(0, near.shape)
        reciprocal = (far == places.to(far.device)[:, None, None]).any(2)
        affinity = torch.where(reciprocal, 1.0, self.one_sided).to(p)
        s = (affinity.unsqueeze(2) * probs[near]).sum(1) + self.ring * probs[far].sum((1, 2))
        return -(p * s).sum(1).mean() + balance(p, self.epsilon)


@dataclass(eq=False, kw_only=True)
class Aad(Remembering):
    """Attraction to K neighbours, dispersion from the rest of the batch.

        mean_i [−Σ_k p_i·s_k + α Σ_{j≠i} p_i·p_j],   α = alpha · (1 + 10·progress)^−alpha_decay

    The second sum has a gradient through both its factors.

    Args:
        features: see `Remembering`, as is `statistics_first`.
        neighbours: K.
        late_neighbours: K in the second half of all steps; None keeps K.
        alpha: α at the start.
        alpha_decay: how fast it falls; 0 keeps it.

    Examples:
        >>> Aad(neighbours=5, late_neighbours=None, alpha_decay=5)
        Aad(features=None, statistics_first=False, neighbours=5, late_neighbours=None, alpha=1.0, alpha_decay=5)
    """

    neighbours: int = 3
    late_neighbours: int | None = 2
    alpha: float = 1.0
    alpha_decay: float = 0.0

    def most(self) -> int:
        """Return one more than the largest K, as the first found is the image itself."""
        return 1 + max(self.neighbours, self.late_neighbours or 0)

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        places, features, p = self.batch(logits, step)
        self.banks.write(places, features, p.detach())
        count = _now(self.neighbours, self.late_neighbours, step)
        near = self.banks.nearest(features, count + 1)[:, 1:]
        s = self.banks.tensors()[1][near].sum(1)
        others = p.sum(0) - p  # Σ_{j≠i} p_j
        alpha = self.alpha * (1 + 10 * step.progress) ** -self.alpha_decay
        return (alpha * (p * others).sum(1) - (p * s).sum(1)).mean()


def balance(p: Tensor, epsilon: float) -> Tensor:
    """Return Σ_c p̄_c ln(p̄_c + ε), least where all classes are equally frequent in the batch."""
    mean = p.mean(0)
    return (mean * (mean + epsilon).log()).sum()


def _now(early: int, late: int | None, step: Step) -> int:
    return late if late is not None and step.progress > 0.5 else early
