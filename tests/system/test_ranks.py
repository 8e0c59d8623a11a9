"""How batches are divided and joined, without processes: by hand, and with what several would say."""

import os
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

import undrift
from faults import one_of_processes
from support import convnet, images
from undrift.posterior import sync_batch_norm
from undrift.system import ranks
from undrift.system.ranks import Share, part_of


@pytest.mark.parametrize(("rows", "count"), [(0, 2), (1, 3), (7, 2), (64, 3), (5, 8)])
def test_parts_are_runs_that_cover_a_batch_once(rows: int, count: int) -> None:
    bounds = [part_of(rows, number, count) for number in range(count)]
    assert [place for first, last in bounds for place in range(first, last)] == list(range(rows))
    sizes = [last - first for first, last in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_one_process_takes_everything_and_sends_nothing() -> None:
    x, before = torch.arange(5.0), ranks.bytes_sent()
    assert torch.equal(ranks.part(x), x)
    assert ranks.sum_over_processes([x])[0] is x
    ranks.broadcast([x])
    ranks.require_equal("anything", "options")
    assert (ranks.world_size(), ranks.rank(), ranks.bytes_sent()) == (1, 0, before)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduling policies")
def test_threads_of_the_background_interrupt_nobody() -> None:
    """They keep the policy that they were started with; this one gets its own back."""
    found, go_on = list[int](), threading.Event()
    thread = threading.Thread(target=lambda: (go_on.wait(), found.append(os.sched_getscheduler(0))))
    with ranks.background_threads():
        thread.start()
    go_on.set()
    thread.join()
    assert (found, os.sched_getscheduler(0)) == ([os.SCHED_BATCH], os.SCHED_OTHER)


def test_a_share_knows_where_its_rows_begin() -> None:
    assert [(Share((3, 2, 4), rank).first, Share((3, 2, 4), rank).own) for rank in range(3)] == [(0, 3), (3, 2), (5, 4)]
    assert Share((9, 9), 1, alike=True).first == 0


def test_a_batch_that_all_processes_have_counts_once() -> None:
    """Each finds the whole gradient; their sum is that of the batch."""
    x = torch.ones(3, 2, requires_grad=True)
    (Share((3, 3), 1, alike=True).whole(x) * 6).sum().backward()
    assert torch.equal(x.grad if x.grad is not None else x, torch.full((3, 2), 3.0))


class Alone(Share):
    """One process of one, that takes the way of many."""

    def join(self, mine: Tensor) -> Tensor:
        return mine

    def each(self, mine: Tensor) -> Tensor:
        return mine[None]

    def total(self, mine: Tensor) -> Tensor:
        return mine


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 5)])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_shared_statistics_and_their_gradient_are_those_of_batch_norm(shape: tuple[int, ...], mean: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=torch.float64) + mean, torch.rand(4, dtype=torch.float64)
    out, towards = list[Tensor](), torch.randn(shape, dtype=torch.float64)
    for shared in (False, True):
        given = x.clone().requires_grad_()
        if shared:
            found = sync_batch_norm.batch_statistics(given.detach(), Alone((6,), 0))
            through = sync_batch_norm.with_gradient(given, found, 1e-5, Alone((6,), 0))
            y = nn.functional.batch_norm(through, found.mean, found.var, weight, None, False, 0.1, 1e-5)
        else:
            y = nn.functional.batch_norm(given, None, None, weight, None, True, 0.1, 1e-5)
        (y * towards).sum().backward()
        assert given.grad is not None
        out += [y.detach(), given.grad]
    torch.testing.assert_close(out[2], out[0])
    torch.testing.assert_close(out[3], out[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("statistics", ["batch", "train", "moving", "domain"])
def test_a_norm_layer_takes_the_way_of_many_and_leaves_no_trace(statistics: str) -> None:
    """Outputs, moved averages and gradients are those of one process; what a pass puts into the layer goes again."""
    found = []
    for share in (None, Alone((6,), 0)):
        torch.manual_seed(0)
        model = undrift.perturb(convnet(), norm_statistics=statistics, generator=torch.Generator().manual_seed(1))
        model.key.train()
        model.key.share = share
        out = model(images(6))
        out.square().sum().backward()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"out": out.detach(), **state, **grads})
        assert all(not policy.replaced for policy in model.norms)
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_noise_of_windows_begins_at_the_images_own() -> None:
    """A layer may see several rows per image: the windows of a transformer."""
    model = undrift.perturb(convnet())
    model.key.share = Share((2, 3), 1)
    assert (model.key.first_row(3), model.key.first_row(12)) == (2, 8)
    model.key.share = None
    assert model.key.first_row(3) == 0


@pytest.mark.parametrize(
    ("net", "likelihood", "what"),
    [
        (convnet(), undrift.likelihood.Hcl(), "Hcl uses more of a step"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten()),
            undrift.entropy,
            "1 normalises by its own part",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused(net: nn.Module, likelihood: object, what: str) -> None:
    with one_of_processes(0), pytest.raises(undrift.OptionError, match=what) as caught:
        undrift.adapt(undrift.perturb(net), images(8), likelihood, epochs=1)  # type: ignore[arg-type]
    assert "start one process" in str(caught.value)
