"""Save what the demo's network learned as a pack, load it into a fresh network, and compare."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.packs.compression import DEFAULT
from undrift.packs.file import load, save
from undrift.predict import predict
from undrift_bench.demo.rows import OURS, Scored, adapted, labels_of, scored
from undrift_bench.demo.setting import DemoSetting, World

NAME = "scans.safetensors"
EXACT = "scans-exact.safetensors"
ACROSS = 6
"""Images in a line of the picture."""


@dataclass(frozen=True)
class Shown:
    """Images for the picture, with what both networks say. Arrays: they come from another process."""

    source: NDArray[np.uint8]
    source_labels: NDArray[np.int64]
    target: NDArray[np.uint8]
    target_labels: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]


@dataclass(frozen=True)
class Filed:
    """What came of saving and loading.

    Attributes:
        size: of the pack, in bytes; weights are compressed.
        exact: of a pack that holds every weight as it is.
        network: of the source network's file.
        same: part of the target on which the network loaded from the pack gives the same label as the one saved.
        equal: whether the one loaded from the exact pack answers bit for bit the same.
        restored: whether the network that was adapted is the source network again, bit for bit.
        shown: some images, with the answers before and after.
        scored: how the adapted network did: the default's run with seed 0.
    """

    size: int
    exact: int
    network: int
    same: float
    equal: bool
    restored: bool
    shown: Shown
    scored: Scored

    def to_dict(self) -> dict[str, Any]:
        """Return the plain numbers."""
        return {name: getattr(self, name) for name in ("size", "exact", "network", "same", "equal", "restored")}


def domain_file(world: World, setting: DemoSetting, out: Path) -> Filed:
    """Adapt by the default (seed 0), save twice, load into fresh copies of the source network, and compare."""
    images = world.target.preprocess(world.target.images)

    def answers(model: torch.nn.Module) -> Any:
        return predict(model, images, generator=0, batch_size=setting.answer_batch_size)

    def loaded(name: str) -> Any:
        return answers(load(copy.deepcopy(world.net), out / name))

    source = answers(world.net)
    with adapted(OURS, world, setting, seed=0) as history:
        assert history.model is not None
        named = "undrift_bench.demo digits.safetensors"
        size, exact = (
            save(history.model, out / name, source=named, mean=mean)
            for name, mean in ((NAME, DEFAULT), (EXACT, "exact"))
        )
        live = answers(history.model)
        found = scored(history, world, setting, seed=0)
    return Filed(
        size,
        exact,
        world.size,
        float((loaded(NAME).label == live.label).double().mean()),
        torch.equal(loaded(EXACT).probs, live.probs),
        torch.equal(source.probs, answers(world.net).probs),
        _shown(world, source.label, live.label),
        found,
    )


def _shown(world: World, before: torch.Tensor, after: torch.Tensor) -> Shown:
    """Return the first images of either kind, drawn without regard to the answers."""
    source, target = slice(0, ACROSS), slice(0, 2 * ACROSS)
    return Shown(
        world.held_out.images[source, 0].numpy(),
        labels_of(world.held_out)[source].numpy(),
        world.target.images[target, 0].numpy(),
        labels_of(world.target)[target].numpy(),
        before[target].numpy(),
        after[target].numpy(),
    )
