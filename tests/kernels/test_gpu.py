"""What holds on a GPU alone: graphs of CUDA, checkpoints, processes that share a model, the compiler's own graphs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import undrift
from undrift.kernels import force

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


class Net(nn.Module):
    """Convolutions with and without groups, strided and not, and a linear layer; its middle may be a checkpoint."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.middle, self.grouped = nn.Conv2d(32, 48, 1, stride=2), nn.Conv2d(48, 48, 3, padding=1, groups=4)
        self.head, self.checkpointed = nn.Linear(48, 5), checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return torch.relu(self.grouped(torch.relu(self.middle(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.head(x.mean((2, 3)))


def perturbed(checkpointed: bool = False, fraction: float = 0.1) -> undrift.Perturbed:
    torch.manual_seed(0)
    net = Net(checkpointed).cuda().to(memory_format=torch.channels_last)
    model = undrift.perturb(net, init_fraction=fraction, linear_sharing="kernel", norm_statistics="batch")
    model.reseed(3)
    return model


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(8, 3, 16, 16, generator=generator).cuda().to(memory_format=torch.channels_last)


@contextmanager
def exact() -> Iterator[None]:
    """Keep convolutions in float32 proper: tf32 differs between algorithms."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.requires_grad]


def step(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    y.square().sum().backward()
    return y


def test_a_captured_graph_draws_new_noise_at_every_replay_as_uncaptured_steps_do() -> None:
    x, model = images(), perturbed()
    twin = copy.deepcopy(model)
    with exact():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # the first launches compile
                step(model, x)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in model.parameters():
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(model, x)
        seen, pulls = [], []
        for _ in range(2):
            graph.replay()
            seen.append(captured.detach().clone())
            pulls.append([g.clone() for g in gradients(model)])
        assert not torch.equal(seen[0], seen[1])
        for _ in range(3):
            step(twin, x)
        # Capturing runs Python but no kernel: the step counter stood still, and goes on with the first replay.
        for replayed, pull in zip(seen, pulls, strict=True):
            for parameter in twin.parameters():
                parameter.grad = None
            torch.testing.assert_close(step(twin, x).detach(), replayed, rtol=1e-4, atol=1e-4)
            for got, want in zip(pull, gradients(twin), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_captured_graph_goes_on_with_moving_statistics() -> None:
    x = images()
    torch.manual_seed(0)
    model = undrift.perturb(Net().cuda(), norm_statistics="train", norm_momentum=0.3).train()
    twin = copy.deepcopy(model)
    with exact():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(model, x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(model, x)
        for _ in range(3):
            graph.replay()
        for _ in range(4):
            step(twin, x)
    for got, want in zip(model.norms, twin.norms, strict=True):
        torch.testing.assert_close(got.layer.running_mean, want.layer.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.layer.running_var, want.layer.running_var, rtol=1e-4, atol=1e-5)


def test_a_captured_step_trains_as_the_step_itself_does() -> None:
    model = perturbed()
    twin = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def training(model: nn.Module) -> Callable[[Tensor], Tensor]:
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

        def taken(x: Tensor) -> Tensor:
            y = step(model, x)
            optimiser.step()
            optimiser.zero_grad()
            return y.detach()

        return taken

    fast, plain, x = undrift.Captured(training(model)), training(twin), images()
    with exact():
        # Three as they are, three replays, and one of another size, which runs as it is.
        for batch in (*(x * (1 + k) for k in range(6)), x[:5]):
            torch.testing.assert_close(fast(batch), plain(batch), rtol=1e-3, atol=1e-3)
    ends = [[p for p in m.parameters() if p.requires_grad] for m in (model, twin)]
    for before, got, want in zip(start, *ends, strict=True):
        assert not torch.equal(before, got)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_activation_checkpointing_changes_nothing() -> None:
    with exact():
        plain, again = perturbed(), perturbed(checkpointed=True)
        a, b = step(plain, images()), step(again, images())
        torch.testing.assert_close(a, b)
        for got, want in zip(gradients(again), gradients(plain), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiler_sees_one_graph_that_does_the_same(mode: str, checkpointed: bool) -> None:
    torch._dynamo.reset()
    with exact():
        model = perturbed(checkpointed)
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, fullgraph=not checkpointed, mode=mode)
        for _ in range(4):  # the third is the first that CUDA graphs replay
            for parameter in (*model.parameters(), *twin.parameters()):
                parameter.grad = None
            got, want = step(compiled, images()).detach().clone(), step(twin, images())
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            for a, b in zip(gradients(model), gradients(twin), strict=True):
                assert (a - b).abs().max() <= 5e-3 * b.abs().max()


def test_bfloat16_and_memory_order_keep_the_noise() -> None:
    model = perturbed(fraction=4.0)
    contiguous = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        with force("plain"):
            want = copy.deepcopy(model)(images())
        with torch.autocast("cuda", torch.bfloat16):
            got = [copy.deepcopy(model)(images()).float(), contiguous(images().contiguous()).float()]
        with model.mean():
            without = model(images())
    assert (without - want).abs().max() > 0.3
    assert max((each - want).abs().max() for each in got) < 0.1


def _share(rank: int, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    net = Net().cuda()
    model = undrift.perturb(net, init_fraction=0.1, linear_sharing="kernel", norm_statistics="source")
    model.reseed(3)
    shared = DistributedDataParallel(model)
    shared(images()[4 * rank : 4 * rank + 4]).square().sum().backward()
    if rank == 0:
        torch.save([g.cpu() for g in gradients(model)], out)
    dist.destroy_process_group()


def test_two_processes_draw_what_one_would_for_the_whole_batch(tmp_path: object) -> None:
    out = f"{tmp_path}/gradients.pt"
    mp.spawn(_share, args=(out,), nprocs=2)
    with exact():
        torch.manual_seed(0)
        net = Net().cuda()
        model = undrift.perturb(net, init_fraction=0.1, linear_sharing="kernel", norm_statistics="source")
        model.reseed(3)
        model(images()).square().sum().backward()
    for got, want in zip(torch.load(out, weights_only=True), gradients(model), strict=True):
        torch.testing.assert_close(2 * got, want.cpu(), rtol=1e-3, atol=1e-3)  # DDP gives the mean over processes
