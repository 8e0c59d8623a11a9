"""Classes that come in runs: steps are made on a memory that has as many of each predicted class."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import NAN, equal, model_of, state_of
from support import images, learnables, same
from undrift._balanced import BalancedGather, Memory
from undrift.demo.setting import Setting, load_world
from undrift.predict import predict
from undrift.stream import stream

QUIET = {"layers": (), "test_samples": 0}


def numbered(first: int, count: int) -> Tensor:
    """Return images that are their own number everywhere."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2).clone()


def held(memory: Memory) -> list[int]:
    return memory.images[:, 0, 0, 0].int().tolist()


def test_the_oldest_of_the_most_frequent_class_makes_room() -> None:
    memory = Memory(4, numbered(0, 1))
    memory.add(numbered(0, 3), [7, 7, 7])
    assert (held(memory), memory.classes) == ([0, 1, 2], [7, 7, 7])
    memory.add(numbered(3, 2), [5, 7])  # five for four places: of four 7s the oldest goes
    assert (held(memory), memory.classes) == ([1, 2, 3, 4], [7, 7, 5, 7])
    memory.add(numbered(5, 1), [6])
    assert (held(memory), memory.classes) == ([2, 3, 4, 5], [7, 5, 7, 6])
    memory.add(numbered(6, 1), [5])  # two 7s and two 5s: the oldest of them all
    assert (held(memory), memory.classes) == ([3, 4, 5, 6], [5, 7, 6, 5])
    memory.add(numbered(7, 20), [9] * 20)  # a run pushes itself out first: one of each class is left
    assert (held(memory), memory.classes) == ([4, 5, 6, 26], [7, 6, 5, 9])
    assert memory.new == 27


@pytest.mark.parametrize("seed", range(3))
def test_a_memory_holds_the_newest_of_each_class_and_no_more_than_its_room(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memory, told, room = Memory(10, numbered(0, 1)), {}, 10
    for first in range(0, 200, 8):
        classes = torch.randint(first // 50, first // 50 + 3, (8,), generator=generator).tolist()
        told |= dict(zip(range(first, first + 8), classes, strict=True))
        memory.add(numbered(first, 8), classes)
        assert [told[n] for n in held(memory)] == memory.classes  # the images that the list says
        assert held(memory) == sorted(held(memory))
        assert len(memory.classes) == min(room, first + 8)
        assert memory._held.shape[0] == room
    for its in set(memory.classes):  # the newest of each class
        all_of = [number for number, known in told.items() if known == its]
        kept = [number for number in held(memory) if told[number] == its]
        assert kept == all_of[-len(kept) :]


class Spy(undrift.likelihood.Information):
    """Asks what `Information` asks, and remembers how many images were asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __call__(self, logits: Tensor) -> Tensor:
        self.sizes.append(len(logits))
        return super().__call__(logits)


def test_steps_are_made_on_a_full_memory_for_half_as_many_images() -> None:
    spy = Spy()
    s = stream(model_of(), images(30).split(2), spy, gather=8, balanced=True)
    assert [len(p) for p in s] == [2] * 15
    # After 8 images, when it is full, then after 12, 16, … 28; the last two wait.
    assert spy.sizes == [8] * 6
    assert s.report.steps == 6
    (memory,) = s.gather.memories.values()
    assert len(memory.images) == 8
    assert memory.new == 2


def test_the_batch_that_a_step_waited_for_is_learned_from_and_then_answered() -> None:
    model = model_of(**QUIET)
    s = stream(model, images(8).split(4), gather=8, balanced=True, lr=0.01)
    next(s)
    got = next(s)
    (memory,) = s.gather.memories.values()
    assert torch.equal(memory.images, images(8))
    expected = model_of(**QUIET)
    list(stream(expected, [images(8)], lr=0.01))
    assert same(learnables(model), learnables(expected))
    assert equal(got, predict(model, images(8)[4:], 0))


def test_answers_before_the_first_step_are_the_sources() -> None:
    model = model_of()
    with model.off() as net:
        expected = net.eval()(images(9)).softmax(1)
    *_, last = answers = list(stream(model, images(9).split(3), gather=9, balanced=True))
    assert torch.equal(torch.cat([p.probs for p in answers[:2]]), expected[:6])
    assert (last.mutual_info > 0).all()


def test_an_interrupted_stream_goes_on_with_its_memory() -> None:
    def going(x: Tensor) -> undrift.Stream:
        return stream(model_of(), x.split(2), gather=6, balanced=True)

    whole, first, second = going(images(30)), going(images(30)[:16]), going(images(30)[16:])
    expected, got = list(whole), list(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    got += list(second)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same(state_of(second.model), state_of(whole.model))
    assert second.report == whole.report


def test_a_state_goes_on_with_the_same_memory() -> None:
    ways = [{}, {"gather": 6}, {"gather": 6, "balanced": True}]
    streams = [stream(model_of(), images(4).split(2), **way) for way in ways]
    for s in streams:
        list(s)
    for one in streams:
        for other in streams:
            if one is other:
                other.load_state_dict(one.state_dict())
                continue
            with pytest.raises(
                undrift.PerturbationMismatch, match=r"is of a stream with gather=.* this one has gather"
            ):
                other.load_state_dict(one.state_dict())
    # States of before have no word about balance.
    assert "balanced" not in streams[1].state_dict()


@pytest.mark.parametrize(("error", "left"), [(KeyboardInterrupt, 1), (RuntimeError, 0)])
def test_a_step_that_is_stopped_leaves_its_memory_and_one_that_fails_does_not(
    error: type[BaseException], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stream(model_of(), images(18).split(3), gather=6, balanced=True)
    next(s)

    def stopped(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(s.online, "_take", stopped)
        with pytest.raises(error):
            next(s)
    assert len(s.gather.memories) == left
    assert len(next(s)) == 3
    assert s.report.steps == left


def test_what_has_no_answer_is_not_kept() -> None:
    x = images(9)
    x[1] = NAN
    s = stream(model_of(), x.split(3), gather=12, balanced=True)
    list(s)
    (memory,) = s.gather.memories.values()
    assert memory.new == 8
    assert torch.equal(memory.images, x[[0, *range(2, 9)]])
    gather = BalancedGather(3)
    gather.keep(x[:2], torch.tensor([-1, -1]))
    assert not gather.memories
    gather.keep(x[4:7], torch.tensor([1, -1, 0]))
    assert next(iter(gather.memories.values())).classes == [1, 0]


def test_images_of_each_size_have_a_memory() -> None:
    sides = [8, 9, 8, 9, 8]
    s = stream(model_of(), [torch.rand(2, 3, side, side) for side in sides], gather=6, balanced=True)
    list(s)
    assert s.report.steps == 1  # of the three batches of side 8
    assert [memory.images.shape[-1] for memory in s.gather.memories.values()] == [9, 8]
    s = stream(model_of(), [torch.rand(2, 3, side, 8) for side in range(8, 20)], gather=4, balanced=True)
    list(s)
    assert len(s.gather.memories) == 4  # with ever other sizes memory does not grow for ever


def test_a_camera_may_write_the_next_images_to_the_same_place() -> None:
    place = torch.empty(2, 3, 8, 8)

    def camera():
        for batch in images(12).split(2):
            place.copy_(batch)
            yield place

    models = [model_of(), model_of()]
    list(stream(models[0], camera(), gather=4, balanced=True, lr=0.01))
    list(stream(models[1], images(12).split(2), gather=4, balanced=True, lr=0.01))
    assert same(*map(state_of, models))


def test_it_needs_room() -> None:
    with pytest.raises(undrift.OptionError, match=r"balanced=True was given without gather; needed: .* Give gather="):
        stream(model_of(), [], balanced=True)
    with pytest.raises(undrift.OptionError, match="episodic"):
        stream(model_of(), [], gather=4, balanced=True, episodic=True)


def test_digits_in_runs_are_answered_far_better_than_by_their_batches() -> None:
    world = load_world(Setting())
    (batch,) = world.target.batches(len(world.target))
    x, labels = batch[0], world.target.labels
    assert labels is not None
    order = labels.argsort(stable=True)

    def right(net: nn.Module, **ways: object) -> float:
        s = stream(copy.deepcopy(net), x[order].split(32), method="norm-stats", **ways)
        return float((torch.cat([p.label for p in s]) == labels[order]).float().mean())

    # The source has 66 %, and what normalises by batches of one digit 20; in any order it would have 82.
    assert right(world.net) < 0.3
    assert right(world.net, gather=64, balanced=True) > 0.7
