"""A captured stream without a GPU, a tape in the graph's part; tests/test_gpu_captured.py has the graph itself."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from captured_support import RUNS, Taped, asking, batches, going, loaded, network, off, reset, state, taped, the_same
from undrift import Stream
from undrift.keep import Keeper
from undrift.likelihood import Information, ReliableEntropy, entropy
from undrift.stream import stream


@pytest.mark.parametrize("method", ["vmp", "vmp:released", "tent", "norm-stats", "source"])
def test_on_a_cpu_it_changes_nothing(method: str) -> None:
    streams = [going(batches(6), method, captured=captured) for captured in (False, True)]
    answers = [list(s) for s in streams]
    assert all(torch.equal(a.probs, b.probs) for a, b in zip(*answers, strict=True))
    ends = [state(s) for s in streams]
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())
    assert streams[0].latest == streams[1].latest


@pytest.mark.parametrize(("method", "settings"), RUNS)
@pytest.mark.filterwarnings("ignore:no posterior")
def test_a_replay_does_what_the_computation_does(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = going(batches(9), method, **settings)
    want = list(plain)
    with taped(monkeypatch) as made:
        fast = going(batches(9), method, captured=True, **settings)
        got = list(fast)
    the_same(fast, plain, (got, want))
    (only,) = made
    assert only.replays == only.calls - 4 >= 5


# While it settles, in the recording, in a replay, in the last one.
@pytest.mark.parametrize(
    ("statistics", "at"), [("train", 1), ("train", 3), ("train", 5), ("train", 8), ("moving", 6), ("domain", 6)]
)
def test_a_step_that_is_not_made_leaves_nothing(statistics: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = batches(9)
    x[at][2, 0, 0, 0] = 100.0
    plain = asking(x, captured=False, norm_statistics=statistics)
    want = list(plain)
    with taped(monkeypatch) as made:
        fast = asking(x, captured=True, norm_statistics=statistics)
        got = [next(fast) for _ in range(at)]
        before = state(fast)
        got.append(next(fast))
        after = state(fast)
        assert {n for n in before if not torch.equal(before[n], after[n])} == {"key.step"}
        got += list(fast)
    the_same(fast, plain, (got, want))
    assert list(fast.report.missed_at) == [(at, "loss not finite")]
    assert fast.online.likelihood.calls == 4
    assert [m.replays for m in made] == [5]


def test_other_sizes_run_as_they_are_and_statistics_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [b[:n] for b, n in zip(batches(12), (3, 8, 8, 5, 8, 8, 8, 6, 8, 8, 8, 3), strict=True)]
    x[9][1] = torch.nan  # seven images are left
    x[8][0, 0, 0, 0] = 100.0  # no step, in a replay behind a batch that ran as it is
    plain = asking(x, captured=False, norm_statistics="moving", stream_norm_momentum=0.3)
    want = list(plain)
    with taped(monkeypatch) as made:
        fast = asking(x, captured=True, norm_statistics="moving", stream_norm_momentum=0.3)
        got = list(fast)
    the_same(fast, plain, (got, want))
    # The first size is not what is recorded, but the first that comes four times. Five others run as they are.
    assert sorted(m.replays for m in made) == [0, 0, 3]
    assert fast.online.likelihood.calls == 4 + 5


def moved(s: Stream) -> None:
    """Give every tensor of the network another place."""
    s.model.double()
    s.model.float()


def reseeded(s: Stream) -> None:
    s.model.reseed(5)


def still(s: Stream) -> None:
    next(p for p in s.model.parameters() if p.requires_grad).requires_grad_(False)


def bent(s: Stream) -> None:
    s.model.net[2] = nn.Sigmoid()


def resting(s: Stream) -> None:
    s.model.norms[0].statistics = "source"


@pytest.mark.parametrize(
    ("change", "graphs"),
    [(moved, 2), (reseeded, 1), (reset, 1), (loaded, 2), (off, 1), (still, 2), (bent, 2), (resting, 2)],
)
def test_whatever_a_user_does_in_between(change: Any, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(captured: bool) -> tuple[Stream, list[Any]]:
        s = going(batches(12), captured=captured)
        answers = [next(s) for _ in range(6)]
        change(s)
        return s, answers + list(s)

    plain, want = run(captured=False)
    with taped(monkeypatch) as made:
        fast, got = run(captured=True)
    the_same(fast, plain, (got, want))
    assert sum(m.recorded for m in made) == graphs


def test_another_mode_is_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(captured: bool) -> tuple[Stream, list[Any]]:
        s = going(batches(13), "tent-ft", captured=captured, answer="after", lr=0.02)
        answers = [next(s) for _ in range(6)]
        with torch.autocast("cpu", torch.bfloat16):
            answers += [next(s) for _ in range(6)]
        return s, answers + list(s)

    plain, want = run(captured=False)
    with taped(monkeypatch) as made:
        fast, got = run(captured=True)
    the_same(fast, plain, (got, want))
    assert [(m.calls, m.recorded) for m in made] == [(6, True), (6, True), (1, False)]


def test_a_stopped_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x = batches(14)
    plain = going(x)
    want = list(plain)
    with taped(monkeypatch):
        first = going(x[:7], captured=True)
        got = list(first)
        saved = first.state_dict()
        second = going(x[7:], captured=True)
        second.load_state_dict(saved)
        got += list(second)
    the_same(second, plain, (got, want))
    third = going(x[7:])  # and without
    third.load_state_dict(saved)
    list(third)
    torch.testing.assert_close(state(third), state(plain), rtol=1e-4, atol=1e-5)


def test_every_replay_has_its_own_noise_and_answers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    x = batches(1) * 8
    with taped(monkeypatch):
        s = going(x, captured=True, lr=0.0, answer="before", init_fraction=1.0)
        found = [(p, p.probs.clone()) for p in s]
    assert all(torch.equal(p.probs, kept) for p, kept in found)
    assert all(not torch.equal(found[i][1], found[k][1]) for i in range(8) for k in range(i))
    assert all(p.grad is None for p in s.model.parameters())


def test_gradients_that_lie_about_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = going(batches(7))
    want = list(plain)
    with taped(monkeypatch):
        s = going(batches(7), captured=True)
        got = [next(s) for _ in range(3)]
        for parameter in (p for p in s.model.parameters() if p.requires_grad):
            parameter.grad = torch.ones_like(parameter)
        got += list(s)
    the_same(s, plain, (got, want))


def test_moved_statistics_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with taped(monkeypatch):
        s = going(batches(8), captured=True)
        for _ in range(6):
            next(s)
        kept = s.model.norms[0].layer.running_mean
        version = kept._version
        next(s)
    assert s.model.norms[0].layer.running_mean is kept
    assert kept._version > version  # `warn_of_mean` goes by it


def test_a_stream_that_nobody_has_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network(), batches(6)
    gc.disable()
    try:
        with taped(monkeypatch) as made:
            s = stream(net, x, method="vmp", captured=True)
            list(s)
            recorded = weakref.ref(made.pop())
            model = weakref.ref(s.model)
            del s
            assert recorded() is None
            assert model() is None
    finally:
        gc.enable()
    undrift.perturb(net)  # it was given back: a second perturbation is no second


def test_what_cannot_be_recorded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(logits: Tensor) -> Tensor:
        loss = entropy(logits)
        return loss if bool(loss.detach() > 0) else 2 * loss

    reads.recordable = True  # type: ignore[attr-defined]
    with taped(monkeypatch):
        s = stream(undrift.perturb(network()), batches(5), reads, captured=True)
        for _ in range(3):
            next(s)
        before = state(s)
        with pytest.raises(undrift.CannotRecord, match=r"not permitted.*needed: .*read no values.*in a new process"):
            next(s)
    assert all(torch.equal(before[name], value) for name, value in state(s).items() if name != "key.step")
    assert s.online.seen == 24


class Restless(nn.Module):
    """Subtracts an average of all that it saw, a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean()
        return x - self.average


def test_a_network_that_replaces_its_buffers_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Restless(), network()).eval()
    with taped(monkeypatch):
        s = stream(undrift.perturb(net), batches(5), captured=True)
        for _ in range(3):
            next(s)
        before = net[0].average
        with pytest.raises(undrift.CannotRecord, match=r"replaces average .*needed: .*in place.*leave captured out"):
            next(s)
    assert net[0].average is before
    assert s.online.seen == 24


class Sub(Information):
    """May do anything: what its base says of itself does not hold."""


class Pull(Keeper):
    def penalty(self, model: undrift.Perturbed) -> Tensor:
        return 0 * sum(p.sum() for p in model.parameters() if p.requires_grad)  # type: ignore[return-value]


class Leash(Pull):
    recordable = True


class Answers:
    recordable = True

    def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
        return entropy(logits)

    def answer(self, logits: Tensor) -> Tensor:
        return logits


@pytest.mark.parametrize(
    ("likelihood", "settings", "what"),
    [
        (lambda z: z.square().mean(), {}, "lambda.* does not say that it is recordable"),
        (Sub(), {}, "Information.* does not say that it is recordable"),
        (ReliableEntropy(), {}, "ReliableEntropy.* follows the network"),
        (Answers(), {}, "follows the network, or gives its own answer"),
        (entropy, {"keepers": [Pull()]}, "penalty of .*Pull.* does not say"),
        (entropy, {"climb": 0.05}, "climb=0.05 makes two gradients"),
    ],
)
def test_what_may_not_be_captured_is_refused(likelihood: Any, settings: dict[str, Any], what: str) -> None:
    options = {name: settings.pop(name) for name in ("climb",) if name in settings}
    model = undrift.perturb(network(), **options)
    with pytest.raises(undrift.OptionError, match=rf"captured=True, but .*{what}.*Needed: one .*Leave captured out"):
        stream(model, batches(1), likelihood, captured=True, **settings)
    assert len(list(stream(model, batches(1), likelihood, **settings))) == 1


@pytest.mark.parametrize("method", ["eta", "eata", "sar", "cotta", "roid", "vmp-roid"])
def test_methods_that_may_not_be_captured_give_the_network_back(method: str) -> None:
    net = network()
    settings = {"source": batches(1)[0]} if method == "eata" else {}
    with pytest.raises(undrift.OptionError, match="captured=True, but "):
        stream(net, batches(1), method=method, captured=True, **settings)
    undrift.perturb(net)


def test_a_network_on_two_devices_is_refused() -> None:
    model = undrift.perturb(network())
    model.net.register_buffer("elsewhere", torch.empty(2, device="meta"))
    with pytest.raises(undrift.OptionError, match="the network lies on cpu and meta"):
        stream(model, batches(1), captured=True)


@pytest.mark.parametrize("likelihood", [Information([1, 2, 3, 4, 5]), entropy])
def test_what_says_so_is_captured(likelihood: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = undrift.perturb(network())
    with taped(monkeypatch) as made:
        list(stream(model, batches(6), likelihood, keepers=[Leash()], captured=True))
    assert [m.replays for m in made] == [2]
    assert isinstance(made[0], Taped)
