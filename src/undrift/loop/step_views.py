"""Draw a new view of each image in every epoch of `adapt`, among views that change no label."""

import torch
from torch import Tensor

from undrift.answer.views import AUTO, drawn_views
from undrift.loop.finite_images import Failed, FiniteImages
from undrift.loop.surveys import Surveys
from undrift.posterior.perturbed import Perturbed


class StepViews:
    """The views that steps draw from, by the option `step_views`.

    "auto" means those that answers are averaged over: the ones named in `answer_views`, or those that pass the test
    without labels. Where the caller gives `clean` images, the others are augmented already, and no view is drawn.

    Attributes:
        names: of the views; None before they are decided.
    """

    def __init__(self, model: Perturbed, images: FiniteImages, surveys: Surveys) -> None:
        self.model, self.images, self.surveys = model, images, surveys
        self.names: tuple[str, ...] | None = None
        self._epoch, self._chances = -1, torch.empty(0)

    def decide(self, failed: Failed) -> None:
        """Decide, once; the test asks the network whose norm statistics have seen the domain."""
        if self.names is None:
            options = self.model.options
            asked = options.step_views if self.images.looked_at is self.images.data else ()
            asked = options.answer_views if asked == (AUTO,) else asked
            self.names = self.surveys.safe_views(failed) if asked == (AUTO,) else asked

    def of(self, images: Tensor, places: Tensor, epoch: int) -> Tensor:
        """Return the images of a batch in views of their own.

        A view depends on the image's place and the epoch alone, so that a run that resumes, or is shared among
        processes, draws the same.
        """
        if not self.names or images.ndim != 4:
            return images
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._epoch, self._chances = epoch, torch.rand(self.images.data.size, 3, generator=generator)
        if (share := self.model.key.share) is not None:
            places = places[share.first : share.first + share.own]
        return drawn_views(images, self.names, self._chances[places])
