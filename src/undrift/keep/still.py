"""Exclude parts of the network from training while their norm layers use the target's statistics (SAR's layer4)."""

from collections.abc import Sequence

from undrift._types import Keeper
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import matching, plain_name
from undrift.posterior.state import named_learnables
from undrift.system.warning import warn


class Still(Keeper):
    """Exclude the named parts from training: their values stay the source's bit for bit, also in a climb.

    Unlike the option `frozen`, this leaves norm layers their batch statistics. Names that the network does not have are
    ignored. It holds as long as the network is perturbed.

    Args:
        still: name patterns, as in `frozen`.
    """

    def __init__(self, still: str | Sequence[str] = ()) -> None:
        self.still = (still,) if isinstance(still, str) else tuple(still)

    def __repr__(self) -> str:
        return f"Still(still={self.still})"

    def start(self, model: Perturbed) -> None:
        """Stop training what is named."""
        learnables = named_learnables(model)
        still = [p for name, p in learnables.items() if matching(plain_name(name.removeprefix("net.")), self.still)]
        for parameter in still:
            parameter.requires_grad_(False)
        if learnables and len(still) == len(learnables):
            warn(
                f"still={self.still} names all that would be trained ({len(still)} tensors), so that nothing changes; "
                "needed: something to train. Give other names, or none: still=()."
            )
