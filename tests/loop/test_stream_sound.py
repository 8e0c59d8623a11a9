"""No image, step or collapse poisons a stream: each is skipped, undone or reset, and counted."""

import gc

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import INF, NAN, batches, equal, model_of, state_of
from support import images, same
from undrift.likelihood import entropy
from undrift.stream import stream


def test_one_value_a_channel_is_named_and_the_stream_goes_on() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x = torch.rand(4, 3, 2, 2)
    model = undrift.perturb(net, norm_statistics="batch")
    before = {n: v for n, v in state_of(model).items() if n != "key.step"}
    s = stream(model, [x[:1], x])
    with pytest.raises(undrift.UndriftError, match=r"one value per channel.*larger batch"):
        next(s)
    assert same({n: v for n, v in state_of(model).items() if n != "key.step"}, before)
    assert len(next(s)) == 4
    moving = undrift.perturb(model.remove())
    assert [len(p) for p in stream(moving, [x[:1], x])] == [1, 4]


def test_unsound_images_are_skipped_counted_and_named() -> None:
    clean, dirty = model_of(norm_statistics="batch"), model_of(norm_statistics="batch")
    x = images(6)
    x[2, 1, 3, 3], x[5, 0, 0, 0] = NAN, -INF
    sound = [0, 1, 3, 4]
    s = stream(dirty, [images(6), x, images(6)])
    got = list(s)
    want = list(stream(clean, [images(6), x[sound], images(6)]))
    assert got[1].label[[2, 5]].tolist() == [-1, -1]
    torch.testing.assert_close(got[1].probs[[2, 5]], torch.full((2, 5), 0.2))
    assert torch.equal(got[1].probs[sound], want[1].probs)
    assert equal(got[2], want[2])
    assert same(state_of(clean), state_of(dirty))
    assert (s.report.images, s.report.batches, s.report.steps, s.report.skipped) == (18, 3, 3, 2)
    assert list(s.report.skipped_at) == [8, 11]
    assert "2 images skipped, NaN or infinite: 8, 11" in str(s.report)


def test_a_batch_without_a_finite_image_makes_no_step() -> None:
    model = model_of()
    before = state_of(model)
    s = stream(model, [images() + NAN, images(0)])
    first, second = s
    assert first.label.tolist() == [-1] * 6
    assert first.probs.shape == (6, 5)
    assert len(second) == 0
    assert same(state_of(model), before)
    assert (s.report.steps, s.report.missed, s.report.skipped) == (0, 2, 6)
    assert list(s.report.missed_at) == [(0, "no finite image"), (1, "no finite image")]


def exploding(logits: Tensor) -> Tensor:
    """A finite loss with an infinite gradient: √ at 0."""
    return (logits.sum() * 0).abs().sqrt() + entropy(logits)


def steep(logits: Tensor) -> Tensor:
    """A finite gradient whose square is not."""
    return logits.sum() * 1e25


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda z: z.sum() * NAN, "loss not finite"),
        (exploding, "gradient not finite"),
        (steep, "gradient not finite"),
    ],
)
def test_a_step_that_is_not_finite_is_not_taken(bad: object, why: str) -> None:
    model = model_of()
    before = {n: v for n, v in state_of(model).items() if n != "key.step"}
    s = stream(model, batches(2), bad)  # type: ignore[arg-type]
    for p in s:
        assert torch.isfinite(p.probs).all()
        assert (p.label >= 0).all()
    assert same({n: v for n, v in state_of(model).items() if n != "key.step"}, before)
    assert not s.online.optimiser.state
    assert (s.report.steps, list(s.report.missed_at)) == (0, [(0, why), (1, why)])


def test_a_step_that_ruins_the_state_is_undone() -> None:
    model = model_of(stream_optimiser="sgd", norm_statistics="source")
    start = {n: v for n, v in state_of(model).items() if n != "key.step"}
    s = stream(model, batches(3), lambda z: z.square().sum() * 1e4, lr=1e20)
    for p in s:
        assert torch.isfinite(p.probs).all()
        assert (p.label >= 0).all()
        assert same({n: v for n, v in state_of(model).items() if n != "key.step"}, start)
    assert s.report.resets == 3
    assert s.report.resets_at[0] == (0, "state not finite")
    assert "3 resets" in str(s.report)


def test_the_control_without_noise_is_a_sound_state() -> None:
    model = model_of(init_fraction=0.0)
    s = stream(model, batches(3), lr=0.01)
    for p in s:
        assert p.mutual_info.max() < 1e-6  # ten equal answers, up to rounding
    assert (s.report.steps, s.report.resets) == (3, 0)
    assert all((noise.log_var == -INF).all() for noise in model.noises())


def test_huge_finite_images_do_no_lasting_harm() -> None:
    model = model_of()
    s = stream(model, [images(), images() * 1e38, images()])
    assert [bool((p.label >= 0).all()) for p in s][::2] == [True, True]
    assert all(torch.isfinite(v).all() for v in state_of(model).values())


@pytest.mark.slow
def test_memory_stays_constant() -> None:
    model = model_of(test_samples=2)
    x = images(2)
    s = stream(model, (x * (NAN if i % 3 == 0 else 1) for i in range(3000)), guard=True)

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    def most(batches: int) -> int:
        found = 0
        for number in range(batches):
            next(s)
            found = max(found, living()) if number % 50 == 0 else found
        return found

    most(500)  # the noise's tickets of the last 64 passes are kept, and a sound state, which comes and goes
    before, tickets = most(1200), len(model.key.replay.forwards)
    assert most(1200) <= before + 2
    assert len(model.key.replay.forwards) <= max(tickets, 64)


def test_reports_of_months_stay_small() -> None:
    s = stream(model_of(), [])
    s.report.skipped_at.extend(range(5000))
    for i in range(5000):
        s.report.miss("x")
        s.report.batches = i
    assert len(s.report.skipped_at) == len(s.report.missed_at) == 1000
    assert s.report.missed == 5000
    assert str(s.report).startswith("0 images in 4,999 batches, 0 steps; 5,000 batches without a step: … ")


def to_one_class(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


class Orthogonal(nn.Module):
    """Says of an image which of its three channels is the largest; its norm layer can be bent to one class."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.norm, self.last = nn.AdaptiveAvgPool2d(1), nn.LayerNorm(3), nn.Linear(3, 3)
        with torch.no_grad():
            self.last.weight.copy_(3 * torch.eye(3))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.pool(x).flatten(1)))


def test_the_guard_resets_a_collapsed_stream_and_only_that() -> None:
    x = images(30)
    calm = stream(undrift.perturb(Orthogonal()), [x] * 5, guard=True)
    list(calm)
    assert calm.report.resets == 0
    # A stretch of one class is no collapse: the source network sees it too.
    one_class = x[(x.mean((2, 3)).argmax(1) == 0)]
    narrow = stream(undrift.perturb(Orthogonal()), [one_class] * 8, guard=True)
    list(narrow)
    assert narrow.report.resets == 0
    for guard in (False, True):
        model = undrift.perturb(Orthogonal())
        s = stream(model, [x] * 40, to_one_class, lr=0.3, guard=guard, answer="before")
        answers = list(s)
        assert (s.report.resets > 0) == guard
        if guard:
            batch, why = s.report.resets_at[0]
            assert why == "collapsed"
            # The batch that showed it is answered by the source network.
            assert answers[batch].label.unique().numel() == 3
        else:
            assert answers[-1].label.bincount().max() >= 29  # of 32: a draw may stray
