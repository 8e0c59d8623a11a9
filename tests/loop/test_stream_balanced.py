"""Classes that come in runs: steps are made on a memory that has as many of each predicted class."""

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import NAN, Stopping, equal, state_of
from support import convnet, images, learnables, same
from undrift.likelihood import entropy
from undrift.predict import predict
from undrift.stream import stream
from undrift_bench.demo.setting import DemoSetting, load_world

QUIET = {"layers": (), "test_samples": 0}


@torch.no_grad()
def many_sided() -> nn.Module:
    """Return a small network that says one thing of one image, and another of another."""
    torch.manual_seed(0)
    net = convnet().eval()
    features = net[:8](images(40))
    weight = torch.randn(5, 8) / features.std(0)
    net[8].weight.copy_(weight)
    net[8].bias.copy_(-weight @ features.mean(0))
    assert torch.bincount(net(images(40)).argmax(1)).max() < 16
    return net


def model_of(**options: object) -> undrift.Perturbed:
    return undrift.perturb(many_sided(), generator=torch.Generator().manual_seed(0), **options)


def numbered(first: int, count: int) -> Tensor:
    """Return images that are their own number everywhere."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None, None, None].expand(-1, 1, 2, 2).clone()


class Telling(nn.Module):
    """Says of an image the class that is written into its last pixel; of −1 it says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        told = x[:, 0, 1, 1].long()
        logits = 20.0 * nn.functional.one_hot(told.clamp_min(0), 10) + 0 * self.norm(x.flatten(1)).sum(1, keepdim=True)
        return torch.where(told[:, None] < 0, NAN, logits)


class Told:
    """A stream of numbered images with chosen classes, and what its memory holds."""

    def __init__(self, room: int) -> None:
        self.first, self.waiting = 0, []  # type: ignore[var-annotated]
        model = undrift.perturb(Telling(), **QUIET)
        self.stream = stream(model, iter(self.waiting.pop, None), gather=room, balanced=True, lr=0.0)

    def then(self, *classes: int) -> tuple[list[int], tuple[int, ...]]:
        """Return the numbers and classes that are kept once images of these classes have come."""
        x = numbered(self.first, len(classes))
        x[:, 0, 1, 1] = torch.tensor(classes)
        self.first += len(classes)
        self.waiting.append(x)
        assert next(self.stream).label.tolist() == list(classes)
        (memory,) = self.stream.gather.memories.values()  # type: ignore[union-attr]
        return memory.images[:, 0, 0, 0].int().tolist(), memory.classes

    @property
    def steps(self) -> int:
        return self.stream.report.steps


def test_the_oldest_of_the_most_frequent_class_makes_room() -> None:
    then = Told(4).then
    assert then(7, 7, 7) == ([0, 1, 2], (7, 7, 7))
    assert then(5, 7) == ([1, 2, 3, 4], (7, 7, 5, 7))  # five for four places: of four 7s the oldest
    assert then(6) == ([2, 3, 4, 5], (7, 5, 7, 6))
    assert then(5) == ([3, 4, 5, 6], (5, 7, 6, 5))  # two 7s and two 5s: the oldest of them all
    # A run pushes itself out first: one of each class is left.
    assert then(*[9] * 20) == ([4, 5, 6, 26], (7, 6, 5, 9))
    # What has no answer is nothing to learn from.
    assert then(-1, 8) == ([5, 6, 26, 28], (6, 5, 9, 8))
    assert then(-1, -1) == ([5, 6, 26, 28], (6, 5, 9, 8))


def test_what_is_too_old_goes_however_rare_its_class() -> None:
    then, oldest = Told(2).then, 16  # times the room
    then(3, 4)
    for _ in range(1, oldest):
        assert then(4, 4)[1] == (3, 4)
    assert then(4, 4) == ([2 * oldest, 2 * oldest + 1], (4, 4))


@pytest.mark.parametrize("seed", range(3))
def test_a_memory_holds_the_newest_of_each_class_and_no_more_than_its_room(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    going, told, room = Told(20), {}, 20
    for first in range(0, 200, 8):
        classes = torch.randint(first // 50, first // 50 + 3, (8,), generator=generator)
        told |= dict(zip(range(first, first + 8), classes.tolist(), strict=True))
        held, kept_classes = going.then(*classes.tolist())
        assert tuple(told[n] for n in held) == kept_classes  # the images that the list says
        assert held == sorted(held)
        assert len(held) == min(room, first + 8)
        # No class has two more than another of which an image had to go.
        counts = {its: kept_classes.count(its) for its in set(told.values())}
        gone = {told[n] for n in range(max(0, first - 8), first + 8) if n not in held}
        assert all(counts[its] >= max(counts.values()) - 1 for its in gone)
    for its in set(kept_classes):  # the newest of each class
        all_of = [number for number, known in told.items() if known == its]
        kept = [number for number in held if told[number] == its]
        assert kept == all_of[-len(kept) :]


def test_no_step_is_made_while_one_class_has_more_than_half() -> None:
    told = Told(4)
    told.then(*[1] * 6)
    assert told.steps == 0
    told.then(2)
    assert told.steps == 0  # three and one
    told.then(3)
    assert told.steps == 1  # two, one and one
    model = model_of(**QUIET)
    with torch.no_grad():
        model.net[8].bias[2] += 1e3  # says 2, whatever it sees
    s = stream(model, images(40).split(4), gather=8, balanced=True)
    assert len(list(s)) == 10
    assert (s.report.steps, s.online.seen) == (0, 0)


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
    assert (len(memory.images), memory.new, memory.count) == (8, 2, 30)
    assert s.online.seen == 28  # each image once, whatever takes part in how many steps


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
    torn = {name: value for name, value in streams[2].state_dict().items() if name != "memories"}
    before = state_of(streams[2].model)
    with pytest.raises(undrift.PerturbationMismatch, match=r"the state has no memories; .* Give that"):
        streams[2].load_state_dict(torn)
    assert same(state_of(streams[2].model), before)
    # States of before have no word about balance.
    assert "balanced" not in streams[1].state_dict()


@pytest.mark.parametrize(("error", "left"), [(KeyboardInterrupt, 1), (RuntimeError, 0)])
def test_a_step_that_is_stopped_leaves_its_memory_and_one_that_fails_does_not(
    error: type[BaseException], left: int
) -> None:
    stopping = Stopping()
    s = stream(model_of(), images(18).split(3), gather=6, balanced=True, keepers=[stopping])
    next(s)
    stopping.error = error
    with pytest.raises(error):
        next(s)
    # The batch that was stopped got no answer, and is not kept; a memory that fails is gone.
    assert [memory.count for memory in s.gather.memories.values()] == [3] * left
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


def test_what_makes_no_sound_step_is_not_tried_again() -> None:
    calls = []

    def broken_once(logits: Tensor) -> Tensor:
        calls.append(len(logits))
        return entropy(logits) * (NAN if len(calls) == 1 else 1)

    s = stream(model_of(**QUIET), images(40).split(4), broken_once, gather=8, balanced=True)
    next(s), next(s)
    assert s.report.missed == 1
    assert not s.gather.memories  # it would be there at the next step, too
    assert len(list(s)) == 8
    assert (s.report.steps, s.report.missed) == (7, 1)
    # A batch that nothing is asked of leaves the memory as it is.
    s = stream(many_sided(), images(40).split(4), method="eta", gather=8, balanced=True, margin=1e-6)
    list(s)
    assert s.report.missed >= 8
    assert next(iter(s.gather.memories.values())).count == 40


def test_finding_classes_takes_no_gradient_and_the_teachers_weights() -> None:
    seen: list[tuple[bool, bool]] = []
    s = stream(many_sided(), images(24).split(4), method="cotta", gather=8, balanced=True, stream_lr=0.1)
    list(itertools.islice(s, 3))
    teacher = s.online.likelihood.teacher.weights["net.8.weight"]

    def look(layer: nn.Module, *_: object) -> None:
        seen.append((torch.is_grad_enabled(), torch.equal(layer.weight, teacher)))

    hook = s.model.net[8].register_forward_hook(look)
    next(s)
    hook.remove()
    assert seen[0] == (False, True)
    assert (True, False) in seen  # the step itself: the student's


def test_finding_classes_leaves_the_noise_as_it_is() -> None:
    def passes(**ways: object) -> list[int]:
        s = stream(model_of(), images(20).split(4), **ways)
        steps = [int(s.model.key.step) for _ in s]
        assert s.report.steps >= 3
        return [b - a for a, b in itertools.pairwise(steps[1:])]

    assert passes(gather=8, balanced=True) == passes(gather=4) == passes()


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
    for wrong in ("no", 128, None):
        with pytest.raises(undrift.OptionError, match=r"is neither True nor False\. The memory's size is gather"):
            stream(model_of(), [], gather=4, balanced=wrong)


@pytest.mark.slow
def test_digits_in_runs_are_answered_far_better_than_by_their_batches() -> None:
    world = load_world(DemoSetting())
    (batch,) = world.target.batches(len(world.target))
    x, labels = batch[0], world.target.labels
    assert labels is not None
    order = labels.argsort(stable=True)

    def right(net: nn.Module, **ways: object) -> float:
        s = stream(copy.deepcopy(net), x[order].split(32), method="norm-stats", **ways)
        return float((torch.cat([p.label for p in s]) == labels[order]).float().mean())

    # The source has 66 %, and what normalises by batches of one digit 20; in any order it would have 82.
    assert right(world.net) < 0.3
    assert right(world.net, gather=64, balanced=True) > 0.72
