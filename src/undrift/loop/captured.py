"""Record a stream's gradient as one CUDA graph, so that an uncompiled step does not wait for Python.

A graph reads and writes fixed addresses. Parameters and optimisers work in place. This module handles the rest:

- Gradients are outputs of the graph, in its own memory. They are put on the parameters after each replay.
- Answers are copied, because the next replay overwrites them.
- The data size of the bound is a number on the device, written before each replay.
- Norm statistics are updated in place by a replay. They are copied before it, because a skipped step must leave them
  unchanged. A batch that is not replayed gives layers new tensors; their values are copied back to the graph's
  addresses.
- If any other tensor of the network has another address than at the recording, the graph is recorded again.

A replay calls no hook of the network, and plain attributes of modules (a counter, an eps) keep their value from the
recording.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import CannotRecord, OptionError
from undrift._types import Answering, Deploying, Following, Keeper, Watching
from undrift.likelihood.wrap import OfLogits
from undrift.loop.cuda_graph import Captured, reason
from undrift.loop.gradient import Gradient, GradientResult
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import weights_moved
from undrift.system.private import copy_all

Place = tuple[dict[str, Tensor | None], str]  # a module's table of parameters or buffers, and a name in it
Standing = tuple[dict[str, Tensor | None], str, Tensor | None]  # and the tensor that is there
Computed = tuple[GradientResult, list[Tensor | None]]


class CapturedGradient(Gradient):
    """A gradient that is recorded at the fourth batch of one kind (shape and dtype), and replayed from then on.

    Batches of other kinds are computed as usual, and so are all on a CPU. If the network has moved in memory since the
    recording, or is in another mode, the graph is recorded again, after three more batches that are computed as usual.
    """

    def __init__(self, plain: Gradient) -> None:
        super().__init__(plain.model, plain.likelihood, plain.learnables, plain.keepers, plain.answers, plain.more)
        self.plain = plain
        self._candidates: dict[object, Captured[Computed]] = {}  # by kind; the first that is recorded stays alone
        self._recorded: _Recorded | None = None
        self._before: list[Tensor] = []
        self._copies: list[Tensor] = []

    def __call__(
        self,
        images: Tensor,
        size: int | Tensor,
        places: Tensor | None = None,
        progress: float = 0.0,
        climbed: bool = False,
    ) -> GradientResult:
        """Leave the gradient on the learnables, and return answer and numbers (see `Gradient`)."""
        if places is not None or climbed or not on_gpu(images):
            return self.plain(images, size, places, progress, climbed)
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
        captured.step.size.fill_(size)  # a kernel; copying a number from the host would wait
        before = [] if captured.recorded else _standing(self.model)
        found, grads = _run(captured, images)
        for parameter, grad in zip(self.learnables, grads, strict=True):
            parameter.grad = grad
        if captured.recorded and self._recorded is None:
            self._refuse_replaced(before)
            self._candidates = {kind: captured}
            self._recorded = _Recorded(self.model, self.learnables)
        if self._recorded is not None:
            self._recorded.moved()
        # The next replay writes over the answer; the numbers are read before.
        return (
            found if found.answer is None else found._replace(answer=(found.answer[0].clone(), found.answer[1].clone()))
        )

    def _refuse_replaced(self, before: Sequence[Standing]) -> None:
        """Raise where the forward pass gave a module a new tensor: each replay would start from the recorded one."""
        replaced = [(table, name, tensor) for table, name, tensor in before if table.get(name) is not tensor]
        if not replaced:
            return
        self.forget()
        for table, name, tensor in replaced:
            table[name] = tensor
        names = ", ".join(sorted({name for _, name, _ in replaced}))
        raise CannotRecord(
            f"the network replaces {names} in its forward pass; needed: a network that changes buffers in place, "
            "because each replay starts from the tensors of the recording. Change that, or leave captured out. This "
            "stream stands before this batch; its state_dict() resumes there."
        )

    def keep(self) -> None:
        """Copy the statistics that a step moves."""
        self._before = _tensors(_moving(self.model)) if on_gpu(self.model.key.step) else []
        if not (len(self._before) == len(self._copies) and all(map(_alike, self._before, self._copies))):
            self._copies = [torch.empty_like(t) for t in self._before]
        _copy(self._before, self._copies)

    def put_back(self) -> None:
        """Write the copies into the tensors that the layers had; the step's mark gives layers those tensors back."""
        _copy(self._copies, self._before)

    def forget(self) -> None:
        """Drop the graph; it is recorded again."""
        self._candidates, self._recorded = {}, None


class _Computation:
    """What is recorded. It holds no reference to its recording, so that a dropped stream is freed at once."""

    def __init__(self, gradient: Gradient, device: torch.device) -> None:
        self.gradient = gradient
        self.size = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, images: Tensor) -> Computed:
        # The gradient drops old ones first: in a recording the backward pass makes new ones in the graph's own memory.
        found = self.gradient(images, self.size)
        weights_moved()  # casts that were made in a recording are the graph's own
        return found, [parameter.grad for parameter in self.gradient.learnables]


class _Recorded:
    """What a graph refers to in a network, as it was at the recording."""

    def __init__(self, model: Perturbed, learnables: Sequence[nn.Parameter]) -> None:
        self.model, self.learnables = model, learnables
        self._moving = [(table, name, tensor) for table, name in _moving(model) if (tensor := table[name]) is not None]
        self._places = [(table, name) for table, name, _ in _standing(model)]
        self._parts = [(m._modules, list(m._modules.values())) for m in model.modules()]
        self._marks = self._look()
        # Holding the tensors keeps the memory that the graph reads from being given to others.
        self._held = [tensor.detach() for tensor in (*_tensors(self._places), *learnables)]

    def fits(self) -> bool:
        """Return whether a replay would compute what the function itself would."""
        home = all((t := table.get(name)) is mine or _alike(t, mine) for table, name, mine in self._moving)
        whole = all(list(table.values()) == parts for table, parts in self._parts)
        return home and whole and self._look() == self._marks

    def bring_home(self) -> None:
        """Give layers back the tensors that the graph knows, with the values of those they have now."""
        away = [(table, name, mine) for table, name, mine in self._moving if table[name] is not mine]
        _copy(_tensors((table, name) for table, name, _ in away), [mine for _, _, mine in away])
        for table, name, mine in away:
            table[name] = mine

    def moved(self) -> None:
        """Count the change of the statistics, as PyTorch does for what it changes in place."""
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
    """Raise if the gradient of a stream with these parts cannot be recorded as one CUDA graph."""
    asked = likelihood.loss if isinstance(likelihood, OfLogits) else likelihood
    found = []
    if isinstance(likelihood, Answering | Deploying | Following | Watching):
        found.append(f"{likelihood!r} follows the network, or gives its own answer")
    elif not _recordable(asked):
        found.append(f"{asked!r} does not say that it is recordable")
    penalties = [k for k in keepers if type(k).penalty is not Keeper.penalty and not _recordable(k)]
    found += [f"the penalty of {keeper!r} does not say that it is recordable" for keeper in penalties]
    if model.options.answer_views:
        found.append(f"answer_views={model.options.answer_views} asks for more passes")
    if model.options.climb:
        found.append(f"climb={model.options.climb} makes two gradients a step")
    if len(places := {str(t.device) for t in (*model.parameters(), *model.buffers())}) > 1:
        found.append(f"the network lies on {' and '.join(sorted(places))}")
    if found:
        raise OptionError(
            f"captured=True, but {'; '.join(found)}. Needed: one gradient per step, on one device, of a likelihood and "
            "penalties that read no values back and have no shapes that depend on values, as undrift.entropy and "
            "undrift.Information() are. Leave captured out, or say `recordable = True` of what fulfils this."
        )


def on_gpu(tensor: Tensor) -> bool:
    """Return whether what is computed from a tensor can be a CUDA graph."""
    return tensor.is_cuda


def _recordable(part: object) -> bool:
    # Not inherited: a subclass may compute something else, and has to say so itself.
    return any(bool(vars(own).get("recordable")) for own in (part, type(part)) if hasattr(own, "__dict__"))


def _run(captured: Captured[Computed], images: Tensor) -> Computed:
    try:
        return captured(images)
    except CannotRecord as error:
        raise CannotRecord(
            f"the stream's gradient cannot be a CUDA graph ({reason(error.__cause__ or error)}); needed: a network and "
            "a likelihood that read no values back. Leave captured out, in a new process: PyTorch's generator on this "
            "GPU still believes that it is in a recording. This stream stands before this batch; its state_dict() "
            "resumes there."
        ) from error


def _moving(model: Perturbed) -> list[Place]:
    """Return where the moving statistics are."""
    policies = [policy for policy in model.norms if policy.statistics in MOVING]
    return [(p.layer._buffers, name) for p in policies for name, t in p.layer._buffers.items() if t is not None]


def _standing(model: Perturbed) -> list[Standing]:
    """Return every tensor of the network except moving statistics, and where it is."""
    apart = {(id(table), name) for table, name in _moving(model)}
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    return [(table, name, t) for table in tables for name, t in table.items() if (id(table), name) not in apart]


def _tensors(places: Iterable[Place]) -> list[Tensor]:
    return [tensor for table, name in places if (tensor := table[name]) is not None]


def _alike(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _copy(values: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Copy tensors to others: one launch for all of one dtype."""
    for dtype in {t.dtype for t in to}:
        pairs = [(mine, value) for mine, value in zip(to, values, strict=True) if mine.dtype is dtype]
        copy_all([mine for mine, _ in pairs], [value for _, value in pairs])
