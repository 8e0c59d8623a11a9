"""Ctrl-C and SIGTERM between two batches: they wait, then take effect; ends that are somebody else's stay."""

import signal

import pytest

from undrift import DataError
from undrift.cli.signals import sigterm_as_ctrl_c, stopping_between_batches
from undrift.images.workers import _lost


def test_a_stop_waits_for_the_end_and_a_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), stopping_between_batches() as pressed:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append("batch")
        assert pressed == [signal.SIGINT]
    assert done == ["batch"]
    with pytest.raises(KeyboardInterrupt), stopping_between_batches():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["batch"]
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_is_noted_and_ends_as_ctrl_c_does() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with sigterm_as_ctrl_c() as came:
        with pytest.raises(KeyboardInterrupt), stopping_between_batches() as pressed:  # noqa: PT012
            signal.raise_signal(signal.SIGTERM)
            assert (pressed, came) == ([signal.SIGTERM], [])
        assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_a_caller_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_as_ctrl_c() as came, stopping_between_batches() as pressed:
            signal.raise_signal(signal.SIGTERM)
        assert (came, pressed) == ([], [])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_processes_that_were_stopped_too_are_no_error_of_their_own() -> None:
    lost = DataError(_lost("was lost to SIGTERM", 2))
    with pytest.raises(KeyboardInterrupt), stopping_between_batches():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise lost
    with pytest.raises(DataError, match="was lost to SIGTERM"), stopping_between_batches():
        raise lost
    with pytest.raises(DataError, match="full"), stopping_between_batches():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise DataError("the disk is full")
