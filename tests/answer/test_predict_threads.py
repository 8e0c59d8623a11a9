"""Several threads that ask one network: they take turns, and each gets what it would have got alone."""

import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, same, snapshot


class Waiting(nn.Module):
    """A network in whose passes threads meet: without turns, two are in it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.inside, self.most = convnet(), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)  # lets the other threads run
        out: Tensor = self.net(x)
        self.inside -= 1
        return out


def together(*calls: Callable[[], object]) -> None:
    """Make all calls at once, and raise what one of them raised; a deadlock fails after a minute."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=60)


@pytest.mark.filterwarnings("ignore:no temperature")  # it has had its turn all the same
def test_answers_and_network_are_those_of_one_thread() -> None:
    net = Waiting()
    model = undrift.perturb(net, init_fraction=0.3, norm_statistics="moving")
    x = images(4)
    seeded = undrift.predict(model, x, 3, generator=1).probs
    mean = undrift.predict(model, x, 0).probs
    before, flags = snapshot(model), [m.training for m in model.modules()]

    def ask_seeded() -> None:
        for _ in range(5):
            assert torch.equal(undrift.predict(model, x, 3, generator=1).probs, seeded)

    def ask_mean() -> None:
        for _ in range(5):
            assert torch.equal(undrift.predict(model, x, 0).probs, mean)

    def ask_draws() -> None:
        for _ in range(5):
            assert undrift.predict(model, x, 3).mutual_info.max() > 0

    def choose() -> None:
        assert 0.05 <= undrift.temperature(model, x, augment=lambda x: -x) <= 20

    together(ask_seeded, ask_mean, ask_draws, ask_seeded, choose)
    assert net.most == 1
    assert model.key.noisy
    assert model.key.training
    assert [m.training for m in model.modules()] == flags
    before["key.step"] = model.key.step  # draws without a seed move on
    assert same(snapshot(model), before)


def test_a_plain_network_is_asked_in_turns() -> None:
    net = Waiting().train()
    together(*[lambda: undrift.predict(net, images(4))] * 4)
    assert net.most == 1
    assert all(m.training for m in net.modules())


def test_steps_and_answers_take_turns() -> None:
    net = Waiting()
    model = undrift.perturb(net, init_fraction=0.3)
    stream = undrift.stream(model, [images(4, seed) for seed in range(4)], guard=True)
    together(lambda: list(stream), *[lambda: [undrift.predict(model, images(4), 2) for _ in range(4)]] * 2)
    assert net.most == 1
    assert stream.report.steps == 4
    assert model.key.noisy


def test_inside_off_other_threads_may_ask_the_source_network() -> None:
    model = undrift.perturb(convnet())
    with model.off() as net:
        together(*[lambda: undrift.predict(net, images())] * 3)


def test_a_loader_may_wait_for_a_thread_that_asks_the_same_network() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.3)

    def loader() -> Iterator[Tensor]:
        for seed in range(3):
            together(lambda: undrift.predict(model, images(2)))
            yield images(4, seed)

    x = torch.cat([images(4, seed) for seed in range(3)])
    # The same noise as without that: a seeded call takes its own up again after each batch.
    expected = undrift.predict(model, list(x.split(4)), 3, generator=5).probs
    done: list[Tensor] = []
    together(lambda: done.append(undrift.predict(model, loader(), 3, generator=5).probs))
    assert torch.equal(done[0], expected)
    assert torch.equal(undrift.predict(model, x, 3, generator=5, batch_size=4).probs, expected)


def test_two_networks_do_not_wait_for_each_other() -> None:
    one, other = undrift.perturb(convnet()), undrift.perturb(convnet())

    def cascade(first: undrift.Perturbed, second: undrift.Perturbed) -> None:
        for _ in range(10):
            undrift.predict(first, (x for x in [images(2)] if len(undrift.predict(second, x))))

    together(lambda: cascade(one, other), lambda: cascade(other, one))


def test_a_network_that_was_asked_can_be_copied_and_pickled() -> None:
    model = undrift.perturb(convnet())
    undrift.predict(model, images())
    names = list(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(twin.state_dict()) == names
        together(lambda twin=twin: undrift.predict(twin, images()), lambda: undrift.predict(model, images()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_not_locked_out() -> None:
    net = convnet()
    held, forked = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        forked.wait()

    with net.register_forward_pre_hook(hold):
        thread = threading.Thread(target=undrift.predict, args=(net, images()))
        thread.start()
        held.wait()
    if (child := os.fork()) == 0:
        # The thread whose turn it is is not there to end it.
        signal.alarm(10)
        undrift.predict(net, images())
        os._exit(0)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
