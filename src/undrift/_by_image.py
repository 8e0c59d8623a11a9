"""What each layer of a network gives for each image: one vector, whatever the network does to the batch in between."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift import layers as known_layers
from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.select import one_of, plain_name


def chosen_layers(net: nn.Module, layers: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return submodules by their names; None takes every convolution, linear and attention layer."""
    modules = {plain_name(name): module for name, module in net.named_modules() if plain_name(name)}
    if layers is None:
        # Attention uses the weights of its projection without calling it.
        inner = {id(part) for module in modules.values() if _attends(module) for part in module.children()}
        known = {name: module for name, module in modules.items() if known_layers.kind(module) is not None}
        found = {name: module for name, module in known.items() if id(module) not in inner}
        if not found:
            raise OptionError(
                f"{type(net).__name__} has no convolution, linear or attention layer to look at; needed: at least one. "
                "Name submodules: layers=…"
            )
        return found
    for name in layers:
        if name not in modules:
            raise OptionError(
                f"layers names {name!r}, which is no submodule{_suggest(name, modules)}; needed: names as "
                f"named_modules() gives them. {one_of(modules)}"
            )
    return {name: modules[name] for name in layers}


@torch.no_grad()
def activations(net: nn.Module, chosen: dict[str, nn.Module], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return each layer's output for all images, averaged over positions: images × channels."""
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}
    calls: dict[str, list[Tensor]] = {name: [] for name in chosen}
    with _watching(chosen, calls):
        for batch in batches:
            net(batch)
            for name, outputs in calls.items():
                seen[name].append(_by_image(name, outputs, len(batch)))
                outputs.clear()
    return {name: torch.cat(parts) if parts else torch.zeros(0, 1) for name, parts in seen.items()}


@contextmanager
def _watching(chosen: dict[str, nn.Module], calls: dict[str, list[Tensor]]) -> Iterator[None]:
    handles = []
    for name, module in chosen.items():

        def keep(module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            calls[name].append(_pooled(module, output[0] if isinstance(output, tuple) else output))

        handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pooled(module: nn.Module, output: Tensor) -> Tensor:
    """Return one vector a row: convolutions have their channels second, linear layers and attention last."""
    kind = known_layers.kind(module)
    if _attends(module) and output.ndim == 3 and not module.batch_first:
        output = output.transpose(0, 1)
    pictures = kind in ("conv", "conv_transpose") or (kind is None and output.ndim == 4)
    where = tuple(range(2, output.ndim) if pictures else range(1, output.ndim - 1))
    return (output.float().mean(where) if where else output.float()).detach()


def _by_image(name: str, calls: list[Tensor], images: int) -> Tensor:
    """Return one vector an image from what a layer gave in one pass, whose rows may be parts of images.

    Parts of one image are alike: were each a row, those held out would be known from those that were fitted.
    """
    if not calls:
        raise OptionError(
            f"the network did not call {name!r} in a pass of {images} images; needed: an output for every image. Name "
            "layers that every pass calls."
        )
    uneven = [len(rows) for rows in calls if len(rows) == 0 or len(rows) % images]
    if uneven:
        raise OptionError(
            f"{name!r} gave {uneven[0]} rows for {images} images; needed: as many for each image, in the first "
            "dimension. Name layers before or after it: layers=…"
        )
    if len(widths := {rows.shape[1] for rows in calls}) > 1:
        raise OptionError(
            f"{name!r} was called {len(calls)} times in one pass and gave {sorted(widths)} channels; needed: the same "
            "in every call, to be averaged. Name the layers around it: layers=…"
        )
    # Images are outermost where a network cuts them up: batch × windows becomes the first dimension.
    return torch.stack([rows.unflatten(0, (images, -1)).mean(1) for rows in calls]).mean(0)


def _attends(module: nn.Module) -> bool:
    return known_layers.kind(module) == "attention"
