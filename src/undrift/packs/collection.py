"""Many packs on one network: each image is answered by the pack of its domain."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, UndriftError
from undrift.answer.forward import batches_of
from undrift.options import _suggest
from undrift.packs.compatible import check_compatible, check_path, check_source
from undrift.packs.domain_file import DomainFile, inspect
from undrift.packs.evidence import DomainMoments
from undrift.packs.fingerprint import fingerprint
from undrift.packs.pack import Pack
from undrift.packs.pack_table import table
from undrift.packs.routed import Routed, RoutedSession, concatenated
from undrift.packs.router import LIMIT, SOURCE, Router
from undrift.posterior.attached import attached_to
from undrift.posterior.batch import device_of
from undrift.posterior.layers import evaluating
from undrift.posterior.model_lock import turn
from undrift.posterior.refuse import refuse_network
from undrift.system.validate import positive

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

Place = str | os.PathLike[str]


class Packs:
    """A network and its packs; made by `undrift.packs`, prints as a table.

    Attributes:
        net: the source network.
        refused: why files were left out, by path.
        unknown: how many images no pack knew; the source network answered them.
        limit: standard deviations beyond which a pack does not know an image.
        preprocess: the preprocessing of images, if known; the same for all packs.
        classes: the names of the classes, if known; the same for all packs.
        fingerprint: of the source network.
    """

    def __init__(self, net: nn.Module, preprocess: "Preprocess | None" = None, limit: float = LIMIT) -> None:
        positive(limit, "limit", "Beyond 3 standard deviations, a pack does not know an image.")
        refuse_network(net)
        self.net, self.limit, self.preprocess = net, limit, preprocess
        self.refused: dict[str, UndriftError] = {}
        self.classes: tuple[str, ...] | None = None
        self.unknown = 0
        self._packs: dict[str, Pack] = {}
        self._answered: Counter[str] = Counter()
        self.fingerprint = fingerprint(net)
        self._forced: str | None = None
        self._router: Router | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the packs, "source" first."""
        return (SOURCE, *self._packs)

    @property
    def answered(self) -> dict[str, int]:
        """How many images each pack answered."""
        return {name: self._answered[name] for name in self.names}

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all packs, beside the network."""
        return sum(pack.nbytes for pack in self._packs.values())

    def add(self, file: Place | DomainFile, name: str | None = None) -> str:
        """Add a pack, and return its name: the given one, or the one that the file says.

        Raises:
            PerturbationMismatch: the pack is of another network, preprocessing or classes than the others.
            OptionError: there is a pack of that name.
            DataError: the file is missing or damaged.
        """
        if not isinstance(file, DomainFile):
            check_path(file)
            file = inspect(file)
        found = file
        name = found.name if name is None else name
        with turn(self.net):
            check_source(self.net, found, self.fingerprint)
            check_compatible(found, name, self.names, self.preprocess, self.classes)
            self._refuse_other()
            pack = Pack(self.net, found)
            self._packs[name], self._router = pack, None
            self.preprocess, self.classes = self.preprocess or found.preprocess, self.classes or found.classes
        return name

    def remove(self, name: str) -> None:
        """Remove a pack."""
        with turn(self.net):
            if self._named(name) == self._forced or name == SOURCE:
                why = "the source network" if name == SOURCE else "in use"
                raise OptionError(
                    f"{name} is {why}, which cannot be removed; needed: another pack. There are: "
                    f"{', '.join(self.names)}."
                )
            del self._packs[name]
            self._router = None

    @contextmanager
    def using(self, name: str) -> Iterator[nn.Module]:
        """Let one pack answer every image for the length of a `with` block, and give its network.

        "source" is the source network. Inside, the network itself computes as that pack says.
        """
        with turn(self.net):
            name = self._named(name)
            self._refuse_other()
            before, self._forced = self._forced, name
            self._switch(before, off=True)
            try:
                yield self._switch(name)
            finally:
                self._switch(name, off=True)
                self._forced = before
                self._switch(before)

    @torch.no_grad()
    def predict(
        self,
        images: Tensor | Iterable[Any],
        samples: int | None = None,
        *,
        generator: torch.Generator | int | None = None,
        temperature: float = 1.0,
        batch_size: int | None = None,
        views: str | Sequence[str] | None = None,
    ) -> Routed:
        """Return the answers to images, each by the pack that knows it, or else by the source network.

        A batch costs one pass of the source network, which also gives its answers, and what `undrift.predict` costs for
        the images of each pack. Norm layers use statistics that the pack keeps, so an answer does not depend on the
        other images.

        Args:
            images: a tensor, a domain of `undrift.images`, or an iterable of batches.
            samples: draws to average. Default: each pack's own option `test_samples`.
            generator: a generator or a seed makes the noise reproducible.
            temperature: T of the softmax.
            batch_size: how many images of a tensor to look at at once.
            views: views of an image to average over. Default: each pack's own option `answer_views`.
        """
        positive(temperature, "temperature", "1 leaves the logits as they are.")
        session = RoutedSession(self, samples, generator, temperature, views)
        parts = []
        for batch in batches_of(images, batch_size):
            with turn(self.net), evaluating(self.net):
                self._refuse_other()
                part = session.answer(batch)
                self._count(part)
            parts.append(part)
        return concatenated(parts)

    def __iter__(self) -> Iterator[Pack]:
        return iter(self._packs.values())

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Packs({', '.join(self.names)})"

    def __str__(self) -> str:
        return table(self._packs, self.answered, self.unknown)

    # What a session asks for -------------------------------------------------------------------------------------

    @property
    def router(self) -> Router:
        """The router of the present packs."""
        device = device_of(self.net)
        if self._router is None or self._router.device != device:
            source = DomainMoments.of_source(self.net)
            for pack in self._packs.values():
                pack.to(device)
            self._router = Router({SOURCE: source, **{n: p.moments for n, p in self._packs.items()}}, device)
            if self._packs and not self._router.can_choose:
                without = ", ".join(self._packs)
                self._router = None
                raise DataError(
                    f"no pack holds moments of its domain ({without}); needed: packs that `adapt` of this undrift "
                    "made, of a network with norm layers. Adapt again, or name the pack: with packs.using(…)."
                )
        return self._router

    @property
    def forced(self) -> str | None:
        """The pack that `using` names."""
        return self._forced

    def _count(self, part: Routed) -> None:
        for number, count in Counter(part.choice.tolist()).items():
            self._answered[self.names[number]] += count
        self.unknown += int((~part.known).sum())

    def _switch(self, name: str | None, off: bool = False) -> nn.Module:
        """Put a pack on, or take it off; the source network needs neither."""
        if name is None or name == SOURCE:
            return self.net
        if off:
            self._packs[name].off()
            return self.net
        return self._packs[name].on()

    @contextmanager
    def on(self, name: str) -> Iterator[nn.Module]:
        """Put one pack on the network for the length of a `with` block, unless `using` did."""
        if self._forced is not None:
            yield self.net if name == SOURCE else self._packs[name].model
            return
        try:
            yield self._switch(name)
        finally:
            self._switch(name, off=True)

    def _named(self, name: str) -> str:
        if name not in self.names:
            raise OptionError(
                f"there is no pack {name!r}{_suggest(str(name), self.names)}; needed: one of {', '.join(self.names)}."
            )
        return name

    def _refuse_other(self) -> None:
        """Raise where the network is perturbed beside the packs, or its weights were changed."""
        if attached_to(self.net):
            raise UndriftError(
                "the network is perturbed by something else now; needed: the plain source network. Take it off first: "
                "undrift.remove(net)."
            )
