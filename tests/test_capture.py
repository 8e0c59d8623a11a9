"""A captured step where there is nothing to capture; tests/test_gpu.py has the rest."""

import torch

import undrift


def test_on_a_cpu_every_call_is_the_step_itself() -> None:
    seen: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> int:
        seen.append(x)
        return len(seen)

    fast = undrift.Captured(step)
    batches = [torch.full((size,), float(size)) for size in (2, 2, 3, 2, 2)]
    assert [fast(batch) for batch in batches] == [1, 2, 3, 4, 5]
    assert all(got is given for got, given in zip(seen, batches, strict=True))
    assert undrift.Captured(lambda: "nothing")() == "nothing"
