"""Rotation prediction by a second head on shared features (TTT)."""

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift._types import Step
from undrift.options import _suggest
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.roles import find_role
from undrift.posterior.select import one_of, plain_name
from undrift.system.randomness import own_generator
from undrift.system.validate import a_type
from undrift.system.warning import warn

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


class Rotation(nn.Module):
    """Cross-entropy of a head that predicts how far a view of an image was rotated.

        mean over views of −log softmax(head(shared(rot_k(view))))[k],   k = 0, 1, 2, 3 quarter turns

    Each view is a random crop of the padded image, perhaps mirrored, randomly rotated. The classifier's own layers
    after the shared part get no gradient; the head's parameters are trained too.

    Args:
        split: name of the last module of the shared part. None takes "layer2" or "block2", or else about two
            thirds of the top-level modules.
        head: a trained head: a module that maps the shared part's output to four logits, or a file of
            `undrift_bench.train.train_rotation`. None attaches an untrained copy of what comes after the split, with a
            warning.
        views: number of views per image and step.
        pad: black pixels on each side before the crop, as the network's preprocessing makes them (0 if unknown).
        flip: mirror half of the views.
        seed: of crops, mirrorings and rotations; without it torch's global generator gives one. An episodic stream
            starts them again for each image, so that an answer does not depend on earlier images.

    Attributes:
        head: the head; None until it is made, if none was given.
    """

    def __init__(
        self,
        split: str | None = None,
        head: nn.Module | str | os.PathLike[str] | None = None,
        views: int = 32,
        pad: int = 4,
        flip: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if views < 1 or pad < 0:
            raise OptionError(f"views={views!r}, pad={pad!r}: they start at 1 and 0. TTT's are 32 and 4.")
        if not isinstance(head, nn.Module | str | os.PathLike | None):
            raise OptionError(
                f"head is {a_type(head)}; needed: a module from shared features to {TURNS} logits, or its "
                "file. Train one with undrift_bench.train.train_rotation, or leave it out."
            )
        self.split, self.views, self.pad, self.flip = split, views, pad, flip
        self.head = head if isinstance(head, nn.Module) else None
        self._file = None if head is None or isinstance(head, nn.Module) else Path(head)
        self._random = own_generator(seed)
        self._seen: list[Tensor] = []

    def forward(self, logits: Tensor, step: Step) -> Tensor:  # noqa: ARG002
        """Return the loss for fresh views of the step's images."""
        images = step.images
        if images.ndim != 4 or images.shape[2] != images.shape[3]:
            raise DataError(
                f"the images are {tuple(images.shape[1:])}; a quarter turn needs square ones. Crop them square first."
            )
        known = step.model.preprocess
        nothing = torch.zeros(1, images.shape[1], 1, 1, dtype=torch.uint8)
        black = nothing.float() if known is None else known.normalise(nothing)
        views = crops(images.repeat_interleave(self.views, 0), self.pad, self.flip, black, self._random)
        turns = torch.randint(TURNS, (len(views),), generator=self._random).to(views.device)
        views = rotated(views, turns)
        self._seen.clear()
        step.mean_logits(views)
        if not self._seen or self.head is None:
            raise OptionError(
                f"split={self.split!r}: the network never called that module, so there are no shared features. Name "
                "one that its forward pass calls."
            )
        out = logits_of(self.head(self._seen.pop()))
        if out.shape != (len(views), TURNS):
            raise OptionError(
                f"the head returned {tuple(out.shape)} for {len(views)} views; needed: {TURNS} logits each. Give "
                "another head, or the split that it was trained with."
            )
        return F.cross_entropy(out, turns)

    @contextmanager
    def watch(self, model: Perturbed) -> Iterator[None]:
        """Record the shared features of each forward pass; make the head if there is none."""
        name = find_split(model.net, self.split)
        if self.head is None:
            with model.off() as net:
                self.head = rotation_head(net, name)
            self._fill()
        parameter = next(model.net.parameters())
        self.head.to(parameter.device).eval()
        module = {plain_name(n): m for n, m in model.net.named_modules()}[name]
        handle = module.register_forward_hook(self._see)
        try:
            yield
        finally:
            handle.remove()
            self._seen.clear()

    def _see(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._seen[:] = [output]  # the last pass only, as others may call the network too

    def _fill(self) -> None:
        """Load the head's file, or warn that it is untrained."""
        if self._file is None:
            warn(
                "no head= was given: an untrained rotation head is attached, which knows nothing of rotations yet. TTT "
                "trains it with the source network: undrift_bench.train.train_rotation."
            )
            return
        from undrift.system.weights_file import fill, read

        assert self.head is not None
        tensors, _ = read(self._file)
        fill(self.head, tensors, f"{self._file} as a rotation head")

    def get_extra_state(self) -> Tensor:
        """Return the state of the random crops and rotations."""
        return self._random.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Go on with the crops and rotations from there."""
        self._random.set_state(state.cpu())

    def __repr__(self) -> str:
        # All settings: a resumed run is recognised by this line.
        names = ("split", "views", "pad", "flip")
        return "Rotation(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"


def crops(images: Tensor, pad: int, flip: bool, black: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random window of each padded image, in the image's size, half of them mirrored.

    Args:
        black: what is around an image, 1×C×1×1.
    """
    count, channels, height, width = images.shape
    top, left = (torch.randint(2 * pad + 1, (count,), generator=generator) for _ in range(2))
    mirrored = torch.rand(count, generator=generator) < (0.5 if flip else 0.0)
    columns = torch.arange(width)
    y = (top[:, None] + torch.arange(height)).to(images.device)
    x = (left[:, None] + torch.where(mirrored[:, None], columns.flip(0), columns)).to(images.device)
    padded = black.to(images).expand(count, channels, height + 2 * pad, width + 2 * pad).clone()
    padded[:, :, pad : pad + height, pad : pad + width] = images
    which = torch.arange(count, device=images.device)[:, None, None]
    return padded[which, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def rotated(images: Tensor, turns: Tensor) -> Tensor:
    """Return each image turned by its number of quarter turns, counter-clockwise."""
    out = torch.empty_like(images)
    for turn in range(TURNS):
        chosen = turns == turn
        out[chosen] = torch.rot90(images[chosen], turn, (2, 3))
    return out
