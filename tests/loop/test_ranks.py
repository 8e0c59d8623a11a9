"""Two and three gloo processes adapt one network as one process does on the joined data."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import undrift
from adapt_support import source
from ranks_support import adapted, in_processes, target, write_files

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    method: (method, {}) for method in ("undrift", "vmp-shot", "nrc", "aad", "tent", "shot", "norm-stats", "bbb")
} | {
    "a loader": ("vmp-shot", {"kind": "loader"}),
    "files": ("vmp-shot", {"kind": "files"}),
    "bad images": ("undrift", {"bad": (3, 4, 5, 6, 7, 8)}),
    "the best epoch": ("undrift", {"keep": "best"}),
    "views in steps": ("undrift", {"step_views": ("mirror", "shift")}),
    "a low rank": ("undrift-light", {}),
}

ESTIMATES = ("source", "adapted", "gain")


def all_cases(rank: int, folder: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    for number, (method, how) in enumerate(CASES.values()):
        # Ranks that were given other seeds agree all the same: they take rank 0's.
        torch.save(adapted(method, rank, folder=f"{folder}/images", **how), Path(folder) / f"{number}-{rank}.pt")


@pytest.fixture(scope="module", params=[2, 3])
def joint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    write_files(folder / "images")
    in_processes(request.param, all_cases, str(folder))
    return request.param, folder


@pytest.mark.filterwarnings("ignore::undrift.UndriftWarning")
@pytest.mark.parametrize("case", CASES)
def test_processes_are_one_process_on_the_joined_data(joint: tuple[int, Path], case: str) -> None:
    """Weights, statistics, what a router knows, every step's numbers, the verdict: equal to 1e-5."""
    (count, folder), number = joint, list(CASES).index(case)
    method, how = CASES[case]
    alone = adapted(method, 0, folder=str(folder / "images"), **how)
    each = [torch.load(folder / f"{number}-{rank}.pt", weights_only=True) for rank in range(count)]
    for other in each[1:]:
        assert all(torch.equal(other["state"][name], value) for name, value in each[0]["state"].items())
    assert len(alone["state"]) > 5
    assert len(alone["rows"]) > 4
    for what in ("state", "router"):
        assert each[0][what].keys() == alone[what].keys()
        for name, value in alone[what].items():
            torch.testing.assert_close(each[0][what][name], value, rtol=1e-5, atol=1e-5, msg=f"{what} {name}")
    torch.testing.assert_close(each[0]["rows"], alone["rows"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(each[0]["answers"], alone["answers"], rtol=1e-5, atol=1e-5)
    assert (each[0]["bad"], each[0]["lone"]) == (alone["bad"], alone["lone"])
    for side in ("before", "after"):
        told, wanted = ({n: v or 0 for n, v in of["verdict"][side].items()} for of in (each[0], alone))
        assert told == pytest.approx(wanted, rel=1e-5)
    told, wanted = ([of["verdict"]["helping"][name]["value"] for name in ESTIMATES] for of in (each[0], alone))
    assert told == pytest.approx(wanted, abs=1e-5)
    assert each[0]["exchanged"] > 0 == alone["exchanged"]
    # Nothing is done twice, but for batches with fewer sound images than three processes, which each have whole, and
    # for the first two images, by which each sees what the network returns.
    first = 2 * (count - 1)
    assert sum(of["images"] for of in each) - first <= (1 if count == 2 else 1.3) * alone["images"]


class Entropy:
    """Entropy, for so many steps."""

    divisible = True

    def __init__(self, steps: float = math.inf) -> None:
        self.steps = steps

    def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
        self.steps -= 1
        if self.steps < 0:
            raise ZeroDivisionError
        return undrift.entropy(logits, step)

    def __repr__(self) -> str:
        return "Entropy()"


def adapt_entropy(path: str | Path, steps: float = math.inf) -> undrift.Perturbed:
    model = undrift.perturb(source(), generator=torch.Generator().manual_seed(1))
    order = torch.Generator().manual_seed(4)
    undrift.adapt(
        model, target(), Entropy(steps), 3, batch_size=8, checkpoint=path, checkpoint_steps=2, generator=order
    )
    return model


def stopped(rank: int, path: str) -> None:
    """End in the second epoch as if killed, with a checkpoint after two of its steps."""
    with pytest.raises(ZeroDivisionError):
        adapt_entropy(path, 10)


def gone_on(rank: int, path: str, out: str) -> None:
    model = adapt_entropy(path)
    if rank == 0:
        torch.save(model.state_dict(), out)


@pytest.mark.filterwarnings("ignore::undrift.UndriftWarning")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, before: int, after: int) -> None:
    path, out = str(tmp_path / "run.ckpt"), str(tmp_path / "out.pt")

    def run(count: int, work: Any, *given: str) -> None:
        work(0, *given) if count == 1 else in_processes(count, work, *given)

    run(1, gone_on, str(tmp_path / "whole.ckpt"), str(tmp_path / "whole.pt"))
    run(before, stopped, path)
    assert Path(path).exists()
    run(after, gone_on, path, out)
    whole, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "out.pt"))
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


class Broken(torch.utils.data.Dataset[Tensor]):
    def __init__(self, place: int | None) -> None:
        self.x, self.place = target(), place

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> Tensor:
        if place == self.place:
            raise ValueError("a broken sector")
        return self.x[place]


def with_errors(rank: int, folder: str) -> None:
    """Note what each process raises where one image cannot be read, data differ, or a process ends on its own."""
    told = {}
    for name, given in (
        ("broken", Broken(7)),
        ("other images", target() + rank),
        ("fewer images", target()[: 40 + rank]),
    ):
        model = undrift.perturb(source(), generator=torch.Generator().manual_seed(1))
        with pytest.raises(undrift.DataError) as caught:
            undrift.adapt(model, given, undrift.entropy, 1, batch_size=8)
        told[name] = str(caught.value)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))


def test_an_error_in_one_process_is_raised_in_all_with_its_words(tmp_path: Path) -> None:
    in_processes(2, with_errors, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert "a broken sector" in first["broken"]
    assert "process 1 of 2 has other options, images or network than process 0" in first["other images"]
    assert "the same in all" in first["fewer images"]


def with_a_loss(rank: int, folder: str) -> None:
    model = undrift.perturb(source(), generator=torch.Generator().manual_seed(1))
    steps = 0

    def loss(logits: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if rank == 1 and steps == 3:
            distributed.destroy_process_group()
            raise ZeroDivisionError
        return undrift.entropy(logits)

    wanted = undrift.ProcessLost if rank == 0 else ZeroDivisionError
    with pytest.raises(wanted) as caught:
        undrift.adapt(model, target(), loss, 1, batch_size=8)
    (Path(folder) / f"{rank}.txt").write_text(str(caught.value))
    if rank == 1:  # without a group: `in_processes` needs one to say goodbye
        distributed.init_process_group("gloo", init_method=f"file://{folder}/again", rank=0, world_size=1)
    else:
        distributed.destroy_process_group()
        distributed.init_process_group("gloo", init_method=f"file://{folder}/other", rank=0, world_size=1)


def test_a_lost_process_ends_the_others(tmp_path: Path) -> None:
    in_processes(2, with_a_loss, str(tmp_path))
    assert "another process of this run is gone" in (tmp_path / "0.txt").read_text()
