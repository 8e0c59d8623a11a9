"""Measure how certain and how diverse predictions are, for the numbers that loops show beside the loss."""

import math

import torch
from torch import Tensor

from undrift.answer.prediction import Prediction, entropy_of, histogram
from undrift.posterior.outputs import rows


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
