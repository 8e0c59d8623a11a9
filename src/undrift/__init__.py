"""undrift: source-free domain adaptation by variational model perturbation, for any PyTorch network.

The verbs, in the order of use: `perturb` a network, `adapt` it to unlabelled data or let it follow a `stream`,
`predict`, `evaluate`, `save` and `load` the domain, `export` the adapted network.
"""

from undrift import data, methods, shift, zoo
from undrift._domain_file import DomainFile, inspect
from undrift._errors import (
    CannotPerturb,
    CannotRecord,
    DataError,
    OptionError,
    OutputError,
    PerturbationMismatch,
    UndriftError,
    UndriftWarning,
)
from undrift._streaming import Stream
from undrift._types import Step
from undrift.adapt import adapt
from undrift.capture import Captured
from undrift.data.corrupt import corrupt
from undrift.evaluate import evaluate, evaluate_continual, evaluate_generalized
from undrift.export import export
from undrift.file import load, save
from undrift.fingerprint import fingerprint
from undrift.history import History
from undrift.likelihood import Consistency, Information, Shot, as_likelihood, entropy
from undrift.objective import kl, kl_term, step_loss
from undrift.options import Options, preset
from undrift.perturb import Perturbed, perturb, remove
from undrift.predict import predict
from undrift.prediction import Prediction
from undrift.report import Report, join
from undrift.stream import stream
from undrift.temperature import temperature
from undrift.together import together
from undrift.train import SourceHeader, Trained, TrainOptions, load_source, read_header, train_preset, train_source
from undrift.verdict import Verdict

__all__ = [
    "CannotPerturb",
    "CannotRecord",
    "Captured",
    "Consistency",
    "DataError",
    "DomainFile",
    "History",
    "Information",
    "OptionError",
    "Options",
    "OutputError",
    "PerturbationMismatch",
    "Perturbed",
    "Prediction",
    "Report",
    "Shot",
    "SourceHeader",
    "Step",
    "Stream",
    "TrainOptions",
    "Trained",
    "UndriftError",
    "UndriftWarning",
    "Verdict",
    "adapt",
    "as_likelihood",
    "corrupt",
    "data",
    "entropy",
    "evaluate",
    "evaluate_continual",
    "evaluate_generalized",
    "export",
    "fingerprint",
    "inspect",
    "join",
    "kl",
    "kl_term",
    "load",
    "load_source",
    "methods",
    "perturb",
    "predict",
    "preset",
    "read_header",
    "remove",
    "save",
    "shift",
    "step_loss",
    "stream",
    "temperature",
    "together",
    "train_preset",
    "train_source",
    "zoo",
]
