"""Warn if a domain's preprocessing differs from its network's; no other error would show it."""

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from undrift.images import FileDomain, TensorDomain
from undrift.images.batches import Batches, FileFetch
from undrift.images.preprocess import Preprocess
from undrift.images.sources import UNREADABLE
from undrift.posterior.perturbed import Perturbed
from undrift.system.warning import warn

CLOSE = 0.002
"""Means and deviations this near are the same, rounded: half a grey level of 255."""

_known: "WeakKeyDictionary[nn.Module, set[tuple[str, ...]]]" = WeakKeyDictionary()  # compared before


def warn_of_preprocess(model: nn.Module, *given: Any) -> None:
    """Warn once if a domain, or its batches, are prepared differently from what the model's network expects.

    Args:
        given: what the caller was given as images; only domains and their batches say how they are prepared.
    """
    if not isinstance(model, Perturbed) or model.preprocess is None:
        return
    for domain in map(_domain_of, given):
        known = _known.setdefault(model, set())
        pair = () if domain is None else (domain.name, repr(domain.preprocess), repr(model.preprocess))
        if domain is None or pair in known:
            continue
        known.add(pair)
        if lines := "; ".join(unlike(model.preprocess, domain)):
            warn(
                f"{domain.name} has other preprocessing than model.preprocess, which this network expects ({lines}; "
                "the model's first). Answers may be wrong without any error: give domain.prepared(model.preprocess), "
                "or set model.preprocess if the domain's is right."
            )


def unlike(expected: Preprocess, domain: FileDomain | TensorDomain) -> list[str]:
    """Return a line for each part of the preprocessing that gives a network other images than it expects.

    Images that were resized before count as right: a TensorDomain of the expected size, and files (ImageNet-C's) that
    are cropped alike and not resized.
    """
    own = domain.preprocess
    if isinstance(domain, TensorDomain) and domain.images.is_floating_point() and _normalised(domain.images[:16]):
        return []  # all of it was done before
    lines = [
        f"{name}: {mine} against {theirs}"
        for name, mine, theirs in (("mean", expected.mean, own.mean), ("std", expected.std, own.std))
        if len(mine) != len(theirs) or max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) > CLOSE
    ]
    resizing = own.resize is not None or expected.resize is not None
    geometry = [
        f"{name}: {getattr(expected, name)} against {getattr(own, name)}"
        for name in ("resize", "crop", *(("interpolation",) if resizing else ()))
        if getattr(expected, name) != getattr(own, name)
    ]
    return lines + geometry if geometry and not _same_frame(expected, domain) else lines


def _same_frame(expected: Preprocess, domain: FileDomain | TensorDomain) -> bool:
    """Return whether two descriptions frame the first image alike."""
    own = domain.preprocess
    if isinstance(domain, FileDomain) and own.resize is None and own.crop is not None and own.crop == expected.crop:
        return True
    if len(domain) == 0:
        return True
    try:
        mine, theirs = _framed(expected, domain), _framed(own, domain)
    except UNREADABLE:
        return False
    if isinstance(domain, TensorDomain) and own.resize is None:
        return mine.shape[-2:] == theirs.shape[-2:]
    return mine.shape == theirs.shape and bool((mine.int() - theirs.int()).abs().amax() <= 1)


def _normalised(images: Tensor) -> bool:
    return len(images) > 0 and bool((images.amin() < 0) | (images.amax() > 1))


def _framed(preprocess: Preprocess, domain: FileDomain | TensorDomain) -> Tensor:
    if isinstance(domain, FileDomain):
        return domain.sources[0].read(preprocess)
    return preprocess.frame(domain.images[:1])[0]


def _domain_of(images: Any) -> FileDomain | TensorDomain | None:
    """Return the domain itself, or the one whose batches these are."""
    if isinstance(images, FileDomain | TensorDomain):
        return images
    if not isinstance(images, Batches):
        return None
    owner = getattr(images._fetch, "__self__", None)
    if isinstance(owner, TensorDomain):
        return owner
    if isinstance(images._fetch, FileFetch):
        decoder = images._fetch._decoder
        return FileDomain("the domain of these batches", tuple(decoder.sources), preprocess=decoder.preprocess)
    return None
