"""The loops ask the device for as few numbers as their decisions need: each is a wait, on a GPU."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import undrift
from adapt_support import small
from support import convnet, images, varied
from undrift.likelihood import Information
from waiting_support import reads


def batches(count: int = 3) -> list[Tensor]:
    return [images(6, seed) for seed in range(count)]


def patterns(seed: int, count: int = 96) -> Tensor:
    """Return images of three kinds, which a network tells apart by their brightest channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 8, 8, generator=generator)
    x[torch.arange(count), torch.randint(3, (count,), generator=generator)] += 2
    return x


def test_reads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4)
    asking = [
        lambda: bool(x.sum() > 0),
        lambda: float(x[0]),
        lambda: x.tolist(),
        lambda: x[x > 0.5],
        lambda: x.masked_fill(x > 0.5, 0).nonzero(),
        lambda: x.long().bincount(),
        lambda: x.cpu(),
        lambda: x.new_tensor([1.0]),
    ]
    for ask in asking:
        with reads(monkeypatch) as seen:
            ask()
        assert seen.total == 1
    with reads(monkeypatch) as seen:
        x.softmax(0).argmax() + x[torch.tensor([1, 2])].long()
    assert seen.total == 0


# Are all images finite? Are loss and gradient? Is the state, after the step?
@pytest.mark.parametrize(
    ("method", "settings", "most"),
    [
        ("source", {}, 2),
        ("norm-stats", {}, 2),
        ("tent", {}, 3),
        ("vmp", {}, 3),
        ("vmp", {"answer": "before"}, 3),
        ("vmp", {"guard": True}, 3),
        ("vmp", {"train_samples": 3}, 3),
        # Noise too small to matter is looked for now and then, not at every batch.
        ("vmp", {"init_fraction": 1e-6, "test_samples": 0, "answer": "samples"}, 3),
    ],
)
def test_a_batch_of_a_stream(
    method: str, settings: dict[str, object], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = undrift.stream(convnet(), batches(), method=method, **settings)
    next(s), next(s)
    with reads(
        monkeypatch, "source_state.py"
    ) as seen:  # off(), which the guard needs, looks for buffers that were changed
        next(s)
    assert seen.total == most, seen.found
    with reads(monkeypatch) as seen:
        assert set(s.latest) == {"loss", "likelihood", "kl", "entropy", "balance"}
    assert seen.total == 1, seen.found


# Are all images finite? Do views and the domain speak against them? Are loss and gradient finite, and the state after?
@pytest.mark.parametrize("agree", [True, False])  # where views disagree, the other signs are read as well
@pytest.mark.parametrize(("method", "more"), [("undrift-light", []), ("undrift", ["nonzero in sure_images.py"])])
def test_a_batch_of_a_stream_that_looks_after_itself(
    method: str, more: list[str], agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    camera = [patterns(seed) for seed in range(3)]
    if agree:  # one colour all over an image, which no view changes
        camera = [x.mean((2, 3), keepdim=True).expand_as(x).clone() for x in camera]
    s = undrift.stream(varied(convnet(), torch.cat(camera)), camera, method=method, guard=False)
    next(s), next(s)
    with reads(monkeypatch) as seen:
        next(s)
    assert s.report.steps == 3
    # Adam's counts and the choice of a view are on the CPU always.
    found = {asked.partition(":")[0] for asked in seen.found} - {
        "_local_scalar_dense in step.py",
        "_local_scalar_dense in teacher.py",
    }
    needed = ["_local_scalar_dense in streaming.py", "tolist in teacher.py", "tolist in step.py"]
    assert found == {*needed, "_local_scalar_dense in online.py", *more}
    allowed = dict.fromkeys([*needed, *more], 1) | {"tolist in teacher.py": 1}
    counts = {name: sum(n for asked, n in seen.found.items() if asked.startswith(name)) for name in allowed}
    assert counts == allowed


def test_a_stream_makes_one_pass_a_draw_and_no_more() -> None:
    model = undrift.perturb(convnet(), train_samples=2, test_samples=3)
    rows: list[int] = []
    model.net.register_forward_pre_hook(lambda _net, args: rows.append(len(args[0])))
    next(undrift.stream(model, batches(1), answer="samples"))
    assert sum(rows) == 6 * (2 + 3)
    rows.clear()
    next(undrift.stream(model, batches(1), answer="before"))
    assert sum(rows) == 6 * 2


def test_a_batch_of_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = undrift.perturb(convnet())
    with reads(monkeypatch) as seen:
        undrift.predict(model, batches(3), samples=4)
    assert seen.total == 3, seen.found


def test_a_step_of_adapt(monkeypatch: pytest.MonkeyPatch) -> None:
    before_each: list[int] = []

    def loss(logits: Tensor) -> Tensor:
        before_each.append(seen.total)
        return Information()(logits)

    with reads(monkeypatch) as seen:
        undrift.adapt(small(), images(24), loss, epochs=1, batch_size=6, progress=False)
    # Are all numbers of the step finite, and the images of the next one?
    assert [after - before for before, after in pairwise(before_each)] == [2, 2, 2]


def test_a_survey_takes_many_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(count: int) -> int:
        with reads(monkeypatch) as seen:
            undrift.adapt(small(), batches(count), epochs=1, progress=False)
        return sum(number for what, number in seen.found.items() if "verdict.py" in what)

    assert 0 < asked(2) == asked(20)


class Silent(nn.Module):
    """Says nothing of an image whose first value is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.scale * x[:, 0, :2, 0]
        return torch.where(x[:, :1, 0, 0] > 0, logits, torch.nan)


def test_an_answer_is_made_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(5) + 0.1
    x[1], x[3] = torch.nan, torch.nan
    x[2, :, 0, 0] = 0
    going = undrift.stream(Silent(), [x], method="source")
    with reads(monkeypatch) as seen:
        found = next(going)
    assert not [what for what in seen.found if "prediction.py" in what]  # which images are sound is known by then
    assert [label < 0 for label in found.label.tolist()] == [False, True, True, True, False]
    torch.testing.assert_close(found.probs[1:4], torch.full((3, 2), 0.5))
    torch.testing.assert_close(found.probs[[0, 4]], x[[0, 4], 0, :2, 0].softmax(1))
    assert found.mutual_info.tolist() == [0] * 5
