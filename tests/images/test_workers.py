"""Worker processes are a help: a lost one is said, where its images are waited for, and none need be there."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import undrift
from faults import environment
from undrift import DataError, OptionError
from undrift.images import Domain, workers
from undrift.images.workers import FEW, items_of, usual_workers


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    """Return forty images."""
    np.save(tmp_path / "forty.npy", np.zeros((40, 4, 4, 3), np.uint8))
    return undrift.images.domain(tmp_path / "forty.npy")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_worker_is_three_facts_where_it_is_waited_for(domain: Domain) -> None:
    batches = iter(domain.named_batches(2, workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(20):  # the user's own work: no signal raises in it
        time.sleep(0.02)
    needed = "one of 1 processes that decode images was lost to SIGKILL; needed: memory .* UNDRIFT_WORKERS .* 0"
    with pytest.raises(DataError, match=needed):
        list(batches)
    assert len(list(domain.named_batches(2, workers=1))) == 20  # others are not touched by it


def test_a_batch_without_room_in_shared_memory_is_said(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(workers, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(DataError, match=r"could not hand over a batch \(unable .* room for their batches in /dev/shm"):
        list(domain.named_batches(2, workers=0))


def test_the_environment_says_how_many() -> None:
    with environment(UNDRIFT_WORKERS=None):
        usual = usual_workers(FEW)
    assert usual >= 1
    for text, expected in (("0", 0), (" 3 ", 3), ("", usual)):
        with environment(UNDRIFT_WORKERS=text):
            assert usual_workers(FEW) == expected
            assert usual_workers(FEW - 1) == 0
    for text in ("many", "-1", "1.5"):
        with (
            environment(UNDRIFT_WORKERS=text),
            pytest.raises(OptionError, match=f"UNDRIFT_WORKERS is '{text}'; needed: how many processes"),
        ):
            usual_workers(FEW)


def test_none_decode_where_the_environment_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "many.npy", np.zeros((FEW, 4, 4, 3), np.uint8))
    batches = undrift.images.domain(tmp_path / "many.npy").named_batches(64)
    with environment(UNDRIFT_WORKERS="0"):
        alone = undrift.images.domain(tmp_path / "many.npy").named_batches(64)
    counts = []
    for each in (batches, alone):
        going = iter(each)
        next(going)
        counts.append(len(multiprocessing.active_children()))
        going.close()
    assert counts[0] >= 1
    assert counts[1] == 0


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("DataLoader worker (pid(s) 12) exited unexpectedly"), True),
        pytest.param(ConnectionResetError(104, "Connection reset by peer"), True, marks=pytest.mark.slow),
        pytest.param(EOFError(), True, marks=pytest.mark.slow),
        (RuntimeError("a bug of ours"), False),
        (OSError("Caught OSError in DataLoader worker process 0.\nOriginal Traceback"), False),
    ],
)
def test_what_counts_as_a_loss(error: Exception, lost: bool) -> None:
    class Loader:
        num_workers = 2

        def __iter__(self) -> Iterator[int]:
            yield 1
            raise error

    items = items_of(Loader())  # type: ignore[arg-type]
    assert next(items) == 1
    with pytest.raises(DataError if lost else type(error), match="one of 2 processes" if lost else str(error)[:6]):
        next(items)
