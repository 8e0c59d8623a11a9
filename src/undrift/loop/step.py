"""One step over a batch: its gradients, and either the whole step or none of it."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from undrift._types import Following, Keeper, Likelihood, Step
from undrift.likelihood import one_number
from undrift.loop.optimise import learnables, make_optimiser
from undrift.objective import kl_term
from undrift.posterior.norm import MOVING
from undrift.posterior.outputs import logits
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import beside_a_step, drawing, filled_in
from undrift.system.autocast import weights_moved
from undrift.system.randomness import Randomness


class Stepper:
    """Takes a perturbed network down its objective (paper eq. 3), with the learning rates of its options.

    The rates stay, or follow SHOT's schedule, lr · (1 + 10·p)^−0.75, where p is the part of all steps that is done with
    this one.
    """

    def __init__(
        self, model: Perturbed, likelihood: Likelihood, size: int, total: int, keepers: Sequence[Keeper] = ()
    ) -> None:
        options = model.options
        self.model, self.likelihood, self.size, self.total, self.keepers = model, likelihood, size, total, keepers
        own = likelihood.parameters() if isinstance(likelihood, nn.Module) else ()
        self.optimiser = make_optimiser(model, options.adapt_optimiser, options.adapt_lr, options.weight_decay, own)
        self._learnables = learnables(self.optimiser)
        for keeper in keepers:
            keeper.start(model)
        self._rates = [group["lr"] for group in self.optimiser.param_groups]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits under the perturbation as it stands."""
        return logits(self.model(images))

    @torch.enable_grad()
    def gradients(self, places: Tensor, images: Tensor, done: int) -> dict[str, float] | None:
        """Put the gradient of likelihood + KL on the learnables and return the step's numbers.

        None where they are not finite, an empty dict where the likelihood asked nothing: no step is to be made then.

        Args:
            done: steps made before this one.
        """
        self.optimiser.zero_grad()
        step = Step(self.model, images, self.forward, places, progress=done / self.total)
        draws = self.model.options.train_samples
        likelihood = images.new_zeros((), dtype=torch.promote_types(images.dtype, torch.float32))
        norm = kl = likelihood
        asked = False
        with torch.set_grad_enabled(bool(self._learnables)):
            for draw in range(max(1, draws)):
                # Each batch moves the norm statistics once, however many draws look at it; all are normalised alike.
                with beside_a_step(self.model, self.model.key.noisy) if draw else nullcontext():
                    output = self._forward(images, noisy=draws > 0)
                    loss = self.likelihood(output, step)
                if loss is None:
                    continue
                asked, loss = True, one_number(loss) / max(1, draws)
                if self._learnables:
                    loss.backward()  # a draw at a time: its activations are freed before the next
                likelihood = likelihood + loss.detach()
            if not asked:
                return {}
            if self._learnables:
                kl = kl_term(self.model, self.size)
                for penalty in (kl, *(keeper.penalty(self.model) for keeper in self.keepers)):
                    if penalty is not None and penalty.requires_grad:
                        penalty.backward()
                norm = torch.nn.utils.get_total_norm([p.grad for p in self._learnables if p.grad is not None])
        entropy, balance = _spread(output.detach())
        # One transfer a step: on a GPU each number read is a wait.
        found = [t.detach().to(likelihood) for t in (likelihood, kl, entropy, balance, norm)]
        numbers: list[float] = torch.stack(found).tolist()
        if not all(map(math.isfinite, numbers)):
            return None
        names = ("likelihood", "kl", "entropy", "balance")
        return {"loss": numbers[0] + numbers[1], **dict(zip(names, numbers, strict=False))}

    def _forward(self, images: Tensor, noisy: bool) -> Tensor:
        key = self.model.key
        with drawing(key, key.noisy and noisy):
            return self.forward(images)

    def apply(self, number: int) -> float:
        """Make the step (the number-th of all) and return the learning rate of norm affine parameters."""
        falling = self.model.options.adapt_schedule == "shot"
        factor = (1 + 10 * number / self.total) ** -0.75 if falling else 1.0
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for keeper in self.keepers:
            keeper.gradients(self.model)
        self.optimiser.step()
        self.optimiser.zero_grad()
        weights_moved()
        if isinstance(self.likelihood, Following):
            self.likelihood.follow(self.model)
        for keeper in self.keepers:
            keeper.after(self.model, math.nan)
        return self.model.options.adapt_lr * factor


class Mark:
    """Where model and randomness stood before a step, so that half a step leaves no trace."""

    def __init__(self, model: Perturbed, randomness: Randomness) -> None:
        self.model, self.randomness = model, randomness
        # References are enough: a moving average is a new tensor each time it moves.
        layers = [policy.layer for policy in model.norms if policy.statistics in MOVING]
        self._statistics = [(layer, dict(layer._buffers)) for layer in layers]
        self._step, self._random = model.key.step.clone(), randomness.state()

    def undo(self) -> None:
        """Go back to the mark, so that the same batch may come again."""
        self.undo_model()
        self.randomness.put(self._random)

    def undo_model(self) -> None:
        """Put the model back; learnables have not changed, as gradients alone change nothing."""
        for layer, buffers in self._statistics:
            layer._buffers.update(buffers)
        filled_in(self.model)
        self.model.key.step.copy_(self._step)
        for parameter in self.model.parameters():
            parameter.grad = None


def _spread(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy of the predictions, and the entropy of their mean over ln(classes)."""
    log_p = output.log_softmax(1)
    p = log_p.exp()
    balance = torch.special.entr(p.mean(0)).sum() / math.log(output.shape[1])
    return -(p * log_p).sum(1).mean(), balance
