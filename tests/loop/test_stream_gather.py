"""Images that come one by one: each is answered at once, and a step is made on many."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import NAN, Stopping, equal, model_of, state_of
from support import convnet, images, learnables, same
from undrift.likelihood import entropy
from undrift.predict import predict
from undrift.stream import stream

QUIET = {"layers": (), "test_samples": 0}


def singles(count: int = 12) -> list[Tensor]:
    return list(images(count).split(1))


def test_steps_are_those_of_the_gathered_batches() -> None:
    one_by_one, together = model_of(**QUIET), model_of(**QUIET)
    s = stream(one_by_one, singles(12), gather=6, lr=0.01)
    assert len(list(s)) == 12
    assert s.report.steps == 2
    assert s.report.missed == 0
    assert s.online.seen == 12
    list(stream(together, images(12).split(6), lr=0.01))
    assert same(learnables(one_by_one), learnables(together))
    norm, other = one_by_one.net[1], together.net[1]
    assert torch.equal(norm.running_mean, other.running_mean)
    assert torch.equal(norm.running_var, other.running_var)


@pytest.mark.parametrize("method", ["tent", "tent-ft", "roid", "sar", "eta", "eata", "cotta"])
def test_methods_make_the_steps_that_they_make_on_batches(method: str) -> None:
    source = {"source": images(12, seed=9)} if method == "eata" else {}
    found = []
    for x, gather in ((images(12).split(6), None), (singles(12), 6)):
        torch.manual_seed(0)
        s = stream(convnet(), x, method=method, gather=gather, stream_lr=0.01, **source)
        list(s)
        assert s.online.seen == 12
        found.append(learnables(s.model))
    assert same(*found)


def test_a_rest_that_does_not_fill_a_batch_waits() -> None:
    model = model_of(**QUIET)
    s = stream(model, singles(8), gather=6)
    list(s)
    assert s.report.steps == 1
    assert sum(map(len, s.gather.waiting)) == 2


def test_before_the_first_step_the_source_answers_bit_for_bit() -> None:
    net = convnet().eval()
    expected = net(images(5)[:1]).softmax(1)
    for changes in ({}, QUIET, {"norm_statistics": "source"}):
        model = undrift.perturb(copy.deepcopy(net), **changes)
        first = next(stream(model, singles(5), gather=5))
        if changes == {"norm_statistics": "source"}:  # no statistics that noise would not fit: draws, as ever
            assert (first.mutual_info > 0).all()
        else:
            assert torch.equal(first.probs, expected)


def test_answers_are_of_the_network_after_its_last_step() -> None:
    model = model_of()
    s = stream(model, singles(5), gather=3)
    answers = [next(s) for _ in range(4)]
    twin = copy.deepcopy(model)
    assert equal(next(s), predict(twin, singles(5)[4], 10))
    assert (answers[2].mutual_info > 0).all()  # the image that fills a batch is answered after the step


def test_a_large_batch_is_a_step_of_its_own() -> None:
    plain, gathering = model_of(), model_of()
    expected = list(stream(plain, images(12).split(6)))
    got = list(stream(gathering, images(12).split(6), gather=6))
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same(state_of(plain), state_of(gathering))
    # What waits is learned together with it.
    s = stream(model_of(), [images(2), images(7)], gather=6)
    list(s)
    assert s.online.seen == 9


def test_batches_are_answered_image_by_image() -> None:
    s = stream(model_of(), [images(4), images(4, 1)], gather=6)
    assert [len(p) for p in s] == [4, 4]
    assert s.report.steps == 1


def test_an_interrupted_stream_goes_on_with_what_waits() -> None:
    x = singles(10)
    whole = stream(model_of(), x, gather=4)
    expected = list(whole)
    first = stream(model_of(), x[:6], gather=4)
    got = list(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = stream(model_of(), x[6:], gather=4)
    second.load_state_dict(torch.load(file, weights_only=True))
    got += list(second)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same(state_of(second.model), state_of(whole.model))
    assert second.report == whole.report


def test_a_state_goes_on_with_the_same_gather() -> None:
    s = stream(model_of(), singles(3), gather=4)
    list(s)
    for gather in (None, 5):
        other = stream(model_of(), [], gather=gather)
        before = state_of(other.model)
        with pytest.raises(undrift.PerturbationMismatch, match=rf"gather=4, and this one has gather={gather}; .* same"):
            other.load_state_dict(s.state_dict())
        assert same(state_of(other.model), before)


def test_a_camera_may_write_the_next_image_to_the_same_place() -> None:
    place = torch.empty(1, 3, 8, 8)

    def camera():
        for image in singles(6):
            place.copy_(image)
            yield place

    model, expected = model_of(**QUIET), model_of(**QUIET)
    list(stream(model, camera(), gather=6, lr=0.01))
    list(stream(expected, [images(6)], lr=0.01))
    assert same(learnables(model), learnables(expected))


def test_unsound_images_are_not_gathered() -> None:
    x = singles(7)
    x[2] = torch.full_like(x[2], NAN)
    s = stream(model_of(), x, gather=6)
    answers = list(s)
    assert answers[2].label.tolist() == [-1]
    assert s.online.seen == 6
    assert list(s.report.skipped_at) == [2]


def test_images_of_one_size_make_a_step_together() -> None:
    sides = [8, 9, 9, 10, 8, 8]
    s = stream(model_of(), [torch.rand(1, 3, side, side) for side in sides], gather=2)
    list(s)
    assert s.report.steps == 2
    assert [part.shape[-1] for part in s.gather.waiting] == [10, 8]
    # With ever other sizes memory does not grow for ever.
    s = stream(model_of(), [torch.rand(1, 3, side, 8) for side in range(8, 30)], gather=2)
    list(s)
    assert [part.shape[2] for part in s.gather.waiting] == list(range(22, 30))


def test_an_image_that_raises_is_not_learned_and_stops_no_other() -> None:
    x = singles(5)
    x[1] = x[1].repeat(1, 2, 1, 1)
    x[2] = x[2][:, :1]
    model, expected = model_of(**QUIET), model_of(**QUIET)
    s = stream(model, x, gather=3, lr=0.01)
    next(s)
    for _ in range(2):
        with pytest.raises(undrift.DataError):
            next(s)
    assert len(list(s)) == 2
    list(stream(expected, [torch.cat([x[0], x[3], x[4]])], lr=0.01))
    assert same(learnables(model), learnables(expected))


@pytest.mark.parametrize(("error", "left"), [(KeyboardInterrupt, 2), (RuntimeError, 0)])
def test_a_step_that_is_stopped_leaves_its_images_and_one_that_fails_does_not(
    error: type[BaseException], left: int
) -> None:
    stopping = Stopping()
    s = stream(model_of(), singles(6), gather=3, keepers=[stopping])
    next(s), next(s)
    stopping.error = error
    with pytest.raises(error):
        next(s)
    assert sum(map(len, s.gather.waiting)) == left
    next(s)
    assert s.report.steps == (1 if left else 0)


def test_after_a_first_step_that_was_missed_the_source_answers_still() -> None:
    calls = []

    def broken_once(logits: Tensor) -> Tensor:
        calls.append(1)
        return entropy(logits) * (NAN if len(calls) == 1 else 1)

    model = model_of()
    with model.off() as net:
        expected = net.eval()(singles(5)[4]).softmax(1)
    s = stream(model, singles(7), broken_once, gather=3)
    answers = list(s)
    assert s.report.missed == 1
    assert torch.equal(answers[4].probs, expected)
    assert (answers[6].mutual_info > 0).all()  # after the second step


@pytest.mark.parametrize("method", ["norm-stats", "tent", "roid", "cotta", "sar", "vmp", "vmp:released", "vmp-roid"])
def test_methods_of_the_batch_answer_by_what_their_last_step_left(method: str) -> None:
    torch.manual_seed(0)
    s = stream(convnet(), singles(9), method=method, gather=4, generator=torch.Generator().manual_seed(0))
    answers = list(s)
    assert s.model.options.norm_statistics == "train"
    assert s.online.seen == 8
    samples = 10 if method == "vmp" else int(method == "vmp:released")
    draws = [bool((p.mutual_info > 0).all()) for p in answers[4:]]
    assert all(draws) if method == "vmp" else not any(draws)
    if not samples:  # the ninth image, by the network that the second step left
        with s.answering() as model:
            assert torch.equal(answers[-1].probs, predict(model, singles(9)[8], 0).probs)


def test_cottas_teacher_answers() -> None:
    torch.manual_seed(0)
    s = stream(convnet(), singles(9), method="cotta", gather=4, stream_lr=0.1)
    *_, last = s
    assert not torch.equal(last.probs, predict(s.model, singles(9)[8], 0).probs)  # the student's would be another


def test_what_cannot_be_gathered_is_refused() -> None:
    with pytest.raises(undrift.OptionError, match=r'its own batch; .*Perturb with norm_statistics="train"'):
        stream(model_of(norm_statistics="batch"), [], gather=4)
    bare = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten())
    with pytest.raises(undrift.OptionError, match=r"1 \(BatchNorm2d\).*track_running_stats=True"):
        stream(undrift.perturb(bare), [], gather=4)
    with pytest.raises(undrift.OptionError, match=r"episodic stream, .* Give episodic=False, or leave gather out"):
        stream(model_of(), [], gather=4, episodic=True)
    with pytest.raises(undrift.OptionError, match=r"stream_split=3; .* Leave one out"):
        stream(model_of(stream_split=3), [], gather=4)
    # What has no statistics of a batch needs none that are kept.
    stream(undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), norm_statistics="batch"), [], gather=4)
    for wrong in (0, -1, 2.5, True, "64"):
        with pytest.raises(undrift.OptionError, match=r"gather=.* is not a whole number from 1 up\. Leave it out"):
            stream(model_of(), [], gather=wrong)
    # A method that is refused gives its network back.
    net = convnet()
    with pytest.raises(undrift.OptionError, match="episodic"):
        stream(net, [], method="tent", gather=4, episodic=True)
    undrift.perturb(net)


def test_single_images_without_it_get_a_warning() -> None:
    s = stream(model_of(), [*singles(4), images(2), *singles(4)])
    next(s)
    with pytest.warns(undrift.UndriftWarning, match=r"one by one, .* needed: .* gather=64") as said:
        next(s)
    assert said[0].filename == __file__
    list(s)  # once
    vectors = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for model, changes in (
        (model_of(norm_statistics="source"), {}),
        (model_of(), {"gather": 2}),
        (undrift.perturb(vectors), {}),
    ):
        assert len(list(stream(model, singles(3), **changes))) == 3
    assert len(list(stream(model_of(), [images(6), *singles(1), images(6)]))) == 3  # a rest
