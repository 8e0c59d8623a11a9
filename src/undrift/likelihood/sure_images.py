"""Keep the latest images of a stream that a teacher was confident about, to replay them in later steps."""

import math

import torch
from torch import Tensor

SURE = 0.1  # entropy of the teacher's answer, in ln(classes), below which it is sure
MOST_BYTES = 2**26  # 222 images of 224×224 pixels; every saved state of a stream holds them


class SureImages:
    """The latest images on which the teacher was sure and a draw of the network agreed, with their label.

    Images are kept in bfloat16, about as fine as eight bits per colour, and at most 64 MiB of them.

    Args:
        most: how many are kept; 0 keeps none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: tuple[Tensor, Tensor] | None = None
        self._offered: tuple[Tensor, Tensor] | None = None

    def offer(self, images: Tensor, target: Tensor, logits: Tensor) -> None:
        """Find what to keep of a batch once its step is made."""
        label = target.argmax(1)
        entropy = torch.special.entr(target).sum(1)
        sure = (entropy < SURE * math.log(target.shape[1])) & (label == logits.detach().argmax(1))
        places = sure.nonzero()[:, 0]  # as a mask it would be asked for twice
        chosen = images.detach()[places]
        self._offered = chosen.bfloat16() if chosen.is_floating_point() else chosen, label[places]

    def keep(self) -> None:
        """Keep what was offered; the oldest make room."""
        if self._offered is None:
            return
        old, (images, labels) = self._kept, self._offered
        if old is not None and old[0].shape[1:] == images.shape[1:]:
            images, labels = torch.cat([old[0], images]), torch.cat([old[1], labels])
        most = max(1, min(self.most, MOST_BYTES // max(1, images[:1].nbytes)))
        # Cloned, not a view: the whole would be held, and saved, behind it.
        self._kept, self._offered = (images[-most:].clone(), labels[-most:].clone()), None

    def some(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor] | None:
        """Return at most so many of the images at random, with their labels; None while there are none."""
        if self._kept is None or not len(self._kept[0]):
            return None
        images, labels = self._kept
        chosen = torch.randperm(len(images), generator=generator)[:count].to(images.device)
        return images[chosen], labels[chosen]

    def state(self) -> dict[str, Tensor]:
        """Return what is kept, for a run that goes on."""
        return {} if self._kept is None else dict(zip(("images", "labels"), self._kept, strict=True))

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Go on from a state."""
        self._kept = (state["images"].to(device), state["labels"].to(device)) if state else None
        self._offered = None
