"""Save the demo's domain file, load it into a fresh network, and compare."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.packs.file import load, save
from undrift.predict import predict
from undrift_bench.demo.rows import Scored, adapted, scores
from undrift_bench.demo.setting import DemoSetting, World

NAME = "scans.safetensors"
EXAMPLES = 24
"""Source images that go along, for the picture."""


@dataclass(frozen=True)
class Shown:
    """Images for the picture, and what the loaded network says about them. Arrays: they come from another process."""

    source: NDArray[np.uint8]
    source_labels: NDArray[np.int64]
    target: NDArray[np.uint8]
    target_labels: NDArray[np.int64]
    answers: NDArray[np.int64]
    confidence: NDArray[np.float32]
    entropy: NDArray[np.float32]


@dataclass(frozen=True)
class Filed:
    """What came of saving and loading.

    Attributes:
        size: of the domain file, in bytes.
        network: of the source network's file.
        equal: whether the loaded network answers bit for bit as the one that was saved.
        restored: whether the network that was adapted is the source network again, bit for bit.
        shown: some images, with the loaded network's answers.
        scored: how the adapted network did: the VMP row's run with seed 0.
    """

    size: int
    network: int
    equal: bool
    restored: bool
    shown: Shown
    scored: Scored

    def to_dict(self) -> dict[str, Any]:
        """Return the plain numbers."""
        return {"size": self.size, "network": self.network, "equal": self.equal, "restored": self.restored}


def domain_file(world: World, setting: DemoSetting, out: Path) -> Filed:
    """Adapt (VMP, seed 0), save, load into a fresh copy of the source network, and compare the answers."""
    target = world.target.select(range(min(setting.shown_images, len(world.target))))
    examples = world.held_out.select(range(EXAMPLES))
    images = target.preprocess(target.images)
    source = predict(world.net, images)
    with adapted(world, setting, seed=0) as model:
        size = save(model, out / NAME, source="undrift_bench.demo digits.safetensors")
        live = predict(model, images, generator=0, batch_size=setting.batch_size)
        scored = scores(model, world, setting, seed=0)
    loaded = load(copy.deepcopy(world.net), out / NAME)
    again = predict(loaded, images, generator=0, batch_size=setting.batch_size)
    assert target.labels is not None
    assert examples.labels is not None
    shown = Shown(
        examples.images[:, 0].numpy(),
        examples.labels.numpy(),
        target.images[:, 0].numpy(),
        target.labels.numpy(),
        again.label.numpy(),
        again.probs.amax(dim=1).numpy(),
        again.entropy.numpy(),
    )
    restored = torch.equal(source.probs, predict(world.net, images).probs)
    return Filed(size, world.size, torch.equal(live.probs, again.probs), restored, shown, scored)
