"""One pack on a shared network: a perturbation that can be switched on and off in a millisecond."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.packs.domain_file import DomainFile
from undrift.packs.evidence import KEPT_STATISTICS, DomainMoments
from undrift.packs.file import adapted_by
from undrift.packs.shift import Shift
from undrift.packs.state import domain_state
from undrift.packs.vectors import VectorShift
from undrift.posterior.attached import Trained
from undrift.posterior.batch import device_of
from undrift.posterior.perturbed import Perturbed
from undrift.system.interrupts import uninterrupted


class Pack:
    """A domain file's perturbation of a network that it shares with others; only one is on at a time.

    Norm state and exact weights change places with the source's. A compressed shift stays compressed, and is added to
    the source's weight each time the pack goes on.

    Attributes:
        file: what was read, without the tensors.
        model: the perturbed network, parked.
        moments: of the domain, by which images find this pack; None in a pack that holds none.
        answered: how many images it answered.
    """

    def __init__(self, net: nn.Module, file: DomainFile) -> None:
        self.path, self.size, self.facts, self.options = file.path, file.size, dict(file.facts), file.options
        self.moments = DomainMoments.read(file.router, file.facts)
        self.answered = 0
        self.model = adapted_by(net, file)
        try:
            _answer_one_by_one(self.model, file)
            self.model.eval()
            self._shifts = _by_module(self.model, file.shifts)
        finally:
            self.model._attached.park()
        self._put_away()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes while it is off."""
        held = sum(tensor.nbytes for tensor in domain_state(self.model).values())
        return held + sum(shift.nbytes for _, _, shift in self._shifts)

    def on(self) -> Perturbed:
        """Put the pack on the network."""
        device = device_of(self.model.net)
        if self.model.key.seed.device != device:  # the network was moved; what is parked follows
            self.model.to(device)
        with uninterrupted():
            for held, name, shift in self._shifts:
                source, adapted = held.tensors()[name], held.away[name]
                assert isinstance(source, Tensor), "a shift is of a weight that is there"
                assert isinstance(adapted, Tensor), "which has an adapted copy"
                adapted.data = shift.to(source.device).added_to(source.detach())
            self.model._attached.enter()
        return self.model

    def off(self) -> None:
        """Take the pack off, and free its decompressed weights."""
        with uninterrupted():
            self.model._attached.exit()
            self._put_away()

    def to(self, device: torch.device) -> None:
        """Move what is compared and decompressed to a device."""
        self.moments = None if self.moments is None else self.moments.to(device)
        self._shifts = [(held, name, shift.to(device)) for held, name, shift in self._shifts]

    def _put_away(self) -> None:
        for held, name, _ in self._shifts:
            adapted = held.away[name]
            assert adapted is not None, "a shift is of a weight that is there"
            adapted.data = adapted.data.new_empty(0)


def _by_module(model: Perturbed, shifts: Mapping[str, Shift]) -> list[tuple[Trained, str, Shift]]:
    """Return each shift with the module and the name of its weight; tied weights share one."""
    by_name = {
        f"{held.name}.{name}" if held.name else name: (held, name, tensor)
        for held in model.trained
        for name, tensor in held.tensors().items()
        if tensor is not None
    }
    seen: set[int] = set()
    found = []
    for full, shift in shifts.items():
        if isinstance(shift, VectorShift):  # added already; it takes no more room so
            continue
        held, name, tensor = by_name[full]
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found.append((held, name, shift.to(device_of(model))))
    return found


def _answer_one_by_one(model: Perturbed, file: DomainFile) -> None:
    """Let norm layers answer by the domain's kept statistics, as a routed image is alone."""
    by_batch = [policy for policy in model.norms if policy.statistics == "batch"]
    if by_batch and not file.facts.get(KEPT_STATISTICS):
        model.remove()
        raise OptionError(
            f'{file.path.name} was learned with norm_statistics="batch" and holds no statistics of its domain; needed: '
            "kept ones, because a routed image is answered without others of its domain beside it. Adapt again with "
            'this undrift, which keeps them, or with norm_statistics="train" or "domain".'
        )
    for policy in by_batch:
        policy.statistics, policy.by_batch = "moving", False
