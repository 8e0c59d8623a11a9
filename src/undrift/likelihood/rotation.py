"""Rotation prediction by a second head on shared features (TTT)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import DataError, OptionError
from undrift._types import Step
from undrift.likelihood.second_head import TURNS, find_split, rotation_head
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name
from undrift.system.randomness import own_generator
from undrift.system.validate import a_type
from undrift.system.warning import warn


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
