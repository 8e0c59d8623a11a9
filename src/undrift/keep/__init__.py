"""Keepers: what keeps a network near its source beside the KL, one file each; `Keeper` documents the order of calls."""

from undrift._types import Keeper
from undrift.keep.ensemble import Ensemble
from undrift.keep.fisher import Fisher
from undrift.keep.masks import MaskedGradients
from undrift.keep.posterior import Moments, Posterior
from undrift.keep.recovery import Recovery
from undrift.keep.restore import Restore
from undrift.keep.still import Still

__all__ = ["Ensemble", "Fisher", "Keeper", "MaskedGradients", "Moments", "Posterior", "Recovery", "Restore", "Still"]
