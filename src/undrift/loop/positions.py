"""Find out from its first answer whether a network answers whole images, or each pixel or label."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from undrift.answer.forward import forward
from undrift.images import FileDomain, TensorDomain
from undrift.options import Outputs
from undrift.posterior.attached import root_of
from undrift.posterior.batch import as_tensor, device_of, images_of, to_device
from undrift.posterior.layers import evaluating
from undrift.system.randomness import Randomness

FEW = 2  # a norm layer without kept statistics cannot normalise a single image


@torch.no_grad()
def answers_positions(net: object, unlabelled: Any, outputs: Outputs = "softmax") -> bool:
    """Return whether a plain network answers each pixel or label, by a pass over the first images.

    Nothing moves: neither the order of later passes nor the network. What is wrong with images or network is not said
    here; the run meets it again, and says where.
    """
    if outputs == "sigmoid" or not isinstance(net, nn.Module):
        return outputs == "sigmoid"
    if any(isinstance(p, nn.UninitializedParameter) for p in net.parameters()):
        return False  # a pass would give them a size
    loaders = (getattr(unlabelled, "generator", None), getattr(getattr(unlabelled, "sampler", None), "generator", None))
    known = [each for each in loaders if isinstance(each, torch.Generator)]
    inner = root_of(net)  # a compiled network would be compiled again, for a batch of this size
    with Randomness(device_of(net), known).kept(), evaluating(net), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            images = _first(unlabelled)
            return images is not None and forward(inner, to_device(images, net).clone()).ndim > 2
        except Exception:
            return False


def _first(unlabelled: Any) -> Tensor | None:
    """Return the first images, few where batches are made here; None where there are none to look at."""
    unlabelled = as_tensor(unlabelled)
    if isinstance(unlabelled, Tensor):
        return images_of(unlabelled)[:FEW]
    if isinstance(unlabelled, FileDomain | TensorDomain):
        unlabelled = unlabelled.select(range(min(FEW, len(unlabelled)))).named_batches(FEW)
    elif isinstance(unlabelled, Dataset) and not isinstance(unlabelled, IterableDataset):
        unlabelled = DataLoader(unlabelled, FEW)
    elif _of_a_data_set(unlabelled):  # its workers need not start for this
        size = None if unlabelled.batch_sampler is None else FEW
        unlabelled = DataLoader(unlabelled.dataset, size, collate_fn=unlabelled.collate_fn)
    elif isinstance(unlabelled, str | Mapping | Iterator) or not isinstance(unlabelled, Iterable):
        return None
    item = next(iter(unlabelled), None)
    return None if item is None else images_of(item)


def _of_a_data_set(loader: Any) -> bool:
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and not isinstance(loader.dataset, IterableDataset)
