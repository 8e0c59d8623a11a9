"""Collect one vector per layer and image, even if the network reshapes the batch in between."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.posterior import layers as known_layers
from undrift.posterior.select import one_of, plain_name


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
def activations(
    net: nn.Module, chosen: dict[str, nn.Module], batches: Iterable[Tensor], *, named: bool
) -> dict[str, Tensor]:
    """Return each layer's output for all images, averaged over positions: images × channels.

    A layer that a pass does not call, or that sees something else than the batch (a table of positions), has no output
    per image. It is left out, or refused if the user has named it.
    """
    seen: dict[str, list[Tensor]] = {name: [] for name in chosen}
    calls: dict[str, list[Tensor]] = {name: [] for name in chosen}
    with _watching(net, chosen, calls):
        for batch in batches:
            net(batch)
            for name, outputs in list(calls.items()):
                if (why_not := _refusal(name, outputs, len(batch))) is None:
                    seen[name].append(_by_image(outputs, len(batch)))
                    outputs.clear()
                elif named:
                    raise OptionError(why_not)
                else:
                    del calls[name], seen[name]
    return {name: torch.cat(parts) if parts else torch.zeros(0, 1) for name, parts in seen.items()}


@contextmanager
def _watching(net: nn.Module, chosen: dict[str, nn.Module], calls: dict[str, list[Tensor]]) -> Iterator[None]:
    """Record the outputs of the chosen layers, as long as `calls` has a list for them."""
    handles = []
    beside = _attentions_beside(net)
    for name, module in chosen.items():

        def keep(module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            if name in calls:
                tokens_first = any(not attention.batch_first for attention in beside.get(module, ()))
                calls[name].append(_pooled(module, output[0] if isinstance(output, tuple) else output, tokens_first))

        handles.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attentions_beside(net: nn.Module) -> dict[nn.Module, list[nn.MultiheadAttention]]:
    """Return the attentions whose tokens a layer sees: itself, or those beside a linear layer in the same parent.

    A linear layer does not say which dimension holds the images; in PyTorch's encoder and decoder layers the attention
    beside it does.
    """
    found: dict[nn.Module, list[nn.MultiheadAttention]] = {}
    for parent in net.modules():
        attentions = [child for child in parent.children() if isinstance(child, nn.MultiheadAttention)]
        for child in parent.children() if attentions else ():
            if known_layers.kind(child) == "linear":
                found.setdefault(child, []).extend(attentions)
        if isinstance(parent, nn.MultiheadAttention):
            found[parent] = [parent]
    return found


def _pooled(module: nn.Module, output: Tensor, tokens_first: bool) -> Tensor:
    """Return one vector per row: convolutions have channels second, linear layers and attention last."""
    kind = known_layers.kind(module)
    if tokens_first and output.ndim == 3:
        output = output.transpose(0, 1)
    pictures = kind in ("conv", "conv_transpose") or (kind is None and output.ndim == 4)
    where = tuple(range(2, output.ndim) if pictures else range(1, output.ndim - 1))
    return (output.float().mean(where) if where else output.float()).detach()


def _refusal(name: str, calls: list[Tensor], images: int) -> str | None:
    """Return why a layer's output in one pass is not per image, or None if it is."""
    if not calls:
        return (
            f"the network did not call {name!r} in a pass of {images} images; needed: an output for every image. Name "
            "layers that every pass calls."
        )
    if any(rows.ndim < 2 for rows in calls):
        return (
            f"{name!r} gave a single vector or number for {images} images; needed: rows of channels, as many for each "
            "image. Name layers before or after it: layers=…"
        )
    uneven = [len(rows) for rows in calls if len(rows) == 0 or len(rows) % images]
    if uneven:
        return (
            f"{name!r} gave {uneven[0]} rows for {images} images; needed: as many for each image, in the first "
            "dimension. Name layers before or after it: layers=…"
        )
    if len(widths := {rows.shape[1] for rows in calls}) > 1:
        return (
            f"{name!r} was called {len(calls)} times in one pass and gave {sorted(widths)} channels; needed: the same "
            "in every call, to be averaged. Name the layers around it: layers=…"
        )
    return None


def _by_image(calls: list[Tensor], images: int) -> Tensor:
    """Return one vector per image from a layer's output in one pass, whose rows may be parts of images.

    Parts of one image are alike. As rows of their own they would leak from the fitted half into the held-out half.
    """
    # A network that cuts images up keeps them outermost: the first dimension is batch × windows.
    return torch.stack([rows.unflatten(0, (images, -1)).mean(1) for rows in calls]).mean(0)


def _attends(module: nn.Module) -> bool:
    return known_layers.kind(module) == "attention"
