"""Banks of features and predictions of all images of a domain, and the search for nearest neighbours."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError

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
