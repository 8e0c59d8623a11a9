"""Threads that use one network take turns: an answer sets flags and noise of the whole network, and puts them back.

Two that did so at once would put back what the other had set, for good.
"""

import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

# Beside the networks, not in them: a lock can be neither copied nor pickled.
_locks: "weakref.WeakKeyDictionary[nn.Module, AbstractContextManager[Any]]" = weakref.WeakKeyDictionary()


def turn(model: nn.Module) -> AbstractContextManager[Any]:
    """Return what a thread holds, by `with`, while it uses the network; within it, the same thread may take it again.

    A perturbed network and the one inside have a turn each: inside `with model.off() as net:` other threads may ask
    `net`. The lock itself is returned, as only its own `with` cannot be stopped between taking it and giving it back.
    """
    if torch.compiler.is_compiling():  # a graph has no locks in it
        return nullcontext()
    lock = _locks.get(model)
    # One operation of a dict, which no thread sees half done. A lock around it could be held for ever: by a thread that
    # was forked away, or by a signal's handler that comes in between and asks a network.
    return _locks.setdefault(model, threading.RLock()) if lock is None else lock


def _all_free() -> None:
    """Start without locks in a forked process: the threads that held some are not there to give them back."""
    global _locks
    _locks = weakref.WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_free)
