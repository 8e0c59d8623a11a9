"""Streams: one step a batch, one answer a batch, and the model is the user's in between."""

import copy
import dataclasses
import math
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from faults import Terminal, environment
from stream_support import NAN, batches, equal, model_of, state_of
from support import convnet, images, learnables, same
from undrift import Stream
from undrift.likelihood import Consistency, Shot, entropy
from undrift.predict import predict
from undrift.stream import stream


def test_a_step_by_hand() -> None:
    model = model_of(train_samples=1, norm_statistics="source")
    twin = copy.deepcopy(model)
    (p,) = stream(model, [images()], answer="before", lr=0.01)
    twin.eval()
    optimiser = torch.optim.Adam(learnables(twin).values(), 0.01, fused=True)
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
    more = undrift.Step(twin, images(), twin).drawn_logits
    probs = [first.softmax(1), *(more().softmax(1) for _ in range(2))]
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
    with pytest.warns(undrift.UndriftWarning, match="kept from passes with noise"):
        answer = next(stream(mean, [images()]))
    assert equal(answer, predict(mean, images(), 0))


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


def test_progress_is_shown() -> None:
    with redirect_stderr(Terminal()) as terminal, environment(COLUMNS="200", TERM="xterm"):
        with stream(model_of(), [images() + NAN, *batches(2)], progress=True) as s:
            assert math.isnan(s.latest["loss"])
            list(s)
        shown = terminal.getvalue()
    for word in ("stream", "images 18", "steps 2", "loss", "entropy", "balance"):
        assert word in shown
    assert 0 <= s.latest["balance"] <= 1
    assert s.latest["kl"] > 0


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda m: stream(convnet(), [], entropy), undrift.OptionError, r"Sequential.*undrift\.perturb\(net\)"),
        (lambda m: stream(m, images()), undrift.DataError, r"a Tensor.*split"),
        (lambda m: stream(m, 3), undrift.DataError, "an iterable"),
        (
            lambda m: stream(m, [], answer="sample"),
            undrift.OptionError,
            r"did you mean 'samples'.*Leave it out for the options' own, samples",
        ),
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


@pytest.mark.parametrize("labelled", [True, False])
def test_the_advice_for_a_domain_can_be_followed(labelled: bool, tmp_path: Path) -> None:
    pixels = (images(6) * 255).to(torch.uint8)
    labels = torch.zeros(6, dtype=torch.long) if labelled else None
    np.save(tmp_path / "images.npy", pixels.permute(0, 2, 3, 1).numpy())
    files = dataclasses.replace(undrift.images.domain(tmp_path / "images.npy"), labels=labels)
    for domain in (files, undrift.images.TensorDomain("six", pixels, labels)):
        with pytest.raises(undrift.DataError, match=r"an iterable of batches.*\(domain\.named_batches\(200\)\)"):
            stream(model_of(), domain)
        assert [len(p) for p in stream(model_of(), domain.named_batches(4))] == [4, 2]


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


def test_a_method_starts_inside_inference_mode() -> None:
    net = convnet()
    with torch.inference_mode():
        s = stream(net, batches(2), method="tent")
        before = net[1].weight.clone()
        list(s)
        assert s.report.steps == 2
        assert not torch.equal(net[1].weight, before)
        s.remove()
