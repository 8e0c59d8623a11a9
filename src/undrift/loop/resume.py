"""Pack the state of a run of `adapt` into a checkpoint, and resume from one."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images import FileDomain, TensorDomain
from undrift.judge.history import HistoryRow
from undrift.judge.verdict import Survey
from undrift.loop.checkpoint import Checkpoint
from undrift.packs.fingerprint import fingerprint
from undrift.posterior.state import fill_likelihood, likelihood_state, restore, snapshot

if TYPE_CHECKING:
    from undrift.loop.epochs import Run

_COUNTS = ("epoch", "done", "finished", "bad_steps", "lone_batches")
_IN = "//"  # between the names of a dict and of what is in it
_LATER = ("over", "idle_steps", "idle_epoch")  # missing in older files


def mark_of(images: Any) -> str | None:
    """Return a checksum of the images; None where they may differ each time (a Dataset that augments)."""
    if isinstance(images, FileDomain):
        content = "\n".join(source.name for source in images.sources).encode()
    elif isinstance(images, Tensor | TensorDomain):
        pixels = images.images if isinstance(images, TensorDomain) else images
        few = pixels.detach()[:: max(1, len(pixels) // 8)].cpu().contiguous()
        content = few.flatten().view(torch.uint8).numpy().tobytes()
    else:
        return None
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def shown(part: object) -> str:
    """Return a part's repr without memory addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part))


def identity(run: "Run") -> dict[str, Any]:
    """Return what has to be the same for a run to resume, by name."""
    return {
        "source network": fingerprint(run.model),
        **run.model.options.as_dict(),
        "likelihood": shown(run.likelihood),
        "keepers": [shown(keeper) for keeper in run.stepper.keepers],
        "epochs": run.plan.epochs,
        "keep best": run.plan.keep_best,
        "images": run.images.data.size,
        "which images": mark_of(run.images.given),
        "batches": run.images.data.steps,
    }


def pack(run: "Run") -> Checkpoint:
    """Return the whole state of a run between two steps."""
    likelihood = _flat(likelihood_state(run.likelihood))
    values: dict[str, Any] = {name: getattr(run, name) for name in (*_COUNTS, *_LATER)}
    values |= {
        "under way": run.start is not None,
        "bad_images": sorted(run.images.bad),
        "surveys": {epoch: asdict(found) for epoch, found in run.surveys.found.items()},
        "best_epoch": run.surveys.best_epoch,
        "step_views": run.step_views.names,
        "likelihood": {name: value for name, value in likelihood.items() if not isinstance(value, Tensor)},
    }
    keepers = [keeper.state_dict() for keeper in run.stepper.keepers]
    values["keepers"] = [{n: v for n, v in state.items() if not isinstance(v, Tensor)} for state in keepers]
    groups = {
        "model": snapshot(run.model),
        "optimiser": _optimiser_state(run.stepper.optimiser),
        "random": run.randomness.state(),
        "start": run.start or {},
        "likelihood": {name: value for name, value in likelihood.items() if isinstance(value, Tensor)},
        "best": run.surveys.best,
        "answers": run.surveys.answers,
        "history": {"steps": torch.tensor([astuple(row) for row in run.rows], dtype=torch.float64)},
    }
    groups |= {
        f"keeper{number}": {n: v for n, v in state.items() if isinstance(v, Tensor)}
        for number, state in enumerate(keepers)
    }
    return Checkpoint(run.identity, values, groups)


def unpack(run: "Run", found: Checkpoint) -> None:
    """Put a run where the checkpoint stands."""
    groups = {name: found.groups.get(name, {}) for name in ("random", "start", "likelihood", "best", "answers")}
    try:
        restore(run.model, found.groups["model"])  # checks all names and shapes first
        _fill_optimiser(run.stepper.optimiser, found.groups.get("optimiser", {}))
        for name in _COUNTS:
            setattr(run, name, found.values[name])
        for name in _LATER:
            setattr(run, name, found.values.get(name, getattr(run, name)))
        names = found.values.get("step_views")  # missing in older files
        run.step_views.names = None if names is None else tuple(names)
        run.start = groups["start"] if found.values["under way"] else None
        run.images.bad = set(found.values["bad_images"])
        run.surveys.found = {int(epoch): Survey(**values) for epoch, values in found.values["surveys"].items()}
        run.surveys.best_epoch, run.surveys.best = found.values["best_epoch"], groups["best"]
        run.surveys.answers = groups["answers"]
        rows = found.groups["history"]["steps"].tolist()
        run.rows = [HistoryRow(int(epoch), int(step), *numbers) for epoch, step, *numbers in rows]
        fill_likelihood(run.likelihood, _nested(found.values["likelihood"] | groups["likelihood"]), run.model)
        for number, (keeper, plain) in enumerate(zip(run.stepper.keepers, found.values["keepers"], strict=True)):
            keeper.load_state_dict(plain | found.groups.get(f"keeper{number}", {}))
        run.randomness.put(groups["random"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{run.plan.checkpoint} lacks {error}; needed: a checkpoint as adapt writes it. Delete the file to start "
            "anew."
        ) from error


def _flat(state: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Return a state without dicts in it: "views//mirror" is what was under "mirror" in that under "views"."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        nested = isinstance(value, Mapping) and len(value) > 0  # an empty one is a value
        found |= _flat(value, f"{inside}{name}{_IN}") if nested else {f"{inside}{name}": value}
    return found


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `_flat` made flat."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *way, last = name.split(_IN)
        place = state
        for part in way:
            place = place.setdefault(part, {})
        place[last] = value
    return state


def _optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def _fill_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    whole = optimiser.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimiser.load_state_dict({**whole, "state": state})
