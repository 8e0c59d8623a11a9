"""What may change in a network while it adapts, as `Options`: the first axis of every method.

The paper's own scheme is `undrift.options.PAPER`: norm layers, and one variance per kernel.

NOTHING      the source network as it is
STATISTICS   norm layers use the statistics of each batch
DOMAIN       … or their mean over the domain
AFFINE       batch statistics; scale and shift of the norm layers are trained (Tent)
WEIGHTS      … and so is every weight
BAYES        mean and variance of every weight; no weight decay, because the prior already pulls the means
"""

from undrift.options import PAPER, Options

# Deterministic schemes have no draws, and answer with the forward pass that gave the gradient.
_PLAIN = Options(layers=(), kl_weight=0.0, test_samples=0, answer="before", weight_decay=0.0)

NOTHING = _PLAIN.replace(norm_statistics="source", norm_affine=False)
STATISTICS = _PLAIN.replace(norm_statistics="batch", norm_affine=False)
DOMAIN = _PLAIN.replace(norm_statistics="domain", norm_affine=False)
AFFINE = _PLAIN.replace(norm_statistics="batch")
WEIGHTS = AFFINE.replace(train="*")
# The KL holds a mean near the source's weight; weight decay would pull it to 0, which is not this prior.
BAYES = PAPER.replace(train="*", conv_sharing="weight", linear_sharing="weight", weight_decay=0.0)
