"""Two processes: ranks stay equal, and together they are one process on the joined batch."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

import undrift
from support import convnet, images

STEPS, SHARE = 10, 4
pytestmark = pytest.mark.slow  # processes of their own; test_noise has a rank's rows without them
SETTINGS = [(s, e) for s in ("source", "batch", "moving") for e in ("local", "drawn")]


def adapt(model: torch.nn.Module, perturbed: undrift.Perturbed, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    optimiser = torch.optim.SGD([p for p in perturbed.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for x in batches:
        logits = model(x)
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        loss = entropy + 0.1 * undrift.kl(perturbed)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: p.detach().clone() for name, p in perturbed.named_parameters() if p.requires_grad}


def perturbed(statistics: str, estimator: str, seed: int) -> undrift.Perturbed:
    torch.manual_seed(0)
    net = convnet()
    # Ranks that were given other seeds must agree all the same: DDP sends rank 0's.
    return undrift.perturb(
        net,
        norm_statistics=statistics,
        estimator=estimator,
        init_fraction=0.1,
        generator=torch.Generator().manual_seed(seed),
    )


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for statistics, estimator in SETTINGS:
            model = perturbed(statistics, estimator, seed=5 + rank)
            parallel = DistributedDataParallel(model)
            batches = [images(2 * SHARE, seed=s)[rank * SHARE : (rank + 1) * SHARE] for s in range(STEPS)]
            torch.save(adapt(parallel, model, batches), Path(folder) / f"{statistics}-{estimator}-{rank}.pt")
            del parallel
        distributed.barrier()  # neither leaves while the other still talks to it
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Run every setting in two processes, once; processes take seconds to start."""
    for attempt in range(3):
        with tempfile.TemporaryDirectory() as place:
            try:
                multiprocessing.spawn(work, (place,), nprocs=2)
            except multiprocessing.ProcessExitedException:
                # Gloo aborts now and then when its sockets close; what goes wrong in Python is another exception.
                if attempt == 2:
                    raise
                continue
            yield Path(place)
            return


@pytest.mark.parametrize(("statistics", "estimator"), SETTINGS)
def test_two_processes(folder: Path, statistics: str, estimator: str) -> None:
    files = [folder / f"{statistics}-{estimator}-{r}.pt" for r in range(2)]
    first, second = (torch.load(file, weights_only=True) for file in files)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    start = {
        n: p.detach().clone() for n, p in perturbed(statistics, estimator, 5).named_parameters() if p.requires_grad
    }
    assert all(not torch.equal(first[n], start[n]) for n in first)
    if statistics == "source":
        model = perturbed(statistics, estimator, seed=5)
        alone = adapt(model, model, [images(2 * SHARE, seed=s) for s in range(STEPS)])
        for name in first:
            torch.testing.assert_close(first[name], alone[name], rtol=1e-5, atol=1e-5)
