"""A stream that is left alone: it decides what to learn together, watches over itself, and says so."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import equal
from support import convnet, images, same, snapshot
from undrift import Stream
from undrift._types import Doubt
from undrift.likelihood import Teacher
from undrift.loop.pacing import WORSE
from undrift.loop.stream_report import StreamReport
from undrift.stream import stream


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Colours(nn.Module):
    """Says which of three channels is the brightest; its batch norm expects all three equally often."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.last = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.Linear(3, 3)
        # It looks at every other column only, so a view of an image is another look at it.
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(3)[:, :, None, None])
            self.last.weight.copy_(4 * torch.eye(3))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.mix(x))[..., ::2].mean((2, 3)))


def colours(labels: Tensor, number: int = 0) -> Tensor:
    """Return images whose brightest channel is their label; their odd and even columns differ."""
    g = torch.Generator().manual_seed(number)
    columns = 0.4 * torch.randn(len(labels), 3, 1, 2, generator=g)
    x = 0.3 * torch.randn(len(labels), 3, 8, 8, generator=g) + columns.repeat(1, 1, 1, 4)
    x[torch.arange(len(labels)), labels] += 2.0
    return x


def trained() -> Colours:
    net = Colours()
    with torch.no_grad():  # statistics of the source domain
        net.train()
        net.norm.momentum = None
        for number in range(4):
            net(colours(torch.arange(300) % 3, number))
    return net.eval()


def mixed(count: int, number: int = 0) -> tuple[Tensor, Tensor]:
    labels = torch.randint(3, (count,), generator=torch.Generator().manual_seed(number))
    return colours(labels, number), labels


def default(net: nn.Module, batches: list[Tensor], **settings: object) -> Stream:
    return stream(net, batches, generator=seed(), seed=0, **settings)


def kinds(going: Stream) -> list[str]:
    return [event.kind for event in going.report.events]


def test_an_ordinary_stream_needs_no_decision() -> None:
    going = default(trained(), [mixed(66, number)[0] for number in range(6)])
    right = sum(int((p.label == mixed(66, n)[1]).sum()) for n, p in enumerate(going))
    assert right > 0.95 * 6 * 66
    assert kinds(going) == []
    assert going.report.steps == 6


@pytest.mark.parametrize("size", [1, 4, 24])
def test_few_images_are_answered_at_once_and_learned_together(size: int) -> None:
    x, labels = mixed(144)
    going = default(trained(), list(x.split(size)))
    answers = torch.cat([p.label for p in going])
    assert float((answers == labels).float().mean()) > 0.95
    assert kinds(going) == ["gather on"]
    assert going.report.steps == 144 // (-(-64 // size) * size)


def test_a_run_of_one_class_is_answered_by_the_statistics_kept_and_learned_from_a_memory() -> None:
    runs = [torch.full((70,), number % 3) for number in range(9)]
    batches = [colours(labels, number) for number, labels in enumerate(runs)]
    tent = list(stream(trained(), batches, method="tent"))
    going = default(trained(), batches)
    ours = list(going)

    def right(answers: list[undrift.Prediction]) -> float:
        return sum(int((p.label == labels).sum()) for p, labels in zip(answers, runs, strict=True)) / (9 * 70)

    assert right(tent) < 0.6
    assert right(ours) > 0.9
    assert kinds(going)[0] == "balanced on"
    assert "went back" not in kinds(going)
    assert going.pacing is not None
    (memory,) = going.pacing.balanced.memories.values()
    assert memory.images is not None
    assert len(memory.images) <= memory.room
    assert len(set(memory.classes)) >= 2


def test_a_run_that_does_not_end_teaches_nothing_and_its_mistakes_neither() -> None:
    """One image in five looks like another class: a memory with equally many of each would be full of those."""

    def run(its: int, number: int) -> Tensor:
        labels = torch.full((70,), its)
        labels[::5] = torch.randint(3, (14,), generator=torch.Generator().manual_seed(number))
        return colours(labels, number)

    going = default(trained(), [*(run(0, number) for number in range(12)), *(run(n % 2, n) for n in range(4))])
    for _ in range(12):
        next(going)
    assert kinds(going) == ["balanced on"]
    assert going.report.steps == 0
    list(going)
    assert going.report.steps > 0


def test_own_statistics_make_a_run_worse_and_a_hard_domain_no_worse() -> None:
    def worse(x: Tensor) -> float:
        return Teacher(prior_images=16).doubt(undrift.perturb(trained(), layers=()), x).worse

    hard = mixed(128)[0] + 1.5 * torch.randn(128, 3, 8, 8, generator=seed())
    assert worse(colours(torch.zeros(128, dtype=torch.long))) > 2 * WORSE
    assert worse(hard) < WORSE


def test_a_memory_needs_four_classes_for_a_step() -> None:
    class InRuns(Teacher):
        """Takes everything for runs; the images' first value is their class."""

        def doubt(self, model: undrift.Perturbed, images: Tensor, least: float = -1.0, most: float = 1.0) -> Doubt:
            super().doubt(model, images, least, most)
            return Doubt(0.4, 2.0, 2.2, 1.0)

        def answer_alone(self, model: undrift.Perturbed, images: Tensor, counted: bool) -> Tensor:
            del model, counted
            return 0.9 * nn.functional.one_hot(images[:, 0, 0, 0].long(), 12) + 0.1 / 12

    def steps(classes: int) -> int:
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 12)).eval()
        model = undrift.perturb(net, undrift.methods.get("undrift-light", "stream").options)
        batches = [number % classes + 0.5 * torch.rand(32, 3, 8, 8) for number in range(24) for _ in range(2)]
        going = stream(model, batches, InRuns(prior_images=16, seed=0))
        list(going)
        return going.report.steps

    assert steps(3) == 0
    assert steps(4) > 0


@pytest.mark.parametrize("size", [70, 7])
def test_in_a_run_the_network_that_names_fewer_classes_counts_more(size: int) -> None:
    class InRuns(Teacher):
        """Takes everything for runs, and names the classes it was told to."""

        names: Tensor

        def doubt(self, model: undrift.Perturbed, images: Tensor, least: float = -1.0, most: float = 1.0) -> Doubt:
            super().doubt(model, images, least, most)
            return Doubt(0.4, 2.0, 2.2, 1.0)

        def answer_alone(self, model: undrift.Perturbed, images: Tensor, counted: bool) -> Tensor:
            del model, counted
            return 0.9 * nn.functional.one_hot(self.names[torch.arange(len(images)) % len(self.names)], 3) + 0.1 / 3

    def labels(x: Tensor, *names: int) -> Tensor:
        likelihood = InRuns(prior_images=16, seed=0)
        likelihood.names = torch.tensor(names)
        model = undrift.perturb(trained(), undrift.methods.get("undrift-light", "stream").options)
        return torch.cat([p.label for p in stream(model, [x[:70], *x[70:].split(size)], likelihood)])[70:]

    one, all_three = colours(torch.zeros(140, dtype=torch.long)), mixed(140)[0]
    assert (labels(one, 0, 0, 0, 1) == 0).all()  # the source network knows them, and the other mostly agrees
    assert (labels(all_three, 1) == 1).float().mean() > 0.95  # and these are many to it
    if size == 70:  # of few images each is a class to itself
        assert (labels(one, 1, 2) != 0).all()  # a source whose one class nothing confirms has no say


class Sides(nn.Module):
    """Says in which quarter of its columns an image is bright: a mirror image is of another class, as of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(4, 4)
        with torch.no_grad():
            self.last.weight.copy_(8 * torch.eye(4))
            self.last.bias.copy_(torch.tensor([2.0, 0, 0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.avg_pool2d(self.norm(x).clamp_min(0), (16, 4))[:, 0, 0])


def sides(labels: Tensor, number: int) -> Tensor:
    x = 0.1 * torch.randn(len(labels), 1, 16, 16, generator=torch.Generator().manual_seed(number))
    for image, label in zip(x, labels.tolist(), strict=True):
        image[..., 4 * label : 4 * label + 4] += 1
    return x


def test_a_domain_whose_mirror_images_are_of_other_classes_is_no_run() -> None:
    net, truth = Sides(), [torch.randint(4, (64,), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    with torch.no_grad():
        net.train()
        net(sides(torch.arange(400) % 4, 9))
    dark = [0.2 * sides(labels, n) - 1 for n, labels in enumerate(truth)]
    source = list(stream(net.eval(), dark, method="source"))
    going = default(net, dark)
    right = [
        sum(int((p.label == labels).sum()) for p, labels in zip(answers, truth, strict=True)) / (6 * 64)
        for answers in (source, going)
    ]
    assert right[0] < 0.4  # one class for everything, which is consistent for free
    assert right[1] > 0.9
    assert going.report.steps == 6
    assert kinds(going) == []


def test_the_decisions_of_pacing_by_hand() -> None:
    sure, runs = Doubt(0.0, 0.0, 0.0, 0.0), Doubt(0.4, 2.0, 2.2, 1.0)
    script = [runs._replace(views=0.05), runs._replace(worse=0.06)]  # views agree; a hard domain
    script += [runs._replace(kept=2.1), runs._replace(counted=0.0, kept=0.0)]  # many classes; one, whatever is done
    script += [runs, runs._replace(worse=0.06, kept=1.9), *[sure] * 12]  # half of the evidence is enough then
    said: list[Doubt] = []

    class Scripted(Teacher):
        def doubt(self, model: undrift.Perturbed, images: Tensor, least: float = -1.0, most: float = 1.0) -> Doubt:
            super().doubt(model, images, least, most)
            said.append(script[len(said)])
            return said[-1]

    sizes = [*[66] * 16, 66, 1, 1]
    going = stream(
        undrift.perturb(trained(), undrift.methods.get("undrift-light", "stream").options),
        [mixed(size, number)[0] for number, size in enumerate(sizes)],
        Scripted(prior_images=16, seed=0),
    )
    seen = [kinds(going) for _ in going]
    assert seen[:4] == [[]] * 4
    assert seen[4:15] == [["balanced on"]] * 11
    assert seen[15:18] == [["balanced on", "balanced off"]] * 3  # a single small batch may end a folder
    assert len(said) == 17
    last = going.report.events[-1]
    assert str(last) == "gather on at image 1,123: batches of 1 are few for a step; one is made every 64 images"


def test_a_new_domain_is_noted() -> None:
    def dark(x: Tensor) -> Tensor:
        return 0.2 * x - 3

    batches = [mixed(70, number)[0] for number in range(4)]
    going = default(trained(), [*batches, *map(dark, batches)])
    list(going)
    assert set(kinds(going)) == {"domain changed"}
    assert going.report.events[0].images == 4 * 70


def test_the_user_may_force_either() -> None:
    x = list(mixed(140)[0].split(70))
    assert default(trained(), x, gather=32).pacing is None
    assert default(trained(), x, gather=32, balanced=True).pacing is None
    assert default(trained(), x, guard=False).guard is None
    assert default(trained(), x).guard is not None
    assert stream(trained(), x, method="tent").guard is None
    assert stream(trained(), x, method="tent", guard=True).guard is not None
    assert default(trained(), x, episodic=True).pacing is None
    with pytest.raises(undrift.OptionError, match="guard='no' is neither True nor False; needed"):
        default(trained(), x, guard="no")


def test_a_network_without_batch_norm_learns_from_every_batch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    going = default(net, list(images(6).split(1)))
    assert [len(p) for p in going] == [1] * 6
    assert going.pacing is None
    assert going.report.steps == 6
    assert going.report.events == ()


def mixture() -> list[Tensor]:
    """Return batches of which some are few, some a run, and some of another domain."""
    ordinary = [mixed(66, number)[0] for number in range(4)]
    runs = [colours(torch.full((66,), number % 3), number) for number in range(3)]
    return [*ordinary, *ordinary[0].split(20), *runs, *(x - 3 for x in ordinary)]


def test_it_resumes_bit_for_bit() -> None:
    whole = default(trained(), mixture())
    expected = list(whole)
    assert {"gather on", "balanced on"} <= set(kinds(whole))
    for stop in (3, 6, 9):
        first = default(trained(), mixture()[:stop])
        got = list(first)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = default(trained(), mixture()[stop:])
        second.load_state_dict(torch.load(file, weights_only=True))
        got += list(second)
        assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
        assert second.report == whole.report
        assert second.report.events == whole.report.events


def test_a_state_without_guard_or_pacing_is_refused() -> None:
    going = default(trained(), mixture())
    next(going)
    for part in ("guard", "pacing"):
        state = {name: value for name, value in going.state_dict().items() if name != part}
        with pytest.raises(undrift.PerturbationMismatch, match=rf"without {part}"):
            default(trained(), []).load_state_dict(state)


def test_the_state_does_not_grow() -> None:
    # Few images to look at again, so that their room is full when the counting starts.
    given = [mixed(66, number % 5)[0][: 66 if number % 3 else 7] for number in range(60)]
    going = default(trained(), given, replay=50)

    def size() -> int:
        file = io.BytesIO()
        torch.save(going.state_dict(), file)
        return len(file.getvalue())

    for _ in range(40):
        next(going)
    before = size()
    list(going)
    assert size() <= 1.05 * before


def collapsing(toward: int = 0) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, torch.full((len(logits),), toward))

    return loss


def test_the_guard_goes_back_when_the_network_collapses_and_at_last_lets_the_source_answer() -> None:
    x, labels = mixed(66)
    net = trained()
    going = stream(undrift.perturb(net, norm_statistics="source"), [x] * 60, collapsing(), lr=1.0, guard=True)
    answers = list(going)
    assert kinds(going)[:1] == ["went back"]
    assert "source answers" in kinds(going)
    assert going.report.resets > 0
    told = next(event for event in going.report.events if event.kind == "source answers")
    assert "1,000 images" in told.why
    assert "collapsed" in told.why
    resting = answers[told.images // 66 + 1]
    assert float((resting.label == labels).float().mean()) > 0.95
    last = [event.images for event in going.report.events if event.kind == "source answers"]
    assert f"source answers {len(last)} times, last at image {last[-1]:,}" in str(going.report)


def test_a_thousand_changes_of_domain_hide_nothing_that_the_guard_did() -> None:
    report = StreamReport()
    report.event("went back", "to the start state; collapsed")
    for _ in range(1200):
        report.images += 200
        report.event("domain changed", "these images do not fit")
    again = StreamReport()
    again.load_state_dict(report.state_dict())
    assert again == report
    assert [event.kind for event in again.events[:2]] == ["went back", "domain changed"]
    assert len(again.events) == 1000
    assert again.counts == {"went back": 1, "domain changed": 1200}
    assert "went back once, at image 0; domain changed 1,200 times, last at image 240,000" in str(again)


def test_the_guard_goes_back_to_the_last_sound_state_first() -> None:
    x, _ = mixed(66)
    ruined = False

    def loss(logits: Tensor) -> Tensor:
        return collapsing()(logits) if ruined else 0 * logits.sum()

    model = undrift.perturb(trained(), norm_statistics="source", layers=(), test_samples=0, kl_weight=0.0)
    going = stream(model, [x] * 60, loss, lr=0.5, guard=True)
    for _ in range(14):
        next(going)
    good = snapshot(model)  # nothing has pulled at it
    ruined = True
    while "went back" not in kinds(going):
        next(going)
    assert going.report.events[-1].why.startswith("to the last sound state; ")
    now = snapshot(model)
    assert same(*({name: t for name, t in state.items() if not name.startswith("key.")} for state in (good, now)))


def test_the_last_sound_state_of_another_domain_is_none_to_go_back_to() -> None:
    x, _ = mixed(66)
    ruined = False

    def loss(logits: Tensor) -> Tensor:
        return collapsing()(logits) if ruined else 0 * logits.sum()

    model = undrift.perturb(trained(), norm_statistics="source", layers=(), test_samples=0, kl_weight=0.0)
    going = stream(model, [*[x] * 14, *[0.5 * x + 1] * 20], loss, lr=0.5, guard=True, packs=())
    for _ in range(14):
        next(going)
    ruined = True
    while "went back" not in kinds(going):
        next(going)
    assert going.domain == "new-2"
    assert going.report.events[-1].why.startswith("to the start state; ")


def test_the_guard_never_acts_on_a_healthy_stream_and_changes_no_answer_of_it() -> None:
    batches = [mixed(66, number % 7)[0] for number in range(30)]
    for method in ("undrift", "tent", "norm-stats", "source"):
        settings = {"seed": 0} if method == "undrift" else {}
        guarded, free = (
            stream(trained(), batches, method=method, generator=seed(), guard=guard, **settings)
            for guard in (True, False)
        )
        assert all(equal(a, b) for a, b in zip(guarded, free, strict=True))
        assert kinds(guarded) == []


def test_few_classes_are_no_collapse_while_classes_come_in_runs() -> None:
    runs = [colours(torch.full((70,), number % 3), number) for number in range(14)]
    going = default(trained(), runs)
    list(going)
    assert going.guard is not None
    assert going.pacing is not None
    assert going.pacing.runs
    assert going.guard._classes is None  # two looks, and nothing is held against it
    assert "went back" not in kinds(going)


def test_the_guard_answers_for_a_network_that_is_less_consistent_than_its_source() -> None:
    net = trained()
    runs = [colours(torch.full((66,), number % 3), number) for number in range(4)]
    free = list(stream(trained(), runs, method="norm-stats"))
    going = stream(net, runs, method="norm-stats", guard=True)
    guarded = list(going)
    assert float((free[0].label == 0).float().mean()) < 0.6
    assert float((guarded[0].label == 0).float().mean()) > 0.95
    assert "less consistent" in going.report.events[0].why


def test_the_guard_sees_no_dropout_and_costs_one_look_in_twelve_batches() -> None:
    net = nn.Sequential(trained(), nn.Dropout()).train()
    modes: list[bool] = []
    net[1].register_forward_hook(lambda m, *_: modes.append(m.training))
    going = stream(net, [mixed(66)[0]] * 13, method="norm-stats", guard=True)
    list(going)
    assert not any(modes)
    assert len(modes) == 13 + 2 * 4  # two looks, at the first and the last batch, of four passes each


def test_a_teacher_of_ones_own_is_left_as_it_was() -> None:
    model = undrift.perturb(convnet())
    going = stream(model, [images(8)], Teacher(views=()))
    assert going.pacing is None
    assert going.guard is None
