"""Notice that a stream came back to a domain that it knows, and put what it had learned there back in.

Before each batch, one pass of the source network compares the batch with the moments of every domain that is known:
from packs, or from earlier in this stream. Where the batch no longer fits the domain that the network is in, it goes to
the one that fits best; where none does, a new one begins, and learning goes on from where it stands.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.answer.forward import finite_rows, forward
from undrift.loop.online import OnlineSteps
from undrift.packs.domain_file import DomainFile
from undrift.packs.evidence import DomainMoments, Gathering, common_layers
from undrift.packs.moments import ImageMoments, watching
from undrift.packs.router import SOURCE
from undrift.packs.state import check_fill_start, fill_start
from undrift.posterior.attached import root_of
from undrift.posterior.batch import device_of
from undrift.posterior.layers import evaluating

LIMIT = 0.5
"""Standard deviations of single images that the mean of a batch may be away from a domain."""

LEAST = 32
"""Images that are compared at a time; smaller batches are compared together with those before them."""


@dataclass
class Domain:
    """A domain that a stream knows.

    Attributes:
        moments: by which it is known again; None until enough images were seen.
        learned: the state of the stream when it left; None where it is there, or was never.
        file: the pack that it came from.
    """

    moments: DomainMoments | None = None
    learned: dict[str, Any] | None = None
    file: DomainFile | None = None
    gathering: Gathering = field(default_factory=Gathering)


class Switching:
    """Keeps what a stream learned of each domain, and says which one the network is in.

    Attributes:
        domains: by name, in the order in which they were met.
        current: the name of the domain that the network is in; "source" before the first batch.
        switches: at which images the network went to another domain, and to which.
    """

    def __init__(self, online: OnlineSteps, files: Sequence[DomainFile] = ()) -> None:
        self.online, self.model = online, online.model
        self.domains: dict[str, Domain] = {}
        self.current = SOURCE
        self.switches: list[tuple[int, str]] = []
        self._recent: ImageMoments | None = None
        device = device_of(self.model)
        for file in files:
            check_fill_start(self.model, file)
            moments = DomainMoments.read(file.router, file.facts)
            self.domains[file.name] = Domain(None if moments is None else moments.to(device), None, file)

    def __call__(self, images: Tensor) -> bool:
        """Look at a batch before it is answered; return whether the network went to another domain."""
        images = images[finite_rows(images)]
        if not len(images):
            return False
        seen = self._look(images)
        if seen is None:
            return False
        compared = self._compared(seen)
        target = self._target(compared)
        switched = target != self.current
        if switched:
            self._go(target)
            self._recent = None
        self.domains[target].gathering.add(seen)
        if (moments := self.domains[target].gathering.moments()) is not None and self.domains[target].file is None:
            self.domains[target].moments = moments
        return switched

    @torch.no_grad()
    def _look(self, images: Tensor) -> ImageMoments | None:
        """Return the moments of a batch under the source network."""
        with self.model.off() as net, evaluating(net), watching(root_of(net)) as watch:
            forward(root_of(net), images)
            return watch.moments()

    def _compared(self, seen: ImageMoments) -> ImageMoments:
        """Return what is compared: the batch, or the last images where it is small."""
        if self._recent is not None and len(seen) < LEAST:
            mean, var = (
                torch.cat([getattr(self._recent, name), getattr(seen, name)])[-LEAST:] for name in ("mean", "var")
            )
            seen = ImageMoments(seen.layers, mean, var)
        self._recent = ImageMoments(seen.layers, seen.mean[-LEAST:], seen.var[-LEAST:])
        return seen

    def _target(self, seen: ImageMoments) -> str:
        """Return the name of the domain that the images belong to, a new one where none fits."""
        known = {name: d.moments for name, d in self.domains.items() if d.moments is not None}
        if self.current in known and _fits(known[self.current], seen):
            return self.current
        few = len(seen) < LEAST and self.current in self.domains
        if few:  # too few to say that the domain is another
            return self.current
        fitting = {name: moments for name, moments in known.items() if _fits(moments, seen)}
        if fitting:
            layers = common_layers(list(fitting.values()))
            away = {name: float(moments.only(layers).evidence(seen).mean()) for name, moments in fitting.items()}
            return min(away, key=lambda name: away[name])
        number = 1 + sum(name.startswith("new-") for name in self.domains)
        return f"new-{number}"

    def _go(self, name: str) -> None:
        """Leave the current domain, and go to another."""
        if self.current in self.domains:
            self.domains[self.current].learned = self.online.learned()
        domain = self.domains.setdefault(name, Domain())
        if domain.learned is not None:
            self.online.go_on_from(domain.learned)
            domain.learned = None
        elif domain.file is not None:
            self.online.reset()
            fill_start(self.model, domain.file)
        self.current = name
        self.switches.append((self.online.report.images, name))

    # What a user asks for ---------------------------------------------------------------------------------------

    def keep(self, name: str) -> None:
        """Let the model's pack know the current domain, and call the domain by a new name."""
        if self.current not in self.domains or self.domains[self.current].moments is None:
            raise OptionError(
                "the stream has seen no domain yet; needed: at least one batch with a finite image. Take a batch, and "
                "keep it then."
            )
        domain = self.domains[self.current]
        moments = domain.gathering.moments() or domain.moments
        assert moments is not None, "a domain that was met has moments"
        moments.put(self.model)
        self.model.facts["images"] = moments.images
        self.domains = {name if old == self.current else old: kept for old, kept in self.domains.items()}
        self.current = name

    def state_dict(self) -> dict[str, Any]:
        """Return what a stopped stream needs to go on: its domains, and where it is."""
        return {
            "current": self.current,
            "switches": list(self.switches),
            "domains": {
                name: {
                    "learned": domain.learned,
                    "gathered": domain.gathering.state_dict(),
                    "moments": None if domain.moments is None else domain.moments.state(),
                }
                for name, domain in self.domains.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; packs that it names and this stream was not given are known by what it holds."""
        device, files = device_of(self.model), {name: domain.file for name, domain in self.domains.items()}
        self.current, self.switches, self._recent = state["current"], list(state["switches"]), None
        self.domains = {}
        for name, kept in state["domains"].items():
            moments = None if kept["moments"] is None else DomainMoments(**kept["moments"]).to(device)
            self.domains[name] = domain = Domain(moments, kept["learned"], files.get(name))
            domain.gathering.load_state_dict(kept["gathered"])


def _fits(moments: DomainMoments, seen: ImageMoments) -> bool:
    """Return whether images are, on average, as near to a domain as its own."""
    if moments.level is None or moments.spread is None:
        return False
    away = float((moments.evidence(seen).mean() - moments.level) / moments.spread)
    return not math.isnan(away) and away <= LIMIT
