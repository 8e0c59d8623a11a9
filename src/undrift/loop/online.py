"""One step of a stream: the whole step or none of it, and back to the start when the state is no longer sound."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from undrift._errors import PerturbationMismatch
from undrift._types import Following, Keeper, Likelihood
from undrift.loop.captured import CapturedGradient
from undrift.loop.gradient import Gradient
from undrift.loop.guard import Guard
from undrift.loop.optimise import climbed, learnables, weights_moved
from undrift.loop.resume import shown
from undrift.loop.stream_report import StreamReport
from undrift.objective import kl_term
from undrift.packs.fingerprint import fingerprint
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import fill_likelihood, filled_in, likelihood_state, moving_by, restore, snapshot
from undrift.system.interrupts import uninterrupted
from undrift.system.private import exp_all

NOTHING_ASKED = "nothing asked of it"


class Online:
    """Takes a network down its objective (paper eq. 3), one batch at a time; it is in eval mode meanwhile.

    Attributes:
        seen: finite images since the start state: the data size of the bound.
        report: what happened so far.
        latest: objective, likelihood and KL of the last batch.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Likelihood,
        optimiser: torch.optim.Optimizer,
        guard: Guard | None,
        keepers: Sequence[Keeper] = (),
        captured: bool = False,
    ) -> None:
        self.model, self.likelihood, self.optimiser, self.guard = model, likelihood, optimiser, guard
        self.keepers = tuple(keepers)
        self.seen = 0
        self.report = StreamReport()
        self.latest: dict[str, float] = dict.fromkeys(("loss", "likelihood", "kl"), math.nan)
        for keeper in self.keepers:
            keeper.start(model)
        # A keeper may take parts of the network out of what is trained.
        self._learnables = [p for p in learnables(optimiser) if p.requires_grad]
        plain = Gradient(model, likelihood, self._learnables, self.keepers)
        self._gradient = CapturedGradient(plain) if captured else plain
        self._start = snapshot(model)
        self._start_likelihood = copy.deepcopy(likelihood_state(likelihood))
        self._identity: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return what a stream and the one that goes on from it have in common."""
        if self._identity is None:  # once: it reads every weight
            self._identity = {"network": fingerprint(self.model), **self.model.options.as_dict()}
            self._identity["likelihood"] = shown(self.likelihood)
            self._identity["keepers"] = [shown(keeper) for keeper in self.keepers]
        return self._identity

    def step(self, images: Tensor, new: int | None = None) -> tuple[Tensor, Tensor]:
        """Make one step, or none where it would not be finite; return mean softmax and mean entropy of its draws.

        Args:
            new: how many of the images count as seen by it; None is all of them.
        """
        count = len(images) if new is None else new
        # Moving statistics are replaced, never changed in place, so the old tensors are a copy for free.
        statistics = [(p.layer, dict(p.layer._buffers)) for p in self.model.norms]
        self._gradient.keep()  # but for a replay, which knows one place for each
        size, taken = self.seen + count, False
        why_not: str | None = None
        try:
            with moving_by(self.model, self.model.options.stream_norm_momentum):
                probs, mean_entropy, numbers = self._gradient(images, size)
            last = numbers
            if numbers is not None and self.model.options.climb and self._learnables:
                with climbed(self._learnables, self.model.options.climb):
                    self.optimiser.zero_grad()
                    _, _, last = self._gradient(images, size, second=True)
            if last is None:
                # The images are sound, and statistics may keep what they saw of them.
                why_not, taken = NOTHING_ASKED, True
            if (found := numbers if last is None else last) is not None:
                norm = self._read(found)
                why_not = why_not or self._why_not(norm)
            if why_not is None:
                with uninterrupted():
                    self._take()
                    taken = True
        finally:
            self.optimiser.zero_grad()
            if not taken:
                for layer, buffers in statistics:
                    layer._buffers.update(buffers)
                self._gradient.put_back()
                filled_in(self.model)
        self.seen += count
        if why_not is not None:
            self.report.miss(why_not)
        return probs, mean_entropy

    def _take(self) -> None:
        """Make the step that the gradients ask for, and let all that follows a step follow."""
        if not self._learnables:
            return
        for keeper in self.keepers:
            keeper.gradients(self.model)
        self.optimiser.step()
        self.report.steps += 1
        if isinstance(self.likelihood, Following):
            self.likelihood.follow(self.model)
        for keeper in self.keepers:
            if (why := keeper.after(self.model, self.latest["likelihood"])) is not None:
                self.report.reset(why)
        weights_moved()

    def _read(self, found: Tensor) -> float:
        """Remember likelihood and KL, and return the gradient's norm: one transfer, as each is a wait for a GPU."""
        likelihood, kl, norm = found.tolist()
        self.latest = {"loss": likelihood + kl, "likelihood": likelihood, "kl": kl}
        return float(norm)

    def _why_not(self, norm: float) -> str | None:
        if not math.isfinite(self.latest["loss"]):
            return "loss not finite"
        return None if math.isfinite(norm) else "gradient not finite"

    def watch(self, images: Tensor) -> bool:
        """Put the start state back where the step left nothing sound; return whether it did."""
        groups = self.optimiser.param_groups
        values = [p for g in groups if "log_var" not in g["name"] for p in g["params"]]
        log_vars = [p for g in groups if "log_var" in g["name"] for p in g["params"]]
        if not values and not log_vars:
            return False
        with torch.no_grad():
            # A log-variance of −inf is a variance of 0, and sound; one of 100 is an infinite variance.
            size = get_total_norm([*values, *(exp_all(log_vars) if log_vars else ())])
            numbers = [size + kl_term(self.model, size=self.seen).to(size)]
        if self.guard is not None:
            # Asked of an unsound network too: what it remembers then is forgotten below.
            numbers.append(self.guard.collapsed(self.model, images).to(size))
        total, *collapsed = torch.stack(numbers).tolist()  # one transfer
        if math.isfinite(total) and not any(collapsed):
            return False
        why = "collapsed" if math.isfinite(total) else "state not finite"
        step = self.model.key.step.clone()
        self.reset()
        self.model.key.step.copy_(step)  # the noise goes on: what went wrong need not come again
        self.report.reset(why)
        return True

    def reset(self) -> None:
        """Put the start state back: learnables, norm state, noise, optimiser, and what likelihood and keepers saw."""
        restore(self.model, self._start)
        weights_moved()
        self.optimiser.state.clear()
        self.seen = 0
        fill_likelihood(self.likelihood, copy.deepcopy(self._start_likelihood), self.model)
        for keeper in self.keepers:
            keeper.reset()
        if self.guard is not None:
            self.guard.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return all that an interrupted stream needs to go on exactly where it stood; `torch.save` takes it."""
        return {
            "identity": self.identity(),
            "model": snapshot(self.model),
            "start": {name: tensor.clone() for name, tensor in self._start.items()},
            "optimiser": copy.deepcopy(self.optimiser.state_dict()),
            "seen": self.seen,
            "report": self.report.state_dict(),
            "guard": None if self.guard is None else self.guard.state_dict(),
            "likelihood": copy.deepcopy(likelihood_state(self.likelihood)),
            "start likelihood": copy.deepcopy(self._start_likelihood),
            "keepers": [copy.deepcopy(keeper.state_dict()) for keeper in self.keepers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, learning rate included; the batches of this stream are those that are still to come."""
        kept = self.state_dict()
        missing = [k for k in kept if k not in state]
        if missing:
            raise PerturbationMismatch(
                f"the state has no {', '.join(missing)}; a stream goes on from what Stream.state_dict() gave. "
                "Give that, or start a new stream."
            )
        other = [k for k, v in self.identity().items() if state["identity"].get(k) != v]
        if other:
            raise PerturbationMismatch(
                f"the state is of another stream: {', '.join(other)} changed; a stream goes on with the same source "
                "network and options, likelihood and keepers. Start it as that one was, or start a new stream."
            )
        try:
            self._fill(state)
        except BaseException:  # all of a state or nothing
            self._fill(kept)
            raise

    def _fill(self, state: Mapping[str, Any]) -> None:
        self._gradient.forget()  # keepers and likelihood may hold other tensors after this
        restore(self.model, state["start"])
        restore(self.model, state["model"])
        try:
            self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        except ValueError as error:
            raise PerturbationMismatch(
                f"the saved optimiser is another one ({error}); it has to have the same parameters. "
                "Perturb with the options of the saved stream."
            ) from error
        weights_moved()
        self._start = {name: state["start"][name].to(tensor) for name, tensor in self._start.items()}
        self.seen = state["seen"]
        self.report.load_state_dict(state["report"])
        if self.guard is not None and state["guard"] is not None:
            self.guard.load_state_dict(state["guard"])
        fill_likelihood(self.likelihood, copy.deepcopy(state["likelihood"]), self.model)
        self._start_likelihood = copy.deepcopy(state["start likelihood"])
        for keeper, kept in zip(self.keepers, state["keepers"], strict=True):
            keeper.load_state_dict(copy.deepcopy(kept))
