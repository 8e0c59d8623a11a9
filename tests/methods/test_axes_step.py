"""A step is the same in both loops: who is asked, in which order, and what moves by how much."""

import torch
from torch import Tensor, nn

import undrift
from axes_support import batches, network
from support import images, learnables
from undrift import Step
from undrift.keep import Keeper


def test_a_likelihood_that_asks_nothing_makes_no_step() -> None:
    net = network()
    model = undrift.perturb(net)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def nothing(logits: Tensor, step: Step) -> Tensor | None:
        return None

    going = undrift.stream(model, batches(1), nothing)
    assert len(next(going)) == 8
    assert going.report.steps == 0
    assert "nothing asked" in str(going.report)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


class Recorder(Keeper):
    """Writes down what the loop asks of it, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, model: undrift.Perturbed) -> None:
        self.calls.append("start")

    def penalty(self, model: undrift.Perturbed) -> Tensor:
        self.calls.append("penalty")
        return sum(p.square().sum() for p in learnables(model).values())  # type: ignore[return-value]

    def gradients(self, model: undrift.Perturbed) -> None:
        self.calls.append("gradients")
        for p in learnables(model).values():
            p.grad = None

    def after(self, model: undrift.Perturbed, loss: float) -> str | None:
        self.calls.append("after")
        return None


class Follower:
    def __init__(self, keeper: Recorder) -> None:
        self.keeper = keeper

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        self.keeper.calls.append("loss")
        return undrift.entropy(logits)

    def follow(self, model: undrift.Perturbed) -> None:
        self.keeper.calls.append("follow")


def test_the_order_of_a_step_is_the_same_in_both_loops() -> None:
    wanted = ["start", "loss", "penalty", "gradients", "follow", "after"]
    keeper = Recorder()
    model = undrift.perturb(network())
    before = model.net[1].weight.detach().clone()  # type: ignore[index]
    next(undrift.stream(model, batches(1), Follower(keeper), keepers=[keeper]))
    assert keeper.calls == wanted
    assert torch.equal(model.net[1].weight, before)  # the keeper took its gradient away  # type: ignore[index]
    keeper = Recorder()
    undrift.adapt(undrift.perturb(network()), images(8), Follower(keeper), epochs=1, batch_size=8, keepers=[keeper])
    assert keeper.calls == wanted


def test_a_climb_takes_the_gradient_from_the_higher_place() -> None:
    """One step of plain SGD: w − lr · ∇L(w + ρ ∇L/‖∇L‖)."""
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))
    x = torch.rand(8, 3, 2, 2)
    weight = net[1].weight.detach().clone().requires_grad_()  # type: ignore[union-attr]

    def loss(w: Tensor) -> Tensor:
        z = net[2](nn.functional.layer_norm(x.flatten(1), (12,), w, net[1].bias))  # type: ignore[union-attr, arg-type]
        return undrift.entropy(z)

    bias = net[1].bias  # type: ignore[union-attr]
    first = torch.autograd.grad(loss(weight), [weight, bias])  # type: ignore[list-item]
    norm = torch.stack([g.norm() for g in first]).norm()
    with torch.no_grad():
        bias += 0.5 * first[1] / norm  # type: ignore[operator]
    high = (weight + 0.5 * first[0] / norm).detach().requires_grad_()
    (second,) = torch.autograd.grad(loss(high), [high])
    with torch.no_grad():
        bias -= 0.5 * first[1] / norm  # type: ignore[operator]
    options = {"layers": (), "climb": 0.5, "stream_optimiser": "sgd", "momentum": 0.0, "answer": "before"}
    model = undrift.perturb(net, **options)
    next(undrift.stream(model, [x], lr=0.1))
    torch.testing.assert_close(model.net[1].weight, (weight - 0.1 * second).detach())  # type: ignore[index]


def test_images_one_by_one_and_several_steps() -> None:
    sizes: list[int] = []

    def asked(logits: Tensor, step: Step) -> Tensor:
        sizes.append(len(logits))
        return undrift.entropy(logits)

    model = undrift.perturb(network(), stream_split=3, stream_steps=2, norm_statistics="source")
    (answer,) = undrift.stream(model, batches(1), asked)
    assert sizes == [3, 3, 3, 3, 2, 2]
    assert len(answer) == 8
