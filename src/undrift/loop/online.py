"""Take a stream's steps, and restore its start state if the network is no longer finite."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from undrift._errors import PerturbationMismatch
from undrift._types import Keeper, Likelihood
from undrift.answer.forward import forward
from undrift.answer.views import ViewsInUse
from undrift.loop.resume import shown
from undrift.loop.step import Stepper, StepResult
from undrift.loop.stream_report import StreamReport
from undrift.objective import kl_term
from undrift.packs.fingerprint import fingerprint
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import (
    extra_pass,
    fill_likelihood,
    likelihood_state,
    norm_momentum,
    restore,
    snapshot,
    weights_moved,
)
from undrift.system.private import exp_all


class OnlineSteps:
    """Makes the steps of a stream on the objective (paper eq. 3), batch by batch; the network is in eval mode.

    Attributes:
        seen: finite images since the start state: the data size of the bound.
        report: what has happened so far.
        latest: loss, likelihood and KL of the last batch.
        views: of an image that answers are averaged over.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Likelihood,
        optimiser: torch.optim.Optimizer,
        keepers: Sequence[Keeper] = (),
        captured: bool = False,
    ) -> None:
        self.model, self.likelihood, self.optimiser = model, likelihood, optimiser
        self.views = ViewsInUse(model.options.answer_views)
        self.stepper = Stepper(
            model, likelihood, optimiser, keepers, online=True, captured=captured, views=self.views
        )  # fmt: skip
        self.keepers = self.stepper.keepers
        self.seen = 0
        self.report = StreamReport()
        self.latest: dict[str, float] = dict.fromkeys(("loss", "likelihood", "kl"), math.nan)
        self._start = snapshot(model)
        self._start_likelihood = copy.deepcopy(likelihood_state(likelihood))
        self._identity: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same for a stream to resume, by name."""
        if self._identity is None:  # once: it reads every weight
            self._identity = {"network": fingerprint(self.model), **self.model.options.as_dict()}
            self._identity["likelihood"] = shown(self.likelihood)
            self._identity["keepers"] = [shown(keeper) for keeper in self.keepers]
        return self._identity

    def step(self, images: Tensor, new: int | None = None) -> tuple[Tensor, Tensor]:
        """Make one step, or none if it would not be finite; return mean softmax and mean entropy of its draws.

        Args:
            new: how many of the images no step has seen before; None is all of them.
        """
        self.views.look(images, self._mean_logits)
        seen = self.seen + (len(images) if new is None else new)

        def count(step: StepResult) -> None:
            self.seen = seen
            if step.numbers is not None:
                likelihood, kl, *_ = step.numbers
                self.latest = {"loss": likelihood + kl, "likelihood": likelihood, "kl": kl}
            if step.why_not is not None:
                self.report.miss(step.why_not)
            elif self.stepper.learnables:
                self.report.steps += 1
            for why in step.resets:
                self.report.reset(why)

        with norm_momentum(self.model, self.model.options.stream_norm_momentum):
            answer = self.stepper.step(images, seen, self.stepper.mark(), count).answer
        assert answer is not None, "the passes of a stream's step are answers"
        return answer

    def _mean_logits(self, images: Tensor) -> Tensor:
        with extra_pass(self.model, noisy=False):
            return forward(self.model, images)

    def reset_if_broken(self) -> bool:
        """Restore the start state if the present one is not finite; return whether it did."""
        groups = self.optimiser.param_groups
        values = [p for g in groups if "log_var" not in g["name"] for p in g["params"]]
        log_vars = [p for g in groups if "log_var" in g["name"] for p in g["params"]]
        if not values and not log_vars:
            return False
        with torch.no_grad():
            # Variances, not their logarithms: −inf is a sound variance of 0, and 100 an infinite one.
            size = get_total_norm([*values, *(exp_all(log_vars) if log_vars else ())])
            numbers = size + kl_term(self.model, size=self.seen).to(size)
        if math.isfinite(float(numbers)):
            return False
        self.start_again("state not finite")
        return True

    def start_again(self, why: str) -> None:
        """Restore the start state, but with new noise: the same might fail again."""
        step = self.model.key.step.clone()
        self.reset()
        self.model.key.step.copy_(step)
        self.report.reset(why)

    def reset(self) -> None:
        """Restore the start state: learnables, norm state, noise, optimiser, likelihood and keepers."""
        restore(self.model, self._start)
        weights_moved()
        self.optimiser.state.clear()
        self.seen = 0
        fill_likelihood(self.likelihood, copy.deepcopy(self._start_likelihood), self.model)
        for keeper in self.keepers:
            keeper.reset()

    def learned(self) -> dict[str, Any]:
        """Return what was learned so far, as copies in main memory."""
        return _on_cpu(
            {
                "model": snapshot(self.model),
                "optimiser": self.optimiser.state_dict(),
                "seen": self.seen,
                "likelihood": likelihood_state(self.likelihood),
                "keepers": [keeper.state_dict() for keeper in self.keepers],
            }
        )

    def go_on_from(self, learned: Mapping[str, Any]) -> None:
        """Restore what `learned` returned; the noise goes on."""
        self.stepper.gradient.forget()  # keepers and likelihood may hold new tensors after this
        noise = {name: getattr(self.model.key, name.partition(".")[2]).clone() for name in ("key.seed", "key.step")}
        restore(self.model, learned["model"] | noise)
        self.optimiser.load_state_dict(copy.deepcopy(learned["optimiser"]))
        weights_moved()
        self.seen = learned["seen"]
        fill_likelihood(self.likelihood, copy.deepcopy(learned["likelihood"]), self.model)
        for keeper, kept in zip(self.keepers, learned["keepers"], strict=True):
            keeper.load_state_dict(copy.deepcopy(kept))

    def state_dict(self) -> dict[str, Any]:
        """Return all that a stopped stream needs to resume exactly where it stood; `torch.save` takes it."""
        return {
            "identity": self.identity(),
            "model": snapshot(self.model),
            "start": {name: tensor.clone() for name, tensor in self._start.items()},
            "optimiser": copy.deepcopy(self.optimiser.state_dict()),
            "seen": self.seen,
            "views": self.views.state(),
            "report": self.report.state_dict(),
            "likelihood": copy.deepcopy(likelihood_state(self.likelihood)),
            "start likelihood": copy.deepcopy(self._start_likelihood),
            "keepers": [copy.deepcopy(keeper.state_dict()) for keeper in self.keepers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, learning rate included; this stream's batches are those still to come."""
        kept = self.state_dict()
        missing = [k for k in kept if k not in state]
        if missing:
            raise PerturbationMismatch(
                f"the state has no {', '.join(missing)}; a stream resumes from what Stream.state_dict() returned. "
                "Give that, or start a new stream."
            )
        other = [k for k, v in self.identity().items() if state["identity"].get(k) != v]
        if other:
            raise PerturbationMismatch(
                f"the state is of another stream: {', '.join(other)} changed; a stream resumes with the same source "
                "network, options, likelihood and keepers. Start it as that one was, or start a new stream."
            )
        try:
            self._fill(state)
        except BaseException:  # all of a state or nothing
            self._fill(kept)
            raise

    def _fill(self, state: Mapping[str, Any]) -> None:
        self.stepper.gradient.forget()  # keepers and likelihood may hold new tensors after this
        restore(self.model, state["start"])
        restore(self.model, state["model"])
        try:
            self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        except ValueError as error:
            raise PerturbationMismatch(
                f"the saved optimiser has other parameters ({error}); needed: the same. "
                "Perturb with the options of the saved stream."
            ) from error
        weights_moved()
        self._start = {name: state["start"][name].to(tensor) for name, tensor in self._start.items()}
        self.seen = state["seen"]
        self.views.load(state["views"])
        self.report.load_state_dict(state["report"])
        fill_likelihood(self.likelihood, copy.deepcopy(state["likelihood"]), self.model)
        self._start_likelihood = copy.deepcopy(state["start likelihood"])
        for keeper, kept in zip(self.keepers, state["keepers"], strict=True):
            keeper.load_state_dict(copy.deepcopy(kept))


def _on_cpu(value: Any) -> Any:
    """Return a copy of a state with its tensors in main memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_cpu(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(inner) for inner in value)
    return copy.deepcopy(value)
