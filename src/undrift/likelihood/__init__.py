"""Losses on unlabelled batches that stand for −log p, one file each.

A likelihood is called as `likelihood(logits, step)` and returns one number, a mean over the batch; `undrift.Step` holds
what else it may use. Any function of the logits alone works too. A likelihood with a `refresh` sees the whole domain
before each epoch.
"""

from undrift.likelihood.augment import Augment
from undrift.likelihood.consistency import Consistency
from undrift.likelihood.cotta import Cotta
from undrift.likelihood.entropy import entropy
from undrift.likelihood.gsfda import Gsfda
from undrift.likelihood.historical import Hcl
from undrift.likelihood.information import Information
from undrift.likelihood.neighbours import Aad, Nrc
from undrift.likelihood.reliable import ReliableEntropy
from undrift.likelihood.roid import Roid
from undrift.likelihood.rotation import Rotation
from undrift.likelihood.shot import Shot
from undrift.likelihood.teacher import Teacher
from undrift.likelihood.wrap import as_likelihood, one_number

__all__ = [
    "Aad",
    "Augment",
    "Consistency",
    "Cotta",
    "Gsfda",
    "Hcl",
    "Information",
    "Nrc",
    "ReliableEntropy",
    "Roid",
    "Rotation",
    "Shot",
    "Teacher",
    "as_likelihood",
    "entropy",
    "one_number",
]
