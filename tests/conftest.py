"""What every test starts from: one seed, one thread (the suite runs on two cores)."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["image_fixtures", "skips"]

# Without a GPU Triton's kernels run in its interpreter. Triton reads this when it is imported, which the compiler does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("undrift", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("undrift")
torch.set_num_threads(1)  # tensors here are small: a second thread only waits


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is the current one, and that modules are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
