"""Copy the part of a network after a split as a second head on shared features."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import OptionError, UndriftError
from undrift.options import _suggest
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.roles import find_role
from undrift.posterior.select import one_of, plain_name

TURNS = 4
STAGES = ("layer2", "block2")
"""What most networks call the stage that TTT shares last."""


class After(nn.Module):
    """The part after a split: a copy of the network that continues from the split's output, ignoring its input.

    Modules before the split pass their input through and hold no weights.
    """

    def __init__(self, net: nn.Module, split: str) -> None:
        super().__init__()
        self.rest = copy.deepcopy(_original(net))
        self.split = split
        self._features: list[Tensor] = []
        parent = module = self.rest
        for part in split.split("."):
            names = list(module._modules)
            for earlier in names[: names.index(part)]:
                module._modules[earlier] = _Pass()
            parent, module = module, _original(module.get_submodule(part))
            parent._modules[part] = module  # a block with a split inside must run as written, not compiled
        parent._modules[split.rpartition(".")[2]] = _Give(self._features)

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits that the network makes of these features."""
        self._features.append(features)
        try:
            return logits_of(self.rest(features))
        except Exception as error:
            if isinstance(error, UndriftError | torch.OutOfMemoryError):
                raise
            # Most likely code in the network's own forward: unlike a module it cannot be left out, and it gets features
            # in place of images.
            raise OptionError(
                f"what comes after split={self.split!r} cannot be run by itself ({type(error).__name__}: {error}); "
                "needed: a forward pass whose code outside of modules also works on the split's output, of shape "
                f"{tuple(features.shape)}. Put such code into an nn.Module, name another split=…, or give head=…"
            ) from error
        finally:
            self._features.clear()


def _original(module: nn.Module) -> nn.Module:
    """Return the module behind torch.compile's wrapper, or the module itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found


class _Pass(nn.Module):
    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


class _Give(nn.Module):
    """Returns what was put into its list."""

    def __init__(self, features: list[Tensor]) -> None:
        super().__init__()
        self._features = features

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self._features[-1]


def rotation_head(net: nn.Module, split: str | None = None) -> After:
    """Return an untrained rotation head: a copy of what comes after the split, its classifier replaced by four logits.

    Examples:
        >>> import torch
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
        >>> rotation_head(net, "0")(torch.rand(2, 8, 6, 6)).shape
        torch.Size([2, 4])
    """
    head = After(net, find_split(net, split))
    name = find_role(head.rest, "@classifier")
    if name is None:
        raise OptionError(
            f"split={split!r} leaves no linear layer after it; a rotation head ends in one. Choose an earlier split."
        )
    classifier = {plain_name(n): m for n, m in head.rest.named_modules()}[name]
    matrix = next(p for p in classifier.parameters() if p.ndim == 2)
    four = nn.Linear(matrix.shape[1], TURNS, device=matrix.device, dtype=matrix.dtype)
    parent, _, last = name.rpartition(".")
    {plain_name(n): m for n, m in head.rest.named_modules()}[parent]._modules[last] = four
    return head.requires_grad_(True)


def find_split(net: nn.Module, split: str | None) -> str:
    """Return the name of the shared part's last module; see `Rotation`."""
    names = [plain_name(name) for name, _ in net.named_modules() if plain_name(name)]
    if split is not None:
        if split not in names:
            raise OptionError(
                f"split={split!r} names no submodule{_suggest(split, names)}; needed: the last module of the shared "
                f"part. {one_of(names)}"
            )
        return split
    for stage in STAGES:
        if found := next((name for name in names if name.rpartition(".")[2] == stage), None):
            return found
    root = _original(net)
    top = [name for name, child in root.named_children() if any(True for _ in child.parameters())]
    if len(top) < 2:
        raise OptionError(
            f"{type(root).__name__} has {len(top)} top-level modules with weights; a shared part and a head need two. "
            "Name the last module of the shared part: split=…"
        )
    return plain_name(top[math.ceil(2 / 3 * (len(top) - 1)) - 1])
