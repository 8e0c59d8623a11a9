"""G-SFDA: agreement of neighbours under one feature mask per domain (Yang et al. 2021)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift._types import Batches, Step
from undrift.likelihood.features import named, watching
from undrift.likelihood.masks import Masks, attached_masks, masks_of
from undrift.likelihood.neighbours import Remembering, balance
from undrift.posterior.batch import to_device
from undrift.posterior.extra_modules import add_extra
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import one_of, plain_name
from undrift.posterior.state import one_pass
from undrift.system.warning import warn


@dataclass(eq=False, kw_only=True)
class Gsfda(Remembering):
    """Agreement with K neighbours, under the target's mask; and class balance.

        mean_i −Σ_k ln(p_i·s_k) + Σ_c p̄_c ln(p̄_c + 1e-5)

    The banks are written *after* the search, so an image's former entry is a candidate, and none is dropped. (The
    authors mean to blank the batch's rows for the search, but blank a copy.) Features are masked.

    The masks belong to source training (`undrift_bench.zoo.masked`, `masked_loss`). A network without them gets random
    ones behind its features, with a warning: they cut off half of the features, so the method runs but does not work
    well. Their seed is the perturbation's (`generator=`), and they are saved in its domain file; `remove()` takes them
    off.

    Args:
        features: name of the submodule with the masks behind it; None is "bottleneck".
        neighbours: K.
        epsilon: constant under the logarithm of the mean prediction.
    """

    neighbours: int = 2
    epsilon: float = 1e-5
    attached: Masks | None = field(init=False, repr=False, default=None)  # masks that we added

    def most(self) -> int:
        """Return K: no neighbour is dropped."""
        return self.neighbours

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        places, features, p = self.batch(logits, step)
        near = self.banks.nearest(features, self.neighbours)
        agreement = (p.unsqueeze(1) * self.banks.tensors()[1][near]).sum(2)
        self.banks.write(places, features, p.detach())
        # Two predictions without a common class underflow to 0, whose logarithm has no gradient.
        attraction = agreement.clamp_min(torch.finfo(agreement.dtype).tiny).log().sum(1)
        return -attraction.mean() + balance(p, self.epsilon)

    def refresh(self, model: Perturbed, batches: Batches) -> None:
        """Turn the target's mask on and fill the banks, before the first epoch only."""
        if self._network != model.key.ident:
            if masks_of(model) is None:
                self._attach(model, self._width(model, batches))
            self._exchange(model)
        super().refresh(model, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed adaptation needs: the banks, and masks that are not the network's own."""
        return {
            **super().state_dict(),
            "embedding": None if self.attached is None else self.attached.embedding.detach(),
        }

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; `model` is the network that was restored with it."""
        super().load_state_dict(state, model)
        if (embedding := state["embedding"]) is not None:
            masks = masks_of(model) or self._attach(model, embedding.shape[1])
            masks.embedding.data.copy_(embedding)

    @torch.no_grad()
    def _width(self, model: Perturbed, batches: Batches) -> int:
        with evaluating(model), one_pass(model), watching(model.net, self._place(model)) as seen:
            for _, images in batches():
                model(to_device(images, model))
                return int(seen.pop().shape[1])
        raise DataError("the domain has no batch; G-SFDA needs at least one image. Check the loader.")

    def _place(self, model: Perturbed) -> str:
        """Return the name of the module behind which masks go."""
        names = [plain_name(name) for name, _ in model.net.named_modules()]
        if self.features is None and "bottleneck" not in names:
            raise OptionError(
                f"{type(model.net).__name__} has no submodule called bottleneck, and features= was not given; G-SFDA "
                f"trains the module that gives the features, and puts its masks behind it. {one_of(names)}"
            )
        place = self.features or "bottleneck"
        named(model.net, place)  # raises, with the names, if there is no such module
        return place

    def _attach(self, model: Perturbed, width: int) -> Masks:
        """Put untrained masks behind the features, as part of the perturbation."""
        seeded = torch.Generator().manual_seed(int(model.key.seed))
        masks = self.attached = Masks(width, seeded)
        add_extra(model, self._place(model), masks)
        warn(
            f"{type(model.net).__name__} has no feature masks; G-SFDA needs two that were trained with the source. "
            "Random ones were put on, so this run tests the machinery only. Train it with undrift_bench.zoo.masked "
            "and undrift_bench.zoo.masked_loss."
        )
        return masks

    def _exchange(self, model: Perturbed) -> None:
        """Exchange the target's mask and the source's in the copy of the embedding that adapts."""
        masks = masks_of(model)
        if masks is None or masks is attached_masks(model):
            return
        source = next((held.away["embedding"] for held in model.trained if held.layer is masks), None)
        if source is None:
            where = next(plain_name(n) for n, m in model.net.named_modules() if m is masks).rpartition(".")[0]
            named_so = where == (self.features or "bottleneck")  # then it was the caller who left it out of train
            raise OptionError(
                f"the network's masks, behind {where!r}, are not among what is trained, so the target's could not be "
                "saved with it; G-SFDA trains the module that gives the features. Name it: "
                + (f"train=({where!r}, '@classifier')." if named_so else f"features={where!r}.")
            )
        if torch.equal(source, masks.embedding):  # else it was adapted before
            masks.embedding.data.copy_(source.detach().flip(0))
