"""Stand-ins for what TTT and BACS need from source training, so that `--tiny` runs them too."""

import copy
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from undrift.keep import Moments
from undrift.likelihood.rotation import rotation_head

JITTER = 0.01  # between the two iterates that a posterior is of: a variance of 0 would be no posterior


class TinyParts:
    """Files of an untrained head and of a posterior, by the settings' names, as long as this object lives.

    Args:
        net: the tiny network that they belong to.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def file(self, name: str) -> Path:
        """Return the file of "head" or "posterior"; its name says that it was not trained."""
        place = self.folder / f"untrained-{name}.safetensors"
        if not place.is_file():
            with torch.random.fork_rng(devices=[]):  # the same each time, and no draw of the method's
                torch.manual_seed(0)
                {"head": self._head, "posterior": self._posterior}[name](place)
        return place

    def _head(self, place: Path) -> None:
        save_file({n: t.contiguous() for n, t in rotation_head(self.net).state_dict().items()}, place)

    def _posterior(self, place: Path) -> None:
        moments = Moments(self.net)
        for _ in range(2):
            moments.add(_jittered(self.net))
        moments.save(place)


@torch.no_grad()
def _jittered(net: nn.Module) -> nn.Module:
    near = copy.deepcopy(net)
    for parameter in near.parameters():
        parameter.add_(JITTER * torch.randn_like(parameter))
    return near
