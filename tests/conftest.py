"""What every test starts from: one seed, one thread (the suite runs on two cores)."""

import os

import pytest
import torch
from hypothesis import settings

pytest_plugins = ["image_fixtures", "skips"]

# Without a GPU Triton's kernels run in its interpreter. Triton reads this when it is imported, which the compiler does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests choose for themselves whether layers are native or Python's (`how`); on a GPU all others are native.
os.environ.setdefault("UNDRIFT_NATIVE", "wait" if torch.cuda.is_available() else "0")

settings.register_profile("undrift", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("undrift")
torch.set_num_threads(1)  # tensors here are small: a second thread only waits


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["native", "python"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let layers that were met before have their noise in C++, or in Python."""
    from fused_support import use  # imports Triton

    name: str = request.param
    use(name, monkeypatch)
    return name
