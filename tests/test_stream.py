"""Streams: one step a batch, one answer a batch, and a state that nothing can poison."""

import copy
import gc
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from support import convnet, images, learnables, same, snapshot
from undrift._guard import Guard
from undrift.likelihood import Consistency, Information, Shot, entropy
from undrift.optimise import make_optimiser
from undrift.predict import predict
from undrift.prediction import Prediction
from undrift.stream import Stream, stream

NAN, INF = float("nan"), float("inf")


def model_of(seed: int = 0, **options: object) -> undrift.Perturbed:
    torch.manual_seed(seed)
    return undrift.perturb(convnet(), generator=torch.Generator().manual_seed(seed), **options)


def batches(count: int, size: int = 6) -> list[Tensor]:
    return [images(size, seed) for seed in range(count)]


def equal(a: Prediction, b: Prediction) -> bool:
    return torch.equal(a.probs, b.probs) and torch.equal(a.mutual_info, b.mutual_info)


def state_of(model: undrift.Perturbed) -> dict[str, Tensor]:
    return snapshot(model)


def test_a_step_by_hand() -> None:
    model = model_of(train_samples=1, norm_statistics="source")
    twin = copy.deepcopy(model)
    (p,) = stream(model, [images()], answer="before", lr=0.01)
    twin.eval()
    optimiser = make_optimiser(twin, "adam", 0.01)
    logits = twin(images())
    (entropy(logits) + undrift.kl(twin, "sum") / 6).backward()
    optimiser.step()
    assert same(state_of(model), state_of(twin))
    assert torch.equal(p.probs, logits.detach().softmax(1))
    # The data size is what was seen so far.
    s = stream(model, batches(3))
    list(s)
    assert s.online.seen == 18


def test_several_draws_are_averaged_and_move_statistics_once() -> None:
    model = model_of(train_samples=3, norm_affine=False, stream_norm_momentum=0.1)
    twin = copy.deepcopy(model)
    (p,) = stream(model, [images()], answer="before", lr=0.0)
    twin.eval()
    twin.key.training = True
    first = twin(images())
    with twin.rest():
        probs = [first.softmax(1), *(twin(images()).softmax(1) for _ in range(2))]
    torch.testing.assert_close(p.probs, torch.stack(probs).mean(0))
    assert torch.equal(model.net[1].running_mean, twin.net[1].running_mean)
    assert (p.mutual_info > 0).all()


def test_the_three_answers() -> None:
    twins = {a: model_of() for a in ("before", "after", "samples")}
    answers = {a: next(stream(m, [images()], answer=a)) for a, m in twins.items()}
    own = {a: {n: p.detach() for n, p in learnables(m).items()} for a, m in twins.items()}
    assert same(own["before"], own["after"])
    assert same(own["before"], own["samples"])
    # After the same step: one forward pass, and ten, that take up the noise where the step left it.
    after = twins["before"]
    torch.testing.assert_close(answers["after"].probs, predict(copy.deepcopy(after), images(), 1).probs, rtol=0, atol=0)
    assert equal(answers["samples"], predict(copy.deepcopy(after), images(), 10))
    assert not equal(answers["before"], answers["after"])
    assert (answers["samples"].mutual_info > 0).all()
    default = next(stream(model_of(), [images()]))
    assert equal(default, answers["samples"])
    mean = model_of(test_samples=0)
    assert equal(next(stream(mean, [images()])), predict(mean, images(), 0))


def test_the_model_is_the_users_between_batches() -> None:
    model = model_of().train()
    flags = [m.training for m in model.modules()]
    statistics = model.net[1].running_mean.clone()
    with torch.no_grad():
        for p in stream(model, batches(2)):
            assert [m.training for m in model.modules()] == flags
            assert all(q.grad is None for q in learnables(model).values())
            assert not p.probs.requires_grad
            with model.off():
                model(images())
    assert not torch.equal(model.net[1].running_mean, statistics)
    with torch.inference_mode():
        list(stream(model, (images() for _ in range(2))))
    model(images()).sum().backward()


def test_entropy_falls() -> None:
    model = model_of(norm_statistics="batch")
    x = images(32)
    predictions = list(stream(model, [x] * 15, lr=0.02))
    assert predictions[-1].entropy.mean() < 0.9 * predictions[0].entropy.mean()


def test_an_episode_starts_from_the_start_bit_for_bit() -> None:
    for options in ({"norm_statistics": "moving"}, {"stream_optimiser": "sgd", "stream_lr": 0.1}):
        fresh = [next(stream(model_of(**options), [b], lr=0.05)) for b in batches(3)]
        model = model_of(**options)
        s = stream(model, batches(3), lr=0.05, episodic=True)
        assert all(equal(a, b) for a, b in zip(s, fresh, strict=True))
        assert s.report.resets == 0
        other = model_of(**options)
        list(stream(other, batches(3)[2:], lr=0.05))
        assert same(state_of(model), state_of(other))
    continual = list(stream(model_of(), batches(3), lr=0.05))
    assert not equal(continual[2], next(stream(model_of(), batches(3)[2:], lr=0.05)))


@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
def test_a_batch_of_one_and_a_short_last_batch(statistics: str) -> None:
    model = model_of(norm_statistics=statistics)
    sizes = [len(p) for p in stream(model, [images(1), images(6), images(1, 5)])]
    assert sizes == [1, 6, 1]
    assert all(torch.isfinite(v).all() for v in state_of(model).values())


def test_one_value_a_channel_is_named_and_the_stream_goes_on() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x = torch.rand(4, 3, 2, 2)
    model = undrift.perturb(net, norm_statistics="batch")
    before = {n: v for n, v in state_of(model).items() if n != "key.step"}
    s = stream(model, [x[:1], x])
    with pytest.raises(undrift.UndriftError, match=r"one value a channel.*larger batch"):
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


def test_an_interrupted_stream_goes_on_exactly_where_it_stood() -> None:
    x = batches(6)
    x[1] = x[1].clone()
    x[1][3] = NAN
    settings = {"lr": 0.02, "guard": True}
    whole = stream(model_of(), x, Information(), **settings)
    expected = list(whole)
    first = stream(model_of(), x[:3], Information(), **settings)
    got = list(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    list(stream(first.model, x[3:], lr=0.5))  # what happens afterwards does not reach the saved state
    file.seek(0)
    second = stream(model_of(), x[3:], Information(), guard=True)
    second.load_state_dict(torch.load(file, weights_only=True))
    got += list(second)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same(state_of(second.model), state_of(whole.model))
    assert second.report == whole.report
    assert list(second.report.skipped_at) == [9]
    assert str(second.online.optimiser.state_dict()) == str(whole.online.optimiser.state_dict())


def test_a_state_is_not_changed_by_the_stream_that_gave_it() -> None:
    s = stream(model_of(), batches(4))
    next(s)
    state = s.state_dict()
    kept = copy.deepcopy(state)
    list(s)
    assert str(state) == str(kept)


def test_a_state_of_another_network_changes_nothing() -> None:
    s = stream(model_of(), batches(2))
    next(s)
    for model in (
        undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(192, 5))),
        model_of(exclude="8"),
        model_of(linear_sharing="kernel"),
    ):
        before = state_of(model)
        with pytest.raises(undrift.PerturbationMismatch, match=r"changed; .*same source network and options"):
            stream(model, []).load_state_dict(s.state_dict())
        assert same(state_of(model), before)
    with pytest.raises(undrift.PerturbationMismatch, match="no identity, model, start"):
        s.load_state_dict({})
    model, state = model_of(), s.state_dict()
    before = state_of(model)
    state["optimiser"]["param_groups"].pop()
    with pytest.raises(undrift.PerturbationMismatch, match="optimiser is another"):
        stream(model, []).load_state_dict(state)
    assert same(state_of(model), before)


def test_an_interrupt_leaves_a_usable_network() -> None:
    class Camera:
        def __iter__(self) -> object:
            yield images()
            raise KeyboardInterrupt

    def interrupted(logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = model_of().train()
    flags = [m.training for m in model.modules()]
    s = stream(model, Camera())
    next(s)
    state = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        next(s)
    with pytest.raises(KeyboardInterrupt):
        next(stream(model, [images()], interrupted))
    assert [m.training for m in model.modules()] == flags
    assert same({**state_of(model), "key.step": state["key.step"]}, state)
    assert all(p.grad is None for p in learnables(model).values())
    assert len(next(stream(model, [images()]))) == 6
    for p in stream(model, batches(3)):
        assert len(p) == 6
        break
    model.remove()


def test_memory_stays_constant() -> None:
    model = model_of(test_samples=2)
    x = images(2)
    s = stream(model, (x * (NAN if i % 3 == 0 else 1) for i in range(200)), guard=True)

    def living() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(110):  # the noise's tickets of the last 64 passes are kept
        next(s)
    before, tickets = living(), len(model.key.replay.forwards)
    assert sum(len(p) for p in s) == 180
    assert living() <= before + 2
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
        s = stream(model, [x] * 12, to_one_class, lr=0.3, guard=guard, answer="before")
        answers = list(s)
        assert (s.report.resets > 0) == guard
        if guard:
            batch, why = s.report.resets_at[0]
            assert why == "collapsed"
            # The batch that showed it is answered by the network that was put back.
            assert answers[batch].label.unique().numel() == 3
        else:
            assert answers[-1].label.bincount().max() >= 29  # of 32: a draw may stray


def test_the_guard_by_hand() -> None:
    guard = Guard()
    guard.source, guard.adapted = torch.tensor([5.0, 5.0]), torch.tensor([10.0, 0.0])
    copied = Guard()
    copied.load_state_dict(guard.state_dict())
    assert torch.equal(copied.source, guard.source)
    guard.forget()
    assert guard.source is guard.adapted is None
    guard.adapted, guard.source = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    model = undrift.perturb(Orthogonal())
    assert not guard.collapsed(model, images(11))  # 14 of 30: too few images to judge
    guard.adapted, guard.source = torch.tensor([30.0, 0.0, 0.0]), torch.tensor([10.0, 10.0, 10.0])
    assert guard.collapsed(model, images(1))
    assert float(guard.source.sum()) == pytest.approx(30)  # 30 · (1 − 1/30) + 1


def test_progress_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with stream(model_of(), [images() + NAN, *batches(2)], progress=True) as s:
        assert math.isnan(s.latest["loss"])
        list(s)
    shown = capsys.readouterr().err
    for word in ("stream", "loss", "kl", "entropy", "balance"):
        assert word in shown
    assert 0 <= s.latest["balance"] <= 1
    assert s.latest["kl"] > 0


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda m: stream(convnet(), []), undrift.OptionError, r"Sequential.*undrift\.perturb\(net\)"),
        (lambda m: stream(m, images()), undrift.DataError, r"a Tensor.*split"),
        (lambda m: stream(m, 3), undrift.DataError, "an iterable"),
        (lambda m: stream(m, [], answer="sample"), undrift.OptionError, "did you mean 'samples'"),
        (lambda m: stream(m, [], lr=-1.0), undrift.OptionError, "lr=-1.0"),
        (lambda m: stream(m, [], "entropy"), undrift.OptionError, "likelihood='entropy'"),
        (lambda m: next(stream(m, [images()], Shot())), undrift.OptionError, "Information"),
        (lambda m: next(stream(m, [images()], lambda z: z)), undrift.OptionError, "one number"),
        (lambda m: next(stream(m, ["photo"])), undrift.DataError, "str objects"),
    ],
)
def test_misuse_is_named(call: object, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        call(model_of())  # type: ignore[operator]


def test_activation_checkpointing_gives_the_same_stream() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.on = convnet(), on

        def forward(self, x: Tensor) -> Tensor:
            part = self.body[:4]
            return self.body[4:](checkpoint(part, x, use_reentrant=False) if self.on else part(x))

    states = []
    for on in (False, True):
        model = undrift.perturb(Checkpointed(on), generator=torch.Generator().manual_seed(0), train_samples=2)
        # The mean network's pass runs again in the backward pass too, when mean() is long over.
        list(stream(model, batches(3), Consistency(1.0, entropy), lr=0.05))
        states.append(state_of(model))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_a_stream_is_an_iterator() -> None:
    s = stream(model_of(), batches(1))
    assert isinstance(s, Stream)
    assert iter(s) is s
    next(s)
    with pytest.raises(StopIteration):
        next(s)


def test_statistics_move_at_the_pace_of_a_stream() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.0, norm_momentum=0.1, stream_norm_momentum=0.5)
    seen = model.net[0](images()).detach().mean((0, 2, 3))  # what the norm layer sees
    before = model.net[1].running_mean.clone()
    list(stream(model, [images()], answer="before"))
    torch.testing.assert_close(model.net[1].running_mean, 0.5 * before + 0.5 * seen)
    assert model.norms[0].momentum == 0.1


def test_a_state_of_other_weights_or_options_is_refused() -> None:
    first = stream(undrift.perturb(convnet()), [images()])
    next(first)
    for model, what in (
        (undrift.perturb(convnet()), "network"),
        (undrift.perturb(convnet(), norm_statistics="batch"), "norm_statistics"),
    ):
        with pytest.raises(undrift.PerturbationMismatch, match=what):
            stream(model, []).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"method": "sar"}, "likelihood, keepers"),
        ({"method": "roid", "ensemble": 0.5}, "keepers"),
        ({"method": "roid", "sharpness": 1.0}, "likelihood"),
    ],
)
def test_a_state_of_another_method_or_setting_changes_nothing(other: dict[str, object], what: str) -> None:
    net, twin = convnet(), convnet()
    twin.load_state_dict(net.state_dict())
    first = stream(net, batches(2), method="roid")
    list(first)
    second = stream(twin, batches(2), **other)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(undrift.PerturbationMismatch, match=rf"another stream: .*{what} changed"):
        second.load_state_dict(first.state_dict())
    assert str(second.state_dict()) == str(before)
    again = stream(twin, batches(2), method="roid") if second.remove() is twin else None
    assert again is not None
    again.load_state_dict(first.state_dict())
    assert same(state_of(again.model), state_of(first.model))


def test_a_state_that_fails_half_way_is_taken_back() -> None:
    class Fragile(undrift.Shot):
        """Any likelihood with a state of its own."""

        def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
            return entropy(logits)

        def load_state_dict(self, state: dict[str, object], model: object = None) -> None:
            if state:
                raise RuntimeError("no")

        def state_dict(self) -> dict[str, object]:
            return {}

    first, second = (stream(model_of(), batches(1), Fragile()) for _ in range(2))
    next(first)
    state, before = first.state_dict() | {"likelihood": {"x": 1}}, second.state_dict()
    with pytest.raises(RuntimeError, match="no"):
        second.load_state_dict(state)
    assert str(second.state_dict()) == str(before)


def test_a_method_starts_inside_inference_mode() -> None:
    net = convnet()
    with torch.inference_mode():
        s = stream(net, batches(2), method="tent")
        before = net[1].weight.clone()
        list(s)
        assert s.report.steps == 2
        assert not torch.equal(net[1].weight, before)
        s.remove()
