"""One step of a stream: the whole step or none of it, and back to the start when the state is no longer sound."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from undrift._adapted import moving_by, restore, snapshot
from undrift._errors import PerturbationMismatch
from undrift._guard import Guard
from undrift._step import uninterrupted
from undrift._stream_report import StreamReport
from undrift._types import Step
from undrift.fingerprint import fingerprint
from undrift.likelihood import one_number
from undrift.objective import kl_term
from undrift.perturb import Perturbed
from undrift.predict import forward
from undrift.prediction import entropy_of


class Online:
    """Takes a perturbed network down its objective (paper eq. 3), one batch a step; it is in eval mode meanwhile.

    Attributes:
        seen: finite images since the start state: the data size of the bound.
        report: what happened so far.
        latest: objective, likelihood and KL of the last batch.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Callable[[Tensor, Step], Tensor],
        optimiser: torch.optim.Optimizer,
        guard: Guard | None,
    ) -> None:
        self.model, self.likelihood, self.optimiser, self.guard = model, likelihood, optimiser, guard
        self.seen = 0
        self.report = StreamReport()
        self.latest: dict[str, float] = dict.fromkeys(("loss", "likelihood", "kl"), math.nan)
        self._start = snapshot(model)
        self._identity: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """Return what a stream and the one that goes on from it have in common."""
        if self._identity is None:  # once: it reads every weight
            self._identity = {"network": fingerprint(self.model), **self.model.options.as_dict()}
        return self._identity

    def step(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step, or none where it would not be finite; return mean softmax and mean entropy of its draws."""
        # Moving statistics are replaced, never changed in place, so the old tensors are a copy for free.
        statistics = [(p.layer, dict(p.layer._buffers)) for p in self.model.norms]
        taken = False
        try:
            with moving_by(self.model, self.model.options.stream_norm_momentum):
                probs, mean_entropy, loss = self._gradient(images)
            why_not = self._why_not(loss)
            if why_not is None:
                with uninterrupted():
                    self.optimiser.step()
                    self.report.steps += 1
                    taken = True
        finally:
            self.optimiser.zero_grad()
            if not taken:
                for layer, buffers in statistics:
                    layer._buffers.update(buffers)
        self.seen += len(images)
        if why_not is not None:
            self.report.miss(why_not)
        return probs, mean_entropy

    def _gradient(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the objective's gradient in the parameters; return mean softmax, mean entropy, and the objective."""
        model = self.model
        draws = model.options.train_samples
        step = Step(model, images, lambda x: forward(model, x))
        model.key.training = True
        probs = mean_entropy = loss = torch.zeros((), device=images.device)
        for _ in range(draws):
            logits = forward(model, images)
            model.key.training = False  # statistics move once a batch, however many draws there are
            part = one_number(self.likelihood(logits, step)) / draws
            part.backward()  # draw by draw: one graph at a time is held
            softmax = logits.detach().softmax(dim=1)
            probs, mean_entropy = probs + softmax / draws, mean_entropy + entropy_of(softmax) / draws
            loss = loss + part.detach()
        kl = kl_term(model, size=self.seen + len(images))
        kl.backward()
        self.latest = {"loss": float(loss + kl.detach()), "likelihood": float(loss), "kl": float(kl.detach())}
        return probs, mean_entropy, loss + kl.detach()

    def _why_not(self, loss: Tensor) -> str | None:
        if not bool(torch.isfinite(loss)):
            return "loss not finite"
        grads = [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        # The norm, not the largest value: Adam keeps squares, and an infinite one would stop its parameter for ever.
        return None if bool(torch.isfinite(get_total_norm(grads))) else "gradient not finite"

    def watch(self, images: Tensor) -> bool:
        """Put the start state back where the step left nothing sound; return whether it did."""
        with torch.no_grad():
            # A log-variance of −inf is a variance of 0, and sound; one of 100 is an infinite variance.
            groups = self.optimiser.param_groups
            values = [p.exp() if "log_var" in g["name"] else p for g in groups for p in g["params"]]
            sound = bool(torch.isfinite(get_total_norm(values) + kl_term(self.model, size=self.seen)))
        why = None if sound else "state not finite"
        if sound and self.guard is not None and self.guard.collapsed(self.model, images):
            why = "collapsed"
        if why is None:
            return False
        step = self.model.key.step.clone()
        self.reset()
        self.model.key.step.copy_(step)  # the noise goes on: what went wrong need not come again
        self.report.reset(why)
        return True

    def reset(self) -> None:
        """Put the start state back: learnables, norm state, noise and optimiser."""
        restore(self.model, self._start)
        self.optimiser.state.clear()
        self.seen = 0
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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, learning rate included; the batches of this stream are those that are still to come."""
        missing = [k for k in ("identity", "model", "start", "optimiser", "seen", "report", "guard") if k not in state]
        if missing:
            raise PerturbationMismatch(
                f"the state has no {', '.join(missing)}; a stream goes on from what Stream.state_dict() gave. "
                "Give that, or start a new stream."
            )
        other = [k for k, v in self.identity().items() if state["identity"].get(k) != v]
        if other:
            raise PerturbationMismatch(
                f"the state is of another stream: {', '.join(other)} changed; a stream goes "
                "on with the same source network and options. Perturb that network so, or start a new stream."
            )
        kept = snapshot(self.model)
        try:
            restore(self.model, state["start"])
            restore(self.model, state["model"])
            self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))
        except ValueError as error:
            restore(self.model, kept)
            raise PerturbationMismatch(
                f"the saved optimiser is another one ({error}); it has to have the same parameters. "
                "Perturb with the options of the saved stream."
            ) from error
        except PerturbationMismatch:
            restore(self.model, kept)
            raise
        self._start = {name: state["start"][name].to(tensor) for name, tensor in kept.items()}
        self.seen = state["seen"]
        self.report.load_state_dict(state["report"])
        if self.guard is not None and state["guard"] is not None:
            self.guard.load_state_dict(state["guard"])
