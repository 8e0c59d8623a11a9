"""Let several processes adapt one network: refuse what they cannot share, and check that all start equal."""

import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from undrift._errors import OptionError
from undrift._types import Keeper, Likelihood
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import adapted
from undrift.system import ranks
from undrift.system.private import BatchNorm
from undrift.system.randomness import Randomness


def refuse_indivisible(model: Perturbed, likelihood: Likelihood, keepers: Sequence[Keeper]) -> None:
    """Raise if several processes would not compute what one process does."""
    if ranks.world_size() == 1:
        return
    name = getattr(likelihood, "__name__", type(likelihood).__name__)
    unchecked = [type(keeper).__name__ for keeper in keepers if not getattr(keeper, "divisible", False)]
    untracked = [n for n, m in model.net.named_modules() if isinstance(m, BatchNorm) and m.running_mean is None]
    reasons = {
        f"{name} uses more of a step than logits, indices and features": not getattr(likelihood, "divisible", False),
        f"{', '.join(unchecked)} was not checked with several": bool(unchecked),
        'mean_start="gradient" looks at a gradient before it is summed': (
            model.options.mean_start == "gradient" and bool(model.low_rank)
        ),
        "the network is compiled, and messages cannot enter its graph": root_of(model.net) is not model.net,
        "its weights are sharded (FSDP), and priors look at whole ones": any(map(_sharded, model.parameters())),
        f"{', '.join(untracked[:3])} normalises by its own part of a batch at all times": bool(untracked),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise OptionError(
            f"{ranks.world_size()} processes adapt this network together, and {'; '.join(found)}; needed: entropy, "
            "Information, Shot, Nrc, Aad or a loss of the logits alone, on a network as it was written. Take the "
            "method undrift, shot, nrc, aad, tent or vmp, or start one process."
        )


def _sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")


def sync_start(model: Perturbed, randomness: Randomness, identity: dict[str, Any]) -> None:
    """Check that all processes belong to one run, and copy the first one's state and random numbers to all."""
    if ranks.world_size() > 1:
        ranks.require_equal(json.dumps(identity), "options, images or network")
        ranks.broadcast(list(adapted(model).values()))
        sync_randomness(randomness)


def sync_randomness(randomness: Randomness) -> None:
    """Copy the first process's random state to all: augmentations have drawn differently in each."""
    if ranks.world_size() > 1:
        state = randomness.state()
        ranks.broadcast(list(state.values()))
        randomness.put(state)


def check_in_sync(model: nn.Module, when: str) -> None:
    """Raise if the processes' networks have drifted apart, as on unlike machines."""
    if ranks.world_size() > 1 and isinstance(model, Perturbed):
        sums = {name: float(tensor.detach().double().sum()) for name, tensor in adapted(model).items()}
        ranks.require_equal(json.dumps(sums), f"weights {when}")
