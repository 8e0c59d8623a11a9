"""Everything undrift raises on purpose.

UndriftError
├── OptionError            an option or preset that does not exist, or a value it cannot take
├── CannotPerturb          a layer or network that cannot be perturbed faithfully
├── PerturbationMismatch   a domain file that does not belong to this network
├── CannotRecord           a step that cannot be made a CUDA graph
├── DataError              a folder, file or batch that is not what was needed
├── OutputError            a network output that is not a classifier's
└── ProcessLost            another process of a run of several has ended

Each message is three facts: what we found, what we needed, what to do.
"""


class UndriftError(Exception):
    """Base of all errors that undrift raises on purpose."""


class OptionError(UndriftError):
    """An option or preset does not exist, or cannot take the value given."""


class CannotPerturb(UndriftError):
    """A layer or a network cannot be perturbed faithfully."""


class PerturbationMismatch(UndriftError):
    """A domain file does not belong to this network."""


class CannotRecord(UndriftError):
    """A step cannot be recorded as a CUDA graph."""


class DataError(UndriftError):
    """A folder, file or batch is not what was needed."""


class OutputError(UndriftError):
    """A network's output is not that of a classifier."""


class ProcessLost(UndriftError):
    """Another process of a run of several has ended, so that this one cannot go on."""


class UndriftWarning(UserWarning):
    """Something that still works, and that the user should know."""
