"""The gradient of a stream's objective (paper eq. 3) on one batch, and what is found on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from undrift._types import Answering, Keeper, Likelihood, Step
from undrift.answer.forward import forward
from undrift.answer.prediction import entropy_of
from undrift.likelihood import one_number
from undrift.objective import kl_term
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import beside_a_step, drawing
from undrift.system.autocast import weights_moved

Found = tuple[Tensor, Tensor, Tensor | None]
"""Mean softmax; mean entropy; likelihood, KL and the gradient's norm as one tensor, or None: nothing was asked."""


class Gradient:
    """Leaves the objective's gradient in the learnables; nothing that it finds is read back.

    It knows nothing of the stream around it: a recording of it, which the stream holds, must not hold the stream.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Likelihood,
        learnables: Sequence[nn.Parameter],
        keepers: Sequence[Keeper] = (),
    ) -> None:
        self.model, self.likelihood, self.learnables, self.keepers = model, likelihood, learnables, keepers

    def keep(self) -> None:
        """Get ready for `put_back`. Here nothing is to be done: what moves is replaced, and never changed in place."""

    def put_back(self) -> None:
        """Undo what happened in place since `keep`."""

    def forget(self) -> None:
        """Forget what is known of tensors that others have replaced."""

    def __call__(self, images: Tensor, size: int | Tensor, second: bool = False) -> Found:
        """Leave the gradient in the parameters, draw by draw; return what was found, still on the device.

        Args:
            size: images seen with these, the data size of the bound; a tensor is not looked at.
            second: whether this is the second pass of a step with the option `climb`.
        """
        model = self.model
        draws = model.options.train_samples
        step = Step(model, images, lambda x: forward(model, x), climbed=second)
        model.key.training = not second
        # Casts that autocast kept from a pass without gradients cut weights off, in some versions of torch. And casts
        # belong into a recording, for its replays to follow the weights.
        weights_moved()
        probs = mean_entropy = loss = torch.zeros((), device=images.device)
        kl = loss.detach()
        asked = False
        noisy = model.key.noisy and draws > 0
        for draw in range(max(1, draws)):
            with torch.set_grad_enabled(bool(self.learnables)):
                # Statistics move once a batch, however many draws there are; all are normalised alike.
                with beside_a_step(model, noisy) if draw or second else drawing(model.key, noisy):
                    logits = forward(model, images)
                model.key.training = False
                part = self.likelihood(logits, step)
                if part is not None:
                    asked, part = True, one_number(part) / max(1, draws)
                    if self.learnables:
                        part.backward()  # draw by draw: one graph at a time is held
                    loss = loss + part.detach()
            answer = logits.detach()
            if isinstance(self.likelihood, Answering) and not second:
                answer = self.likelihood.answer(answer)
            softmax = answer.softmax(dim=1)
            probs = probs + softmax / max(1, draws)
            mean_entropy = mean_entropy + entropy_of(softmax) / max(1, draws)
        if not asked:
            return probs, mean_entropy, None
        if self.learnables:
            kl = kl_term(model, size)
            for penalty in (kl, *(keeper.penalty(model) for keeper in self.keepers)):
                if penalty is not None and penalty.requires_grad:
                    penalty.backward()
            kl = kl.detach()
        # The norm, not the largest value: Adam keeps squares, and an infinite one would stop its parameter for ever.
        grads = [p.grad for p in self.learnables if p.grad is not None]
        # Of no tensors torch's norm is a zero on the CPU, and to bring that to a GPU is a wait.
        norm = get_total_norm(grads) if grads else loss.new_zeros(())
        return probs, mean_entropy, torch.stack([t.to(loss) for t in (loss, kl, norm)])
