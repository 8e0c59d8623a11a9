"""How far each kind of parameter moves in a step, and weights whose gradients have other strides."""

import copy

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, learnables
from undrift.keep import Keeper


class Moves(Keeper):
    """Remembers the gradients of the latest step, and what the step did."""

    def gradients(self, model: undrift.Perturbed) -> None:
        self.before = {name: p.detach().clone() for name, p in learnables(model).items()}
        self.gradient = {name: p.grad.clone() for name, p in learnables(model).items() if p.grad is not None}

    def after(self, model: undrift.Perturbed, loss: float) -> None:
        self.moved = {name: p.detach() - self.before[name] for name, p in learnables(model).items()}


def test_each_kind_of_parameter_has_its_rate_and_log_variances_have_no_decay() -> None:
    model = undrift.perturb(
        convnet(),
        train="8",
        fast="8",
        log_var_lr_scale=3.0,
        adapt_lr=0.1,
        adapt_schedule="constant",
        weight_decay=0.01,
        momentum=0.0,
    )
    keeper = Moves()
    undrift.adapt(model, images(), undrift.entropy, epochs=1, keepers=[keeper])
    rates = {
        **dict.fromkeys(("net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"), (0.1, 0.01)),
        **dict.fromkeys(("noise.0.log_var", "noise.3.log_var"), (0.3, 0.0)),
        "noise.8.log_var": (3.0, 0.0),
        **dict.fromkeys(("net.8.weight", "net.8.bias"), (1.0, 0.01)),
    }
    assert rates.keys() == keeper.moved.keys()
    for name, (rate, decay) in rates.items():
        wanted = -rate * (keeper.gradient[name] + decay * keeper.before[name])
        torch.testing.assert_close(keeper.moved[name], wanted, rtol=1e-4, atol=1e-7)
        assert keeper.moved[name].any()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_weights_whose_gradients_have_other_strides_learn_as_others(kind: str) -> None:
    """Those of a 1×1 convolution may, and torch's fused optimisers refuse them."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)

    def learned(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        model = undrift.perturb(net, train="*", layers=(), stream_optimiser=kind, stream_lr=0.01)
        list(undrift.stream(model, [x, x], lambda logits: logits.softmax(1).square().mean(), answer="before"))
        return {name: p.detach().contiguous() for name, p in learnables(model).items()}

    torch.testing.assert_close(
        learned(other, images().contiguous(memory_format=torch.channels_last)), learned(net, images())
    )


def test_an_optimiser_of_nothing() -> None:
    model = undrift.perturb(convnet(), layers=(), norm_affine=False)
    going = undrift.stream(model, [images()], answer="before")
    assert len(next(going)) == len(images())


@pytest.mark.parametrize("method", ["undrift", "tent", "cotta"])
def test_adam_is_refused_where_weights_are_in_float16(method: str) -> None:
    """The averages of squared gradients round to 0 there: steps of 28 at a rate of 0.001."""
    net = convnet().half()
    with pytest.raises(undrift.OptionError, match=r"is in float16, .*needed: .*bfloat16. Give net\.float\(\)"):
        undrift.stream(net, [images().half()], method=method)
    undrift.perturb(net)  # nothing is on it
