"""Train a source network with a second head for rotations, as test-time training (TTT) needs."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.images import Domain
from undrift.likelihood.rotation import TURNS, find_split, rotation_head
from undrift.posterior.select import plain_name
from undrift.system.atomic import write_bytes
from undrift_bench import zoo
from undrift_bench.train.options import TrainOptions
from undrift_bench.train.run import TrainedSource, train_source
from undrift_bench.train.source_file import read_header, write_source

# TTT's, but that our SGD looks ahead (Nesterov).
TTT = TrainOptions(network="resnet26_gn", epochs=150, batch_size=128, lr=0.1, schedule="steps")


class WithRotation(nn.Module):
    """A network and a rotation head on its shared part, trained together.

        cross-entropy to the label + cross-entropy of the head to the rotation, over all four rotations of each image

    Args:
        net: the classifier.
        split: the last module of the shared part; None finds it as `Rotation` does.
    """

    def __init__(self, net: nn.Module, split: str | None = None) -> None:
        super().__init__()
        name = find_split(net, split)
        self.net, self.head = net, rotation_head(net, name)
        self._seen: list[Tensor] = []
        module = {plain_name(n): m for n, m in net.named_modules()}[name]
        module.register_forward_hook(lambda _m, _args, output: self._seen.append(output))

    def forward(self, images: Tensor) -> Any:
        """Return the classifier's logits."""
        self._seen.clear()
        return self.net(images)

    def more_loss(self, images: Tensor) -> Tensor:
        """Return the cross-entropy of the head over the four rotations of each image."""
        views = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(TURNS)])
        turns = torch.arange(TURNS, device=images.device).repeat_interleave(len(images))
        self._seen.clear()
        self.net(views)
        return F.cross_entropy(self.head(self._seen.pop()).float(), turns)


def train_rotation(
    domain: Domain,
    out: str | PathLike[str],
    options: TrainOptions = TTT,
    *,
    split: str | None = None,
    overwrite: bool = False,
    **how: Any,
) -> TrainedSource:
    """Train a network of the zoo with a rotation head, and write both: `NAME.safetensors`, `NAME.head.safetensors`.

    The first file is a source model as any other; the second is for `method="ttt", head=…`.

    Args:
        domain: labelled images, square after preprocessing.
        out: the source model to write.
        options: TTT's by default, on its ResNet-26 with GroupNorm.
        split: the last module of the shared part; None finds it as `undrift.likelihood.Rotation` does.
        overwrite: replace a finished `out`, its head and its curve.
        **how: device, resume, progress, watch, workers, validation as in `train_source`.
    """
    path = Path(out)
    head, curve = path.with_suffix(".head.safetensors"), path.with_suffix(".png")
    joint = path.with_suffix(".joint.safetensors")
    # With a joint file or its checkpoint beside them, they are this run's own: it was killed at its end.
    own = overwrite or joint.exists() or joint.with_suffix(".checkpoint.pt").exists()
    there = [] if own else [place for place in (path, head, curve) if place.exists()]
    if path.suffix != ".safetensors" or there:
        found = f"{there[0]} is there already" if there else f"{path} does not end in .safetensors"
        raise OptionError(f"{found}; needed: a new NAME.safetensors. Choose another, or overwrite=True.")
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        both = WithRotation(zoo.build(options.network, _classes(domain)), split)
    trained = train_source(domain, joint, options, network=both, overwrite=True, **how)
    header = dataclasses.replace(read_header(joint), network=options.network)
    write_bytes(head, safetensors.torch.save(_state(both.head)))
    write_source(path, _state(both.net), header)
    if trained.curve is not None:
        trained.curve.replace(curve)
    joint.unlink()
    return dataclasses.replace(trained, path=path, network=both.net, curve=trained.curve and curve)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()}


def _classes(domain: Domain) -> int:
    labels = domain.labels
    return len(domain.class_names) or (1 if labels is None else int(labels.max()) + 1)
