"""One step over a batch: its gradients, and either the whole step or none of it."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift._outputs import logits
from undrift._random import Randomness
from undrift._types import Likelihood, Step
from undrift.likelihood import one_number
from undrift.objective import kl_term
from undrift.optimise import make_optimiser
from undrift.perturb import Perturbed


class Stepper:
    """Takes a perturbed network down its objective (paper eq. 3), with the learning rates of its options.

    The rates follow SHOT's schedule, lr · (1 + 10·p)^−0.75, where p is the part of all steps that is done with this
    one.
    """

    def __init__(self, model: Perturbed, likelihood: Likelihood, size: int, total: int) -> None:
        options = model.options
        self.model, self.likelihood, self.size, self.total = model, likelihood, size, total
        self.optimiser = make_optimiser(model, options.adapt_optimiser, options.adapt_lr, options.weight_decay)
        self._rates = [group["lr"] for group in self.optimiser.param_groups]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits under the perturbation as it stands."""
        return logits(self.model(images))

    @torch.enable_grad()
    def gradients(self, places: Tensor, images: Tensor) -> dict[str, float] | None:
        """Put the gradient of likelihood + KL on the learnables and return the step's numbers; None if not finite."""
        self.optimiser.zero_grad()
        step = Step(self.model, images, self.forward, places)
        draws = self.model.options.train_samples
        likelihood = images.new_zeros((), dtype=torch.promote_types(images.dtype, torch.float32))
        for draw in range(draws):
            # Each batch moves the norm statistics once, however many draws look at it.
            with self.model.rest() if draw else nullcontext():
                output = self.forward(images)
                loss = one_number(self.likelihood(output, step)) / draws
            if not loss.requires_grad:
                raise OptionError(
                    "the likelihood's loss has no gradient; adaptation follows it. Compute the loss from the logits "
                    "that it is given, without detach() or no_grad()."
                )
            loss.backward()  # a draw at a time: its activations are freed before the next
            likelihood = likelihood + loss.detach()
        kl = kl_term(self.model, self.size)
        kl.backward()
        entropy, balance = _spread(output.detach())
        grads = [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        # One transfer a step: on a GPU each number read is a wait.
        found = [t.detach().to(likelihood) for t in (likelihood, kl, entropy, balance, norm)]
        numbers: list[float] = torch.stack(found).tolist()
        if not all(map(math.isfinite, numbers)):
            return None
        names = ("likelihood", "kl", "entropy", "balance")
        return {"loss": numbers[0] + numbers[1], **dict(zip(names, numbers, strict=False))}

    def apply(self, number: int) -> float:
        """Make the step (the number-th of all) and return the learning rate of norm affine parameters."""
        factor = (1 + 10 * number / self.total) ** -0.75
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimiser.step()
        self.optimiser.zero_grad()
        return self.model.options.adapt_lr * factor


class Mark:
    """Where model and randomness stood before a step, so that half a step leaves no trace."""

    def __init__(self, model: Perturbed, randomness: Randomness) -> None:
        self.model, self.randomness = model, randomness
        # References are enough: a moving average is a new tensor each time it moves.
        layers = [policy.layer for policy in model.norms if policy.statistics == "moving"]
        self._statistics = [(layer, layer.running_mean, layer.running_var) for layer in layers]
        self._step, self._random = model.key.step.clone(), randomness.state()

    def undo(self) -> None:
        """Go back to the mark, so that the same batch may come again."""
        self.undo_model()
        self.randomness.put(self._random)

    def undo_model(self) -> None:
        """Put the model back; learnables have not changed, as gradients alone change nothing."""
        for layer, mean, var in self._statistics:
            layer.running_mean, layer.running_var = mean, var
        self.model.key.step.copy_(self._step)
        for parameter in self.model.parameters():
            parameter.grad = None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a short `with` block is over, so that a step that was made is also counted."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield  # signals arrive elsewhere
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _spread(output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy of the predictions, and the entropy of their mean over ln(classes)."""
    log_p = output.log_softmax(1)
    mean = log_p.exp().mean(0)
    balance = torch.special.entr(mean).sum() / math.log(output.shape[1])
    return -(log_p.exp() * log_p).sum(1).mean(), balance
