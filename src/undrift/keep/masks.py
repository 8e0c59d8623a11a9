"""Mask gradients to protect the features of the source (G-SFDA)."""

from torch import nn

from undrift._types import Keeper
from undrift.likelihood.masks import masks_of
from undrift.options import Options
from undrift.posterior.norm import KINDS
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.roles import resolve_roles
from undrift.posterior.select import matching, plain_name
from undrift.posterior.state import named_learnables

_SHORTCUTS = ("*downsample*", "*shortcut*")


class MaskedGradients(Keeper):
    """Protect what the source's mask uses: multiply gradients before and behind the masked features by 1 − mask_0.

    Scale and shift of the stem's norm layer and of shortcuts (`downsample`) get no gradient, and so no weight decay:
    the authors train the backbone's `bn*`, a name that only the layers inside blocks have. Nor does the masks'
    embedding, unless `train_masks`.

    Args:
        features: name of the submodule with the masks behind it; None is "bottleneck".
        train_masks: let the embedding of the network's own masks be trained (VisDA).
    """

    def __init__(self, features: str | None = None, train_masks: bool = False) -> None:
        self.features, self.train_masks = features, train_masks
        self._rows: list[nn.Parameter] = []
        self._columns: list[nn.Parameter] = []

    def __repr__(self) -> str:
        return f"MaskedGradients(features={self.features!r}, train_masks={self.train_masks})"

    def start(self, model: Perturbed) -> None:
        """Sort the learnables: those in the bottleneck, those in the classifier, and those that are not trained."""
        masks, inside = masks_of(model), (self.features or "bottleneck",)
        last = resolve_roles(model.net, Options(frozen=("@classifier",))).frozen
        norms = [plain_name(n) for n, m in model.net.named_modules() if isinstance(m, KINDS)]
        stem = next((n for n in norms if not matching(n, (*inside, *last))), None)
        self._rows, self._columns = [], []
        for name, parameter in named_learnables(model).items():
            layer = plain_name(name.removeprefix("net.")).rpartition(".")[0]
            if masks is not None and parameter is masks.embedding:
                continue  # stays trainable, because it is saved with what was learned
            if matching(layer, inside):
                self._rows.append(parameter)
            elif matching(layer, last):
                self._columns.append(parameter)
            elif layer == stem or matching(layer, _SHORTCUTS):
                parameter.requires_grad_(False)

    def gradients(self, model: Perturbed) -> None:
        """Multiply the gradients by 1 − the source's mask."""
        masks = masks_of(model)
        assert masks is not None
        free = 1 - masks.masks()[1].detach()  # row 1 is the source's on an adapting network
        # Select by shape: a bottleneck may have inner layers, a classifier a bias (and norms, under weight norm).
        for parameter in self._rows:
            if parameter.grad is not None and len(parameter) == len(free):
                parameter.grad.mul_(free.view(-1, *(1,) * (parameter.ndim - 1)))
        for parameter in self._columns:
            if parameter.grad is not None and parameter.ndim == 2 and parameter.shape[1] == len(free):
                parameter.grad.mul_(free)
        if not self.train_masks:
            masks.embedding.grad = None
