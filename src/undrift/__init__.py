"""undrift: source-free domain adaptation by variational model perturbation, for any PyTorch network.

The verbs, in the order of use: `perturb` a network, `adapt` it to unlabelled data or let it follow a `stream`,
`predict`, `evaluate`, `save` and `load` the domain, answer with many `packs` at once, `export` the adapted network.
"""

from undrift import images, methods
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
from undrift._types import Step
from undrift.adapt import adapt
from undrift.answer.prediction import Prediction
from undrift.answer.temperature import temperature
from undrift.answer.together import together
from undrift.evaluate import evaluate, evaluate_continual, evaluate_generalized
from undrift.images.corrupt import corrupt
from undrift.judge import shift
from undrift.judge.accuracy import Helping
from undrift.judge.history import History
from undrift.judge.report import Report, join
from undrift.judge.verdict import Verdict
from undrift.likelihood import Consistency, Information, Shot, as_likelihood, entropy
from undrift.loop.cuda_graph import Captured
from undrift.loop.streaming import Stream
from undrift.objective import kl, kl_term, step_loss
from undrift.options import Options, preset
from undrift.packs.collection import Packs
from undrift.packs.domain_file import DomainFile, inspect
from undrift.packs.export import export
from undrift.packs.file import load, save
from undrift.packs.fingerprint import fingerprint
from undrift.packs.open_packs import packs
from undrift.packs.routed import Routed
from undrift.perturb import perturb, remove
from undrift.posterior.perturbed import Perturbed
from undrift.predict import predict
from undrift.stream import stream

__all__ = [
    "CannotPerturb",
    "CannotRecord",
    "Captured",
    "Consistency",
    "DataError",
    "DomainFile",
    "Helping",
    "History",
    "Information",
    "OptionError",
    "Options",
    "OutputError",
    "Packs",
    "PerturbationMismatch",
    "Perturbed",
    "Prediction",
    "Report",
    "Routed",
    "Shot",
    "Step",
    "Stream",
    "UndriftError",
    "UndriftWarning",
    "Verdict",
    "adapt",
    "as_likelihood",
    "corrupt",
    "entropy",
    "evaluate",
    "evaluate_continual",
    "evaluate_generalized",
    "export",
    "fingerprint",
    "images",
    "inspect",
    "join",
    "kl",
    "kl_term",
    "load",
    "methods",
    "packs",
    "perturb",
    "predict",
    "preset",
    "remove",
    "save",
    "shift",
    "step_loss",
    "stream",
    "temperature",
    "together",
]
