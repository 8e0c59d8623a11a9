"""Extra modules that a method puts behind layers: `remove()` removes them, and the domain file stores them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from undrift.posterior.batch import device_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name

_KINDS: "dict[str, type[ExtraModule]]" = {}


class ExtraModule(nn.Module):
    """A module behind the output of one of the network's own.

    A subclass that names its `kind` is found again by `undrift.load`: its parameters are saved as
    `PLACE.KIND.PARAMETER`, where PLACE is the module that it stands behind.

    Attributes:
        kind: its name in a perturbation and in a domain file.
        no_export: why `undrift.export` refuses a network that has it, and what to do.
        place: name of the module that it stands behind, once it is part of a perturbation.
    """

    kind: ClassVar[str]
    no_export: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _KINDS[cls.kind] = cls

    @classmethod
    def sized_as(cls, tensors: Mapping[str, Tensor]) -> "ExtraModule | None":
        """Return a fresh module whose parameters have the shapes of these, or None where none can."""
        raise NotImplementedError

    def behind(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Return what becomes of a module's output: a forward hook."""
        changed: Tensor = self(output)
        return changed

    def behind_with_kwargs(self, module: nn.Module, args: Any, _kwargs: Any, output: Tensor) -> Tensor:
        """Return the same, as a hook of a perturbation."""
        return self.behind(module, args, output)


def add_extra(model: Perturbed, place: str, module: ExtraModule) -> None:
    """Put a module behind one of the network's, as part of the perturbation; its weights are frozen."""
    behind = {plain_name(name): m for name, m in model.net.named_modules()}[place]
    module.place = place
    with model.off():  # hooks go on again, with one more, at the end
        model.add_module(module.kind, module.to(device_of(model)).requires_grad_(False))
        model.add_hook(behind, module.behind_with_kwargs)


def extra_modules(model: Perturbed) -> list[ExtraModule]:
    """Return the modules that the perturbation added; the network's own do not count."""
    return [module for module in model._modules.values() if isinstance(module, ExtraModule)]


def extra_state(model: Perturbed) -> dict[str, Tensor]:
    """Return the tensors of the extra modules, by their names in a domain file."""
    return {
        f"{module.place}.{module.kind}.{name}": parameter
        for module in extra_modules(model)
        for name, parameter in module.named_parameters()
    }


def add_saved_extra(model: Perturbed, tensors: Mapping[str, Tensor]) -> None:
    """Add the extra modules whose tensors a domain file holds."""
    places = {plain_name(name) for name, _ in model.net.named_modules()}
    found: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        for kind in _KINDS:
            place, between, own = name.rpartition(f".{kind}.")
            if between and place in places:
                found.setdefault((kind, place), {})[own] = tensor
    for (kind, place), theirs in found.items():
        if (module := _KINDS[kind].sized_as(theirs)) is not None:
            add_extra(model, place, module)
