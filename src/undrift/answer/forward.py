"""Run a batch through any network, check its logits, and filter out images that are not finite."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

from undrift._errors import DataError, OptionError, OutputError, UndriftError
from undrift.images import FileDomain, TensorDomain
from undrift.options import Outputs
from undrift.posterior.attached import attached_to, root_of
from undrift.posterior.batch import as_tensor, images_of, to_device
from undrift.posterior.input_errors import refuse_unbatched, refuse_unfitting
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import at_size_of
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise
from undrift.system.validate import a_type, count_or_none, instead_of

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def forward(
    model: nn.Module, images: Tensor, given: Tensor | None = None, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the network's logits, one row per image; those of pixels at the images' size.

    Args:
        given: the caller's images, if this pass repeats them for several draws.
        weights: other values for some of the model's parameters, by name, for this pass.
    """
    kind = outputs_of(model)
    try:
        output = model(images) if weights is None else functional_call(model, dict(weights), (images,))
        logits = at_size_of(images, logits_of(output, kind))
    except BaseException as error:
        # After an error or Ctrl-C inside a norm layer, restore its flags before eval mode ends.
        if isinstance(model, Perturbed):
            model.settle()
        if isinstance(error, Exception):
            refuse_unbatched(model, images if given is None else given, error)
            refuse_unfitting(model, images, error)
        raise
    if len(logits) != len(images):
        refuse_unbatched(model, images if given is None else given)
        raise OutputError(
            f"the network returned {len(logits)} rows of logits for {len(images)} images; needed: one row per image. "
            "Wrap the network so that it returns that."
        )
    names = model.classes if isinstance(model, Perturbed) else None
    outputs = logits.shape[2 if logits.ndim == 3 else 1]  # of several labels, the classes are no and yes
    if names is not None and len(names) != outputs:
        raise OutputError(
            f"the model has {len(names)} class names, its network {outputs} outputs; needed: one name per "
            "output. Give perturb(classes=…) the names in the order of the outputs."
        )
    return model.key.whole(logits) if isinstance(model, Perturbed) else logits


def outputs_of(model: nn.Module) -> Outputs:
    """Return what the network's outputs are: the option of a perturbed one."""
    return model.options.outputs if isinstance(model, Perturbed) else "softmax"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the perturbed network inside a compiled or parallel one; any other network as it is.

    Taken for a plain network, a wrapper would answer with one noisy draw and move the statistics.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"model is {a_type(model)}; needed: a torch.nn.Module. "
            f"{instead_of(model, 'Give the network, or a perturbed one.')}"
        )
    inner = root_of(model)
    while isinstance(inner, _WRAPPERS):
        inner = root_of(inner.module)
    if isinstance(inner, Perturbed):
        return inner
    if any(attached.key.enabled for attached in attached_to(model)):
        raise UndriftError(
            f"this {type(model).__name__} contains a perturbed network, or is inside one; needed: what undrift.perturb "
            "returned. Give that; for the source's own answers use `with model.off() as net`."
        )
    return model


def finite_rows(images: Tensor) -> Tensor:
    """Return for each image whether all its values are finite."""
    # NaN propagates through max and is not below anything. This needs half the launches of isfinite, and no copy of
    # channels-last images.
    return images.detach().abs().amax(dim=tuple(range(1, images.ndim))) < torch.inf


def finite_images(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the finite images on the network's device, and a mask of all images (None if all are finite)."""
    images = to_device(images, model)
    if len(images) == 0 or float(images.abs().amax()) < float("inf"):
        return images, None
    finite = finite_rows(images)
    return images[finite], finite


def finite_batches(model: nn.Module, images: Tensor | Iterable[Any], batch_size: int | None = None) -> Iterator[Tensor]:
    """Yield the finite images of each batch, on the network's device; skip a batch without any."""
    for batch in batches_of(images, batch_size):
        finite, _ = finite_images(model, batch)
        if len(finite):
            yield finite


@torch.no_grad()
def blank_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits of blank images, for the number of classes if no image is finite."""
    blank = images.new_zeros(2, *images.shape[1:])
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if isinstance(model, Perturbed):
            stack.enter_context(keeping_noise(model.key))
            stack.enter_context(model.mean())
        return forward(model, blank)


def batches_of(images: Tensor | Dataset[Any] | Iterable[Any], batch_size: int | None) -> Iterator[Tensor]:
    """Yield the batches of a tensor, a domain, a data set or a loader."""
    images = as_tensor(images)
    batch_size = count_or_none(batch_size, "batch_size", "Leave it out to look at all images at once.")
    if isinstance(images, FileDomain | TensorDomain):
        images, batch_size = images.named_batches(batch_size or 100), None
    if isinstance(images, Tensor | Mapping):
        whole = images_of(images)
        if batch_size is None or batch_size >= len(whole):
            yield whole
        else:
            yield from whole.split(batch_size)
        return
    if isinstance(images, Dataset) and not isinstance(images, Iterable):
        images, batch_size = DataLoader(images, batch_size or 100), None
    if batch_size is not None:
        raise OptionError("batch_size is for a tensor of images; a loader has its own. Leave it out.")
    if isinstance(images, str) or not isinstance(images, Iterable):
        raise DataError(
            f"images is {a_type(images)}; a tensor, a Dataset or an iterable of batches is needed. "
            "For a folder use undrift.images.domain."
        )
    for item in images:
        yield images_of(item)
