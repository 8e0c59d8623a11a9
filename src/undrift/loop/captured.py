"""A stream's gradient as one CUDA graph, so that an uncompiled step does not wait for Python.

A graph reads and writes fixed places in memory. Parameters and optimisers work in place, and the rest is seen to here:

- gradients: they are what the graph returns, in its own memory, and are put on the parameters after each replay;
- answers: the next replay writes over them, so they are copied;
- the data size of the bound: a number on the device, filled in before each replay;
- norm statistics: a replay moves them in place, and a step that is not made has to leave them as they were, so they are
  copied. A batch that runs as it is gives layers new tensors; their values are brought to where the graph knows them;
- all other tensors of the network: where one lies elsewhere than in the recording, the graph is made anew.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import CannotRecord, OptionError
from undrift._types import Answering, Deploying, Following, Keeper, Watching
from undrift.likelihood.wrap import OfLogits
from undrift.loop.cuda_graph import Captured, reason
from undrift.loop.gradient import Found, Gradient
from undrift.loop.optimise import weights_moved
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.system.private import copy_all

Place = tuple[dict[str, Tensor | None], str]  # a module's table of parameters or buffers, and a name in it
Standing = tuple[dict[str, Tensor | None], str, Tensor | None]  # and the tensor that is there
Computed = tuple[Tensor, Tensor, Tensor | None, list[Tensor | None]]


class CapturedGradient(Gradient):
    """One that is recorded at the fourth batch of one kind (shape and dtype) and replayed from then on.

    Batches of other kinds run as they are, and so do all on a CPU. A network that lies elsewhere in memory than in the
    recording, or is in another mode, has the graph made anew, after three more batches that run as they are.
    """

    def __init__(self, plain: Gradient) -> None:
        super().__init__(plain.model, plain.likelihood, plain.learnables, plain.keepers)
        self.plain = plain
        self._candidates: dict[object, Captured[Computed]] = {}  # by kind; the first with a graph stays alone
        self._recorded: _Recorded | None = None
        self._before: list[Tensor] = []
        self._copies: list[Tensor] = []

    def __call__(self, images: Tensor, size: int | Tensor, second: bool = False) -> Found:
        """Leave the gradient in the parameters and return what was found (see `Gradient`)."""
        if second or not on_gpu(images):
            return self.plain(images, size, second)
        kind = images.shape, images.dtype, images.device
        if self._recorded is not None and not self._recorded.fits():
            self.forget()
        if self._recorded is not None and kind not in self._candidates:
            return self.plain(images, size)
        if self._recorded is not None:
            self._recorded.bring_home()
        if kind not in self._candidates:
            self._candidates[kind] = Captured(_Computation(self.plain, images.device))
        captured = self._candidates[kind]
        assert isinstance(captured.step, _Computation)
        captured.step.size.fill_(size)  # by a kernel: a number that is copied from the host is waited for
        before = [] if captured.recorded else _standing(self.model)
        probs, entropy, numbers, grads = _run(captured, images)
        for parameter, grad in zip(self.learnables, grads, strict=True):
            parameter.grad = grad
        if captured.recorded and self._recorded is None:
            self._refuse_replaced(before)
            self._candidates = {kind: captured}
            self._recorded = _Recorded(self.model, self.learnables)
        if self._recorded is not None:
            self._recorded.moved()
        return probs.clone(), entropy.clone(), numbers

    def _refuse_replaced(self, before: Sequence[Standing]) -> None:
        """Raise where the forward pass gave a module another tensor: each replay would begin with the recorded one."""
        replaced = [(table, name, tensor) for table, name, tensor in before if table.get(name) is not tensor]
        if not replaced:
            return
        self.forget()
        for table, name, tensor in replaced:
            table[name] = tensor
        names = ", ".join(sorted({name for _, name, _ in replaced}))
        raise CannotRecord(
            f"the network replaces {names} in its forward pass; needed: a network that changes buffers in place, as "
            "each replay starts from the tensors of the recording. Change that, or leave captured out. This stream "
            "stands before this batch, and its state_dict() goes on there."
        )

    def keep(self) -> None:
        """Copy the statistics that a step moves."""
        self._before = _tensors(_moving(self.model)) if on_gpu(self.model.key.step) else []
        if not (len(self._before) == len(self._copies) and all(map(_alike, self._before, self._copies))):
            self._copies = [torch.empty_like(t) for t in self._before]
        _copy(self._before, self._copies)

    def put_back(self) -> None:
        """Write the copies into the tensors that the layers had then; the caller gives those back to the layers."""
        _copy(self._copies, self._before)

    def forget(self) -> None:
        """Drop the graph: it is made anew."""
        self._candidates, self._recorded = {}, None


class _Computation:
    """What is recorded. It does not hold what holds the recording: a stream that nobody has any more ends at once."""

    def __init__(self, gradient: Gradient, device: torch.device) -> None:
        self.gradient = gradient
        self.size = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, images: Tensor) -> Computed:
        for parameter in self.gradient.learnables:
            parameter.grad = None  # made by the backward pass: in a recording, in the graph's own memory
        found = self.gradient(images, self.size)
        weights_moved()  # casts that were made in a recording are the graph's own
        return *found, [parameter.grad for parameter in self.gradient.learnables]


class _Recorded:
    """What of a network a graph refers to, as it was when it was recorded."""

    def __init__(self, model: Perturbed, learnables: Sequence[nn.Parameter]) -> None:
        self.model, self.learnables = model, learnables
        self._moving = [(table, name, tensor) for table, name in _moving(model) if (tensor := table[name]) is not None]
        self._places = [(table, name) for table, name, _ in _standing(model)]
        self._parts = [(m._modules, list(m._modules.values())) for m in model.modules()]
        self._marks = self._look()
        # As long as the graph is there, nobody else gets the memory that it reads.
        self._held = [tensor.detach() for tensor in (*_tensors(self._places), *learnables)]

    def fits(self) -> bool:
        """Return whether a replay would do what the computation itself would."""
        home = all((t := table.get(name)) is mine or _alike(t, mine) for table, name, mine in self._moving)
        whole = all(list(table.values()) == parts for table, parts in self._parts)
        return home and whole and self._look() == self._marks

    def bring_home(self) -> None:
        """Give the layers the tensors back that the graph knows, with the values they have now."""
        away = [(table, name, mine) for table, name, mine in self._moving if table[name] is not mine]
        _copy(_tensors((table, name) for table, name, _ in away), [mine for _, _, mine in away])
        for table, name, mine in away:
            table[name] = mine

    def moved(self) -> None:
        """Say of the statistics that they changed, as PyTorch does of what it changes in place."""
        for _, _, tensor in self._moving:
            torch.autograd.graph.increment_version(tensor)

    def _look(self) -> list[object]:
        key = self.model.key
        kind = key.step.device.type
        modes = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), key.enabled, key.noisy
        tensors = (table.get(name) for table, name in self._places)
        return [
            *modes,
            self.model.options,
            *(policy.statistics for policy in self.model.norms),
            *(p.requires_grad for p in self.learnables),
            *(p.data_ptr() for p in self.learnables),
            *(None if t is None else t.data_ptr() for t in tensors),
        ]


def check_recordable(model: Perturbed, likelihood: object, keepers: Iterable[Keeper]) -> None:
    """Raise where the gradient of a stream with these parts cannot be recorded, and replayed, as one CUDA graph."""
    asked = likelihood.loss if isinstance(likelihood, OfLogits) else likelihood
    found = []
    if isinstance(likelihood, Answering | Deploying | Following | Watching):
        found.append(f"{likelihood!r} follows the network, or has its own answer")
    elif not _recordable(asked):
        found.append(f"{asked!r} does not say that it is recordable")
    penalties = [k for k in keepers if type(k).penalty is not Keeper.penalty and not _recordable(k)]
    found += [f"the penalty of {keeper!r} does not say that it is recordable" for keeper in penalties]
    if model.options.climb:
        found.append(f"climb={model.options.climb} makes two gradients a step")
    if len(places := {str(t.device) for t in (*model.parameters(), *model.buffers())}) > 1:
        found.append(f"the network lies on {' and '.join(sorted(places))}")
    if found:
        raise OptionError(
            f"captured=True, but {'; '.join(found)}. Needed: one gradient a step, on one device, of a likelihood and "
            "penalties that read no values back and have no shapes that depend on values, as undrift.entropy and "
            "undrift.Information() are. Leave captured out, or say `recordable = True` of what fulfils this."
        )


def on_gpu(tensor: Tensor) -> bool:
    """Return whether there can be a CUDA graph of what is done with a tensor."""
    return tensor.is_cuda


def _recordable(part: object) -> bool:
    # Not inherited: a subclass may ask in another way, and says so itself.
    return any(bool(vars(own).get("recordable")) for own in (part, type(part)) if hasattr(own, "__dict__"))


def _run(captured: Captured[Computed], images: Tensor) -> Computed:
    try:
        return captured(images)
    except CannotRecord as error:
        raise CannotRecord(
            f"the stream's gradient cannot be a CUDA graph ({reason(error.__cause__ or error)}); needed: a network and "
            "a likelihood that read no values back. Leave captured out, in a new process, as PyTorch's generator on "
            "this GPU takes itself to be still in the recording. This stream stands before this batch, and its "
            "state_dict() goes on there."
        ) from error


def _moving(model: Perturbed) -> list[Place]:
    """Return where the statistics are that move."""
    policies = [policy for policy in model.norms if policy.statistics in MOVING]
    return [(p.layer._buffers, name) for p in policies for name, t in p.layer._buffers.items() if t is not None]


def _standing(model: Perturbed) -> list[Standing]:
    """Return every tensor of the network but the statistics that move, and where it is."""
    apart = {(id(table), name) for table, name in _moving(model)}
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    return [(table, name, t) for table in tables for name, t in table.items() if (id(table), name) not in apart]


def _tensors(places: Iterable[Place]) -> list[Tensor]:
    return [tensor for table, name in places if (tensor := table[name]) is not None]


def _alike(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _copy(values: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Copy tensors to others: one launch for many, where they are of one dtype."""
    for dtype in {t.dtype for t in to}:
        pairs = [(mine, value) for mine, value in zip(to, values, strict=True) if mine.dtype is dtype]
        copy_all([mine for mine, _ in pairs], [value for _, value in pairs])
