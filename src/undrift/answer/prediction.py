"""The `Prediction` of a batch: probabilities, labels and uncertainty."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift.posterior.outputs import rows
from undrift.system.validate import is_share


@dataclass(frozen=True)
class Prediction:
    """Probabilities averaged over draws, and what follows from them; one row per image.

    A network with a class per pixel answers each pixel: `probs` is images × classes × height × width, and everything
    else images × height × width. One with any number of labels per image (`outputs="sigmoid"`) answers each label with
    no (0) or yes (1): `probs` is images × 2 × labels, everything else images × labels.

    An image with NaN or infinite values in it, or in its logits, has no answer: uniform `probs`, `label` −1.

    Attributes:
        probs: mean of the softmax over draws, images × classes.
        label: the class with the largest probability; −1 without an answer.
        entropy: H of `probs`, in nats: all uncertainty.
        mutual_info: H of `probs` − mean H of the draws, at least 0: how much the draws disagree.

    Examples:
        >>> sure, unsure = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.4, 0.6]])
        >>> both = Prediction.cat([Prediction.of(sure), Prediction.of(unsure)])
        >>> both.label.tolist(), both.certain(0.8).tolist()
        ([0, 1], [True, False])
    """

    probs: Tensor
    label: Tensor
    entropy: Tensor
    mutual_info: Tensor

    @staticmethod
    def of(probs: Tensor, mean_entropy: Tensor | None = None, sound: Tensor | None = None) -> "Prediction":
        """Return the prediction with these mean probabilities.

        Args:
            probs: mean of the softmax over draws; rows that are not finite have no answer.
            mean_entropy: mean over draws of the softmax's entropy; without it there is one draw.
            sound: for each image of the batch, whether `probs` has a row for it. The others have no answer.
        """
        if sound is not None and len(probs) == 0:
            return Prediction.unknown(len(sound), probs)
        known = probs.abs().amax(dim=1) < torch.inf  # false for NaN; half the launches of isfinite
        label = probs.argmax(dim=1)
        inner = mean_entropy
        if sound is not None:
            # Put each row in its image's place, by index: a GPU would wait for the length of a mask.
            row = (sound.cumsum(0) - 1).clamp_min(0)
            known, label, probs = _like(sound, known) & known[row], label[row], probs[row]
            inner = None if inner is None else inner[row]
        probs = torch.where(known.unsqueeze(1), probs, 1 / probs.shape[1])
        entropy = entropy_of(probs)
        mutual = torch.zeros_like(entropy) if inner is None else (entropy - inner).clamp_min(0).where(known, 0)
        return Prediction(probs, label.where(known, -1), entropy, mutual)

    @staticmethod
    def unknown(images: int, like: Tensor) -> "Prediction":
        """Return a prediction for images that have no answer, with the classes and dtype of other probabilities."""
        probs = like.new_full((images, *like.shape[1:]), 1 / like.shape[1])
        entropy = entropy_of(probs)
        return Prediction(probs, torch.full_like(entropy, -1, dtype=torch.long), entropy, torch.zeros_like(entropy))

    @staticmethod
    def cat(parts: Iterable["Prediction"]) -> "Prediction":
        """Return several predictions as one."""
        parts = list(parts)
        if not parts:
            raise DataError("there is no prediction to join; at least one batch is needed. Check the loader.")
        if len(parts) == 1:
            return parts[0]
        return Prediction(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Prediction)))

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        """Return the counts and means: a batch has too many numbers to read."""
        images, classes, *positions = self.probs.shape
        text = f"{images:,} image{'' if images == 1 else 's'}, {classes:,} classes"
        if positions:
            text += f", each of {' × '.join(map(str, positions))}"
        if images:
            numbers = {"confidence": self.probs.amax(1), "entropy": self.entropy, "mutual_info": self.mutual_info}
            means = ", ".join(f"{name} {float(each.mean()):.3g}" for name, each in numbers.items())
            text += f"; {means} on average"
        return f"<{type(self).__name__}: {text}>"

    def cpu(self) -> "Prediction":
        """Return the prediction on the CPU."""
        return Prediction(*(getattr(self, f.name).cpu() for f in fields(self)))

    def certain(self, threshold: float | None = None, *, risk: float | None = None) -> Tensor:
        """Return which images (pixels, labels) have an answer that is sure enough.

        With `risk`, as many of the surest as can be answered so that their expected error, the mean of 1 − confidence
        over them, is at most that. It uses no labels, and is as honest as the probabilities are calibrated: an
        overconfident network errs more often (`undrift.temperature` helps). Images of equal confidence are answered
        all or none.

        Args:
            threshold: the least probability of an answer.
            risk: the expected share of wrong answers, from 0 to 1. Give one of the two.

        Examples:
            >>> p = Prediction.of(torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]))
            >>> p.certain(0.75).tolist(), p.certain(risk=0.125).tolist()
            ([False, True, True], [False, True, True])
        """
        answered, confidence = self.label >= 0, self.probs.amax(dim=1)
        if threshold is not None and risk is None:
            if not is_share(threshold):
                raise OptionError(
                    f"threshold={threshold!r} is not a number from 0 to 1; needed: the least probability of an answer. "
                    "0.8 is 80 %."
                )
            return answered & (confidence >= threshold)
        if threshold is not None or risk is None:
            found = "neither threshold nor risk" if risk is None else f"threshold={threshold!r} and risk={risk!r}"
            raise OptionError(
                f"certain got {found}; needed: one of them. Give the least probability of an answer, certain(0.8), or "
                "the share of wrong answers that may be expected, certain(risk=0.05)."
            )
        if not is_share(risk):
            raise OptionError(f"risk={risk!r} is not from 0 to 1; needed: a share of wrong answers. 0.05 is 5 %.")
        return answered & (confidence > _refused(confidence.where(answered, 0), risk))


def _refused(confidence: Tensor, risk: float) -> Tensor:
    """Return the largest confidence with which an answer would raise the expected error above `risk`; −1 if none."""
    surest = confidence.flatten().double().sort(descending=True).values
    expected = (1 - surest).cumsum(0) / torch.arange(1, len(surest) + 1, device=surest.device)
    # No count leaves the device: a GPU would wait. Without an image there is no maximum, hence the −1 in front.
    return torch.cat([surest.new_full((1,), -1.0), surest.where(expected > risk, -1)]).amax()


def _like(sound: Tensor, known: Tensor) -> Tensor:
    """Return a mask of images with the dimensions of a mask of pixels."""
    return sound.view(-1, *[1] * (known.ndim - 1))


def entropy_of(probs: Tensor) -> Tensor:
    """Return −Σ p log p of each row, with 0 log 0 = 0."""
    return torch.special.entr(probs).sum(dim=1)


def mean_softmax(draws: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean softmax over draws of one batch, and the mean entropy of theirs: the answer of a step.

    Args:
        draws: the logits of each, one row per image.
    """
    probs = [logits.softmax(dim=1) for logits in draws]
    if len(draws) == 1:
        return probs[0], entropy_of(probs[0])
    parts = [(each / len(draws), entropy_of(each) / len(draws)) for each in probs]
    mean, entropy = parts[0]
    for more, its_entropy in parts[1:]:
        mean, entropy = mean + more, entropy + its_entropy
    return mean, entropy


def histogram(labels: Tensor, classes: int) -> Tensor:
    """Return how often each class is the answer, in float32; −1 does not count.

    `bincount` would wait for the GPU to find the largest label.
    """
    counts, labels = torch.zeros(classes + 1, device=labels.device), labels.flatten()
    return counts.index_add_(0, labels + 1, torch.ones_like(labels, dtype=counts.dtype))[1:]


def entropy_and_balance(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy of the predictions, and the entropy of their mean over ln(classes)."""
    log_p = rows(logits).log_softmax(1)
    p = log_p.exp()
    balance = torch.special.entr(p.mean(0)).sum() / math.log(logits.shape[1])
    return -(p * log_p).sum(1).mean(), balance


def entropy_and_balance_of(prediction: Prediction) -> tuple[float, float]:
    """Return the mean entropy, and the entropy of the predicted classes over log C: 1 when all are as frequent."""
    classes = prediction.probs.shape[1]
    counts = histogram(prediction.label, classes)
    shares = counts / counts.sum().clamp_min(1)
    found = torch.stack([prediction.entropy.mean().to(shares), entropy_of(shares[None])[0]])
    entropy, spread = found.tolist()  # one transfer
    return entropy, spread / math.log(classes)
