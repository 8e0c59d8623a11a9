"""undrift: source-free domain adaptation by variational model perturbation, for any PyTorch network."""

from undrift._errors import (
    CannotPerturb,
    DataError,
    OptionError,
    OutputError,
    PerturbationMismatch,
    UndriftError,
    UndriftWarning,
)
from undrift.objective import kl, kl_term
from undrift.options import Options, preset
from undrift.perturb import Perturbed, perturb

__all__ = [
    "CannotPerturb",
    "DataError",
    "OptionError",
    "Options",
    "OutputError",
    "PerturbationMismatch",
    "Perturbed",
    "UndriftError",
    "UndriftWarning",
    "kl",
    "kl_term",
    "perturb",
    "preset",
]
