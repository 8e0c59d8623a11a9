"""What every test starts from: one seed, one thread (the suite runs on two cores)."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("undrift", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("undrift")
torch.set_num_threads(1)  # tensors here are small: a second thread only waits


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
