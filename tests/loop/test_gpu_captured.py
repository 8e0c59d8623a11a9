"""A captured stream on a GPU is the plain stream: answers, learnables, statistics, noise; whatever happens to it."""

import gc
import os
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

import captured_support as support
import undrift
from captured_support import RUNS, asking, going, loaded, network, off, reset, state, the_same
from undrift import Stream
from undrift.likelihood import Information, entropy
from undrift.stream import stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep convolutions in float32 proper: tf32 differs between algorithms."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def batches(count: int, size: int = 8) -> list[Tensor]:
    return [x.cuda() for x in support.batches(count, size)]


def replays(s: Stream) -> bool:
    """Return whether the stream has a graph."""
    gradient: Any = s.online.stepper.gradient
    return gradient._recorded is not None


@pytest.mark.parametrize(("method", "settings"), RUNS)
@pytest.mark.filterwarnings("ignore:no posterior")
def test_a_captured_stream_is_the_plain_one(method: str, settings: dict[str, Any]) -> None:
    plain, fast = (going(batches(9), method, captured=captured, **settings) for captured in (False, True))
    want, got = list(plain), list(fast)
    the_same(fast, plain, (got, want), 1e-3)
    assert replays(fast)
    # And the network that is left answers alike.
    x = batches(1)[0]
    torch.testing.assert_close(
        undrift.predict(fast.model, x, generator=1).probs,
        undrift.predict(plain.model, x, generator=1).probs,
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("captured", [False, True])
def test_single_images_that_are_gathered_make_the_steps_of_their_batches(captured: bool) -> None:
    x, quiet = batches(9), {"layers": (), "test_samples": 0, "captured": captured}
    together = going(x, **quiet)
    one_by_one = going([image for batch in x for image in batch.split(1)], gather=8, **quiet)
    assert len(list(together)) == 9
    assert len(list(one_by_one)) == 72
    assert one_by_one.report.steps == 9
    ends = [{n: v for n, v in state(s).items() if n != "key.step"} for s in (one_by_one, together)]
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)
    assert not captured or replays(one_by_one)


def test_a_class_prior_is_brought_to_the_gpu_before_the_recording() -> None:
    prior = Information([1, 2, 3, 4, 5])
    plain, fast = (asking(batches(8), captured, prior) for captured in (False, True))
    want, got = list(plain), list(fast)
    the_same(fast, plain, (got, want), 1e-3)
    assert replays(fast)


def test_channels_last_and_callers_without_gradients() -> None:
    def run(captured: bool) -> tuple[Stream, list[Any]]:
        x = [b.to(memory_format=torch.channels_last) for b in batches(8)]
        x[6] = x[6].contiguous()
        s = going(x, captured=captured)
        s.model.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.inference_mode():
            return s, list(s)

    (plain, want), (fast, got) = run(captured=False), run(captured=True)
    the_same(fast, plain, (got, want), 1e-3)
    assert replays(fast)


@pytest.mark.parametrize(("statistics", "at"), [("train", 1), ("train", 3), ("train", 6), ("moving", 6), ("domain", 6)])
def test_a_step_that_is_not_made_leaves_nothing(statistics: str, at: int) -> None:
    x = batches(9)
    x[at][2, 0, 0, 0] = 100.0  # finite, and its loss is not: while it settles, in the recording, in a replay
    plain, fast = (asking(x, captured, norm_statistics=statistics) for captured in (False, True))
    want = list(plain)
    got = [next(fast) for _ in range(at)]
    before = state(fast)
    got.append(next(fast))
    after = state(fast)
    assert {n for n in before if not torch.equal(before[n], after[n])} == {"key.step"}
    got += list(fast)
    the_same(fast, plain, (got, want), 1e-3)
    assert list(fast.report.missed_at) == [(at, "loss not finite")]
    assert fast.online.likelihood.calls == 4  # Python came by three times, and for the recording


def test_other_sizes_run_as_they_are_and_statistics_follow() -> None:
    x = [b[:n] for b, n in zip(batches(12), (3, 8, 8, 5, 8, 8, 8, 6, 8, 8, 8, 3), strict=True)]
    x[9][1] = torch.nan  # seven images are left
    x[8][0, 0, 0, 0] = 100.0  # no step, in a replay behind a batch that ran as it is
    options = {"norm_statistics": "moving", "stream_norm_momentum": 0.3}
    plain, fast = (asking(x, captured, **options) for captured in (False, True))
    want, got = list(plain), list(fast)
    the_same(fast, plain, (got, want), 1e-3)
    assert fast.online.likelihood.calls == 4 + 5


def moved(s: Stream) -> None:
    s.model.cpu()
    s.model.cuda()


def predicted(s: Stream) -> None:
    undrift.predict(s.model, batches(1)[0], samples=3)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("change", [moved, reset, loaded, off, predicted])
def test_whatever_a_user_does_in_between(change: Any) -> None:
    def run(captured: bool) -> tuple[Stream, list[Any]]:
        s = going(batches(12), captured=captured)
        answers = [next(s) for _ in range(6)]
        change(s)
        return s, answers + list(s)

    (plain, want), (fast, got) = run(captured=False), run(captured=True)
    the_same(fast, plain, (got, want), 1e-3)
    assert replays(fast)


def test_a_stopped_stream_goes_on_captured_and_not(tmp_path: Path) -> None:
    x = batches(14)
    plain = going(x)
    want = list(plain)
    first = going(x[:7], captured=True)
    got = list(first)
    torch.save(first.state_dict(), tmp_path / "state")
    for captured in (True, False):
        second = going(x[7:], captured=captured)
        second.load_state_dict(torch.load(tmp_path / "state", map_location="cpu", weights_only=True))
        the_same(second, plain, (got + list(second), want), 1e-3)


@pytest.mark.parametrize("method", ["vmp", "tent-ft"])
@pytest.mark.parametrize("answer", ["before", "after"])
def test_under_autocast_replays_follow_the_weights(method: str, answer: str) -> None:
    def run(captured: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        with torch.autocast("cuda", torch.bfloat16):  # one block, whose casts live as long as it does
            s = going(batches(12), method, captured=captured, answer=answer, lr=0.02)
            start, answers = state(s), list(s)
        assert not captured or replays(s)
        return start, state(s), answers

    (start, want, said), (_, got, answered) = run(captured=False), run(captured=True)
    for one, other in zip(answered, said, strict=True):
        torch.testing.assert_close(one.probs, other.probs, rtol=5e-2, atol=5e-2)
    moves = [n for n in want if not torch.equal(start[n], want[n]) and want[n].is_floating_point()]
    assert moves
    way = torch.cat([(want[n] - start[n]).flatten() for n in moves]).norm()
    apart = torch.cat([(want[n] - got[n]).flatten() for n in moves]).norm()
    assert apart < 0.05 * way


def test_every_replay_has_its_own_noise_and_answers_stay() -> None:
    s = going(batches(1) * 8, captured=True, lr=0.0, answer="before", init_fraction=1.0)
    found = [(p, p.probs.clone()) for p in s]
    assert replays(s)
    assert all(torch.equal(p.probs, kept) for p, kept in found)
    assert all(not torch.equal(found[i][1], found[k][1]) for i in range(8) for k in range(i))


def test_two_captured_streams_in_turns() -> None:
    plain = [going(batches(9), method) for method in ("vmp", "tent")]
    fast = [going(batches(9), method, captured=True) for method in ("vmp", "tent")]
    want = [list(s) for s in plain]
    got = [list(answers) for answers in zip(*zip(*fast, strict=True), strict=True)]
    for one, other, *answers in zip(fast, plain, got, want, strict=True):
        the_same(one, other, (answers[0], answers[1]), 1e-3)


class Slow:
    """Entropy; a recording of it takes its time."""

    recordable = True

    def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            time.sleep(0.3)
        return entropy(logits)


def test_another_thread_may_pin_memory_during_the_recording() -> None:
    over, pinned, errors = threading.Event(), [], []

    def pin() -> None:
        try:
            while not over.is_set() and len(pinned) < 2000:
                pinned.append(torch.ones(1 << 16).pin_memory())
                time.sleep(0.001)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=pin)
    s = asking(batches(7), captured=True, likelihood=Slow())
    for _ in range(3):
        next(s)
    thread.start()
    try:
        assert len(list(s)) == 4
    finally:
        over.set()
        thread.join()
    assert not errors
    assert len(pinned) > 50
    assert replays(s)


def test_a_replay_adds_no_wait() -> None:
    def waits(captured: bool) -> int:
        s = going(batches(7), captured=captured)
        for _ in range(6):
            next(s)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                next(s)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return len([w for w in seen if "called a synchronizing" in str(w.message)])

    plain = waits(captured=False)
    assert plain > 0
    assert waits(captured=True) <= plain


def test_a_stream_that_nobody_has_gives_network_and_memory_back() -> None:
    x = batches(7)
    list(going(x, captured=True))  # what stays for good: kernels, workspaces
    gc.collect()
    torch.cuda.synchronize()
    net, before = network().cuda(), torch.cuda.memory_allocated()
    s = stream(net, x, method="vmp", captured=True)
    list(s)
    assert replays(s)
    model = weakref.ref(s.model)
    del s
    assert model() is None
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    undrift.perturb(net)  # given back


def reads(logits: Tensor) -> Tensor:
    """A likelihood that says what is not true."""
    loss = entropy(logits)
    return loss if bool(loss.detach() > -1) else 2 * loss


reads.recordable = True  # type: ignore[attr-defined]


def _fails(_rank: int, out: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    s = asking(batches(6), True, reads)
    for _ in range(3):
        next(s)
    try:
        next(s)
    except undrift.CannotRecord as error:
        torch.save({"message": str(error), "state": s.state_dict()}, out)
        os._exit(0)  # what is left of the recording is not ours to clear away


def test_what_cannot_be_recorded_says_so_and_goes_on_elsewhere(tmp_path: Path) -> None:
    # In a process of its own: PyTorch's generator does not come back from a recording that failed.
    mp.spawn(_fails, args=(f"{tmp_path}/found.pt",), nprocs=1)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    assert "captur" in found["message"]
    assert "in a new process" in found["message"]
    plain = asking(batches(6), False, reads)
    want = list(plain)
    s = asking(batches(6)[3:], False, reads)
    s.load_state_dict(found["state"])
    for got, wanted in zip(list(s), want[3:], strict=True):
        torch.testing.assert_close(got.probs, wanted.probs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state(s), state(plain), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_on_the_second_gpu() -> None:
    def run(captured: bool) -> tuple[Stream, list[Any]]:
        s = going([b.to("cuda:1") for b in batches(8)], captured=captured)
        return s, list(s)

    list(going(batches(6), captured=True))  # the first has had a recording before
    (plain, want), (fast, got) = run(captured=False), run(captured=True)
    the_same(fast, plain, (got, want), 1e-3)
    assert replays(fast)
