"""Lock a network for one thread at a time, because each prediction sets and restores its flags and noise."""

import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

# Beside the networks, not in them, as a lock can be neither copied nor pickled.
_locks: "weakref.WeakKeyDictionary[nn.Module, AbstractContextManager[Any]]" = weakref.WeakKeyDictionary()


def turn(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the (reentrant) lock that a thread holds while it uses the network.

    A perturbed network and the one inside have one lock each: inside `with model.off() as net:` other threads may use
    `net`. The lock itself is returned, as only its own `with` cannot be interrupted between acquire and release.
    """
    if torch.compiler.is_compiling():  # a compiled graph takes no locks
        return nullcontext()
    lock = _locks.get(model)
    # One atomic dict operation. A lock around it could be held for ever, by a thread lost in a fork, or by a signal
    # handler that uses a network.
    return _locks.setdefault(model, threading.RLock()) if lock is None else lock


def _all_free() -> None:
    """Drop all locks in a forked process, where the threads that held them are gone."""
    global _locks
    _locks = weakref.WeakKeyDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_free)
