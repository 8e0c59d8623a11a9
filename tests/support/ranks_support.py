"""Run a function in several processes with a gloo group, and one adaptation that every number of processes can make."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, distributed, multiprocessing
from torch.utils.data import DataLoader

import undrift
from adapt_support import Labelled, domain, source

COUNT = 50  # in batches of 8: the last has two, fewer than three processes


def in_processes(count: int, work: Callable[..., None], *given: Any) -> None:
    """Call work(rank, *given) in `count` processes of one group."""
    for attempt in range(3):
        with tempfile.TemporaryDirectory() as folder:
            try:
                multiprocessing.spawn(_entered, (count, folder, work, given), nprocs=count)
            except multiprocessing.ProcessExitedException:
                # Gloo aborts now and then when its sockets close; what goes wrong in Python is another exception.
                if attempt == 2:
                    raise
                continue
            return


def _entered(rank: int, count: int, folder: str, work: Callable[..., None], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        work(rank, *given)
        distributed.barrier()  # neither leaves while the other still talks to it
    finally:
        distributed.destroy_process_group()


def target(bad: tuple[int, ...] = ()) -> Tensor:
    x, _ = domain(COUNT, 3, shifted=True)
    x[list(bad)] = torch.nan
    return x


def write_files(folder: Path) -> None:
    """Write the images as files, two of them damaged."""
    folder.mkdir()
    for number, image in enumerate(target().sigmoid().mul(255).byte()):
        path = folder / f"{number:02d}.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        if number in (8, 9):
            path.write_bytes(b"no image")


def adapted(
    method: str, seed: int, kind: str = "tensor", bad: tuple[int, ...] = (), folder: str = "", **how: Any
) -> dict[str, Any]:
    """Adapt the small network by a method, and return all that came of it as plain values and tensors."""
    x = target(bad)
    given: Any = x
    if kind == "loader":
        given = DataLoader(Labelled(x), 8, shuffle=True, generator=torch.Generator().manual_seed(5))
    elif kind == "files":
        given = undrift.images.domain(folder)
    torch.manual_seed(seed)
    net, seen = source(), list[int]()
    net.register_forward_pre_hook(lambda _net, given: seen.append(len(given[0])))
    history = undrift.adapt(
        net,
        given,
        method=method,
        batch_size=8,
        generator=torch.Generator().manual_seed(5 + seed),
        epochs=how.pop("epochs", 2),
        **how,
    )
    assert history.model is not None
    model, images = history.model, sum(seen)
    answers = undrift.predict(model, target(), samples=0).probs
    return {
        "state": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "router": dict(model.router),
        "answers": answers,
        "rows": torch.tensor([[row.loss, row.likelihood, row.kl, row.entropy, row.balance] for row in history.steps]),
        "verdict": None if history.verdict is None else history.verdict.as_dict(),
        "bad": history.bad_images,
        "lone": history.lone_batches,
        "exchanged": history.exchanged,
        "images": images,
    }
