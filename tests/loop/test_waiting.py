"""The loops ask the device for as few numbers as their decisions need: each is a wait, on a GPU."""

import pytest
import torch
from torch import Tensor

import undrift
from adapt_support import small
from support import convnet, images
from undrift import Prediction
from undrift.answer.prediction import histogram
from undrift.judge.verdict import survey
from undrift.likelihood import Information
from undrift.loop import epochs
from waiting_support import reads


def batches(count: int = 3) -> list[Tensor]:
    return [images(6, seed) for seed in range(count)]


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
    counts: list[int] = []
    step = epochs.Run._step

    def counted(*args: object) -> bool:
        with reads(monkeypatch) as seen:
            left = step(*args)  # type: ignore[arg-type]
        counts.append(seen.total)
        return left

    monkeypatch.setattr(epochs.Run, "_step", counted)
    undrift.adapt(small(), images(24), Information(), epochs=1, batch_size=6, progress=False)
    assert counts == [2, 2, 2, 2, 0]  # are the images finite, and are all numbers of the step; then the end


def test_a_survey_takes_many_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(count: int) -> int:
        parts = [(torch.arange(6) + 6 * i, torch.randn(6, 5)) for i in range(count)]
        with reads(monkeypatch) as seen:
            survey(lambda logits: logits, parts)
        return seen.total

    assert asked(2) == asked(20)
    monkeypatch.setattr("undrift.judge.verdict._AT_ONCE", 1)
    assert asked(20) > asked(2)


def test_an_answer_is_made_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.tensor([[0.9, 0.1], [torch.nan, 0.5], [0.2, 0.8]])
    sound = torch.tensor([True, False, True, False, True])
    with reads(monkeypatch) as seen:
        found = Prediction.of(probs, torch.tensor([0.1, 0.1, 0.1]), sound)
        counts = histogram(found.label, 2)
    assert seen.total == 0, seen.found
    assert found.label.tolist() == [0, -1, -1, -1, 1]
    torch.testing.assert_close(found.probs[1:4], torch.full((3, 2), 0.5))
    torch.testing.assert_close(found.probs[[0, 4]], probs[[0, 2]])
    assert found.mutual_info[1:4].tolist() == [0, 0, 0]
    assert (found.mutual_info[[0, 4]] > 0).all()
    assert counts.tolist() == [1, 1]
