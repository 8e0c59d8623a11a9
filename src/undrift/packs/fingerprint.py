"""Fingerprint of a source network: a hash of its weights."""

import hashlib

import torch
from torch import Tensor, nn

from undrift._errors import DataError
from undrift.posterior.model_lock import turn
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name

# Left out, because a forward pass in train mode changes them: a batch norm's counter (which many checkpoints lack, and
# only cumulative averages read) and the power iteration of a spectral norm.
_RESTLESS = ("num_batches_tracked", "weight.0._u", "weight.0._v", "weight_u", "weight_v")

HALF = (torch.bfloat16, torch.float16)
"""Precisions that round the weights of a float32 network."""


def fingerprint(net: nn.Module) -> str:
    """Return a hash of the source weights: SHA-256 over names, shapes and values as float32, 64 hex digits.

    The same checkpoint has the same fingerprint on every device, in any memory format, in float32 or wider, compiled,
    and perturbed (then it is the source's). A cast to bfloat16 or float16 rounds the weights and gives another
    fingerprint: load the domain file first, cast after.

    Examples:
        >>> net = nn.Linear(2, 2)
        >>> fingerprint(net) == fingerprint(net.double())
        True
    """
    if isinstance(net, Perturbed):
        with turn(net), net.off() as source:
            return fingerprint(source)
    return _digest(net)


def precision_of(net: nn.Module, wanted: str) -> torch.dtype | None:
    """Return the half precision in which the network has this fingerprint, or None."""
    return next((dtype for dtype in HALF if _digest(net, dtype) == wanted), None)


def _digest(net: nn.Module, rounded: torch.dtype | None = None) -> str:
    """Return the hash of the weights, after a cast if one is given."""
    digest = hashlib.sha256()
    parameters = {plain_name(name) for name, _ in net.named_parameters()}
    for name, tensor in sorted(source_tensors(net).items()):
        # A weight norm's weight_v is a parameter and counts.
        if name in parameters or not name.endswith(_RESTLESS):
            digest.update(f"{name}{list(tensor.shape)}\n".encode())
            cast = tensor if rounded is None or not tensor.is_floating_point() else tensor.to(rounded)
            digest.update(_values(name, cast))
    return digest.hexdigest()


def source_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return the network's state dict by plain names, without the prefix of torch.compile."""
    state = net.state_dict()
    return {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}


def _values(name: str, tensor: Tensor) -> bytes:
    if tensor.is_meta:
        raise DataError(
            f"{name} is on the meta device and has no values; needed: a network with its weights. Load its checkpoint."
        )
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # + 0 turns −0 into 0, so that equal numbers have equal bits.
    plain = tensor.detach().to("cpu", torch.float32) + 0.0 if tensor.is_floating_point() else tensor.cpu().long()
    return plain.contiguous().numpy().tobytes()
