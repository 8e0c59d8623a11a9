"""What is asked of unlabelled data: losses of a batch's logits that stand for −log p, one file each.

A likelihood is called as `likelihood(logits, step)` and returns one number, a mean over the batch; `undrift.Step` holds
what else it may look at. Any function of the logits alone fits too. One that looks at the whole domain before each
epoch has a `refresh` as well.
"""

from undrift.likelihood.consistency import Consistency
from undrift.likelihood.entropy import entropy
from undrift.likelihood.information import Information
from undrift.likelihood.shot import Shot
from undrift.likelihood.wrap import as_likelihood, one_number

__all__ = ["Consistency", "Information", "Shot", "as_likelihood", "entropy", "one_number"]
