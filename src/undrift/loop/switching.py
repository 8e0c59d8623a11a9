"""Detect that a stream returned to a known domain, and restore what it had learned there.

Before each batch, one pass of the source network compares the batch with the moments of every known domain, from packs
or from earlier in this stream. If the batch no longer fits the current domain, the stream switches to the fitting one
that the router chooses. If none fits, a new domain begins, and learning continues from the current weights. A batch
that was taken while the domain changed fits none, so a new domain needs a second batch that fits none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.answer.forward import finite_rows, forward
from undrift.loop.online import OnlineSteps
from undrift.packs.domain_file import DomainFile
from undrift.packs.evidence import DomainMoments, Gathering
from undrift.packs.moments import ImageMoments, watching
from undrift.packs.router import SOURCE, Router
from undrift.packs.state import check_fill_start, fill_start
from undrift.posterior.attached import root_of
from undrift.posterior.batch import device_of
from undrift.posterior.layers import evaluating

LIMIT = 0.25
"""Standard deviations of single images that the mean of a batch may be away from a domain, besides chance."""

CHANCE = 2.0
"""Standard errors of that mean, and of the mean of the domain's own images, that come on top."""

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

    def saw(self, seen: ImageMoments) -> None:
        """Take in more images of the domain; a pack's moments stay."""
        self.gathering.add(seen)
        if self.file is None:
            self.moments = self.gathering.moments()

    def whole(self) -> DomainMoments | None:
        """Return the moments with what a router asks beside them."""
        return self.gathering.moments(whole=True) if self.file is None else self.moments


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
        self._window: ImageMoments | None = None  # the last images
        self._in_doubt = True  # whether it is open which domain they are of
        self._unknown = False  # whether images before them fitted none
        device = device_of(self.model)
        for file in files:
            check_fill_start(self.model, file)
            moments = DomainMoments.read(file.router, file.facts)
            self.domains[file.name] = Domain(None if moments is None else moments.to(device), None, file)

    def __call__(self, images: Tensor) -> bool:
        """Look at a batch before it is answered; return whether the network went to another domain."""
        images = images[finite_rows(images)]
        seen = self._look(images) if len(images) else None
        if seen is None:
            return False
        window = self._window = _joined(self._window, seen)
        if not self._in_doubt:
            if _fits(self.domains[self.current].moments, window):
                self.domains[self.current].saw(seen)
                return False
            # Of a window the oldest images may still be of the last domain, and only the newest of another.
            self._in_doubt, window = True, seen
            self._window = seen
            # As it stands: steps made in doubt may be on images of another domain.
            self.domains[self.current].learned = self.online.learned()
        if len(window) < LEAST:
            return False
        target = self._target(window)
        if target is None and not self._unknown and self.current in self.domains:
            self._unknown, self._window = True, None
            return False
        target, self._in_doubt, self._unknown = target or self._new(), False, False
        switched = target != self.current
        if switched:
            self._go(target)
        else:
            self.domains[target].learned = None  # it goes on
        self.domains[target].saw(window)
        return switched

    @torch.no_grad()
    def _look(self, images: Tensor) -> ImageMoments | None:
        """Return the moments of a batch under the source network."""
        with self.model.off() as net, evaluating(net), watching(root_of(net)) as watch:
            forward(root_of(net), images)
            return watch.moments()

    def _target(self, window: ImageMoments) -> str | None:
        """Return the name of the known domain that the images belong to; None where none fits."""
        fitting = {name: domain for name, domain in self.domains.items() if _fits(domain.moments, window)}
        if len(fitting) < 2:
            return next(iter(fitting), None)
        whole = {name: domain.whole() for name, domain in fitting.items()}
        return Router({SOURCE: None, **whole}, window.mean.device).pack_of_all(window)

    def _new(self) -> str:
        return next(name for number in count(1) if (name := f"new-{number}") not in self.domains)

    def _go(self, name: str) -> None:
        """Go to another domain."""
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
        if name != self.current and name in (SOURCE, *self.domains):
            raise OptionError(
                f"there is another domain {name!r} in this stream; needed: a name of its own. Give one: "
                f'stream.keep(path, name="{name}-2").'
            )
        domain = self.domains[self.current]
        with self.model.off() as net:
            source = DomainMoments.of_source(root_of(net))
        moments = domain.gathering.moments(whole=True, source=source) or domain.moments
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
            "in doubt": self._in_doubt,
            "unknown": self._unknown,
            "window": (w := self._window) and (dict(w.layers), w.mean, w.var),
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
        self.current, self.switches = state["current"], list(state["switches"])
        self._in_doubt, self._unknown, window = state["in doubt"], state.get("unknown", False), state["window"]
        self._window = None if window is None else ImageMoments(window[0], window[1].to(device), window[2].to(device))
        self.domains = {}
        for name, kept in state["domains"].items():
            moments = None if kept["moments"] is None else DomainMoments.of_state(kept["moments"]).to(device)
            self.domains[name] = domain = Domain(moments, kept["learned"], files.get(name))
            domain.gathering.load_state_dict(kept["gathered"])


def _joined(window: ImageMoments | None, seen: ImageMoments) -> ImageMoments:
    """Return the last images, a batch among them."""
    if window is None or len(seen) >= LEAST or dict(window.layers) != dict(seen.layers):
        return seen
    mean, var = (torch.cat([getattr(window, name), getattr(seen, name)])[-LEAST:] for name in ("mean", "var"))
    return ImageMoments(seen.layers, mean, var)


def _fits(moments: DomainMoments | None, seen: ImageMoments) -> bool:
    """Return whether images are, on average, as near to a domain as its own."""
    if moments is None or moments.level is None or moments.spread is None:
        return False
    away = float((moments.evidence(seen).mean() - moments.level) / moments.spread)
    allowed = LIMIT + CHANCE * math.sqrt(1 / len(seen) + 1 / min(moments.images, Gathering.MOST))
    return not math.isnan(away) and away <= allowed
