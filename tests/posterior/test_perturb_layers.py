"""Every kind of layer is perturbed by the weight that it really uses, or refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import undrift
from support import convnet, images


def test_parametrized_layers_are_perturbed_by_their_effective_weight() -> None:
    linear = parametrizations.weight_norm(nn.Linear(4, 3))
    with torch.no_grad():
        linear.parametrizations.weight.original0 *= 10
    conv = parametrizations.spectral_norm(nn.Conv2d(2, 3, 3))
    vector = conv.parametrizations.weight[0]._u.clone()
    for layer, size in ((linear, (5, 4)), (conv, (5, 2, 4, 4))):
        layer.train()
        net = nn.Sequential(layer)
        keys = list(net.state_dict())
        model = undrift.perturb(net, linear_sharing="kernel")
        if layer is conv:
            assert torch.equal(conv.parametrizations.weight[0]._u, vector)  # reading the weight took no power step
            layer.eval()
        expected = layer.weight.detach().flatten(1).var(1)
        torch.testing.assert_close(model.noise["0"].kernel_var, expected)
        assert list(net.state_dict()) == keys
        x = torch.rand(size)
        y = model(x)
        with model.off():
            assert not torch.equal(net(x), y)
        model.remove()


def test_older_weight_norm_is_not_read_stale() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    with torch.no_grad():
        layer.weight_g *= 10
    model = undrift.perturb(nn.Sequential(layer), linear_sharing="kernel")
    fresh = layer.weight_v * layer.weight_g / layer.weight_v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(model.noise["0"].kernel_var, fresh.detach().var(1))


def test_other_parametrizations() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = nn.Conv1d(2, 3, 3)
    parametrize.register_parametrization(layer, "weight", Doubled())
    model = undrift.perturb(nn.Sequential(layer))
    torch.testing.assert_close(
        model.noise["0"].kernel_var, 4 * layer.parametrizations.weight.original.detach().flatten(1).var(1)
    )


@pytest.mark.parametrize("same_size", [True, False])
def test_attention_is_perturbed_by_drawn_weights(same_size: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **({} if same_size else {"kdim": 4, "vdim": 4}))
    attention.eval()
    query, key = torch.randn(2, 3, 8), torch.randn(2, 5, 8 if same_size else 4)
    expected, weights = attention(query, key, key)
    model = undrift.perturb(attention, init_fraction=0.1)
    assert len(model.noise) == (2 if same_size else 4)
    assert "forward of its own" in repr(model)
    first, noisy_weights = model(query, key, key)
    assert not torch.equal(first, expected)
    assert not torch.equal(noisy_weights, weights)
    first.square().sum().backward()
    assert all(n.log_var.grad.abs().sum() > 0 for n in model.noise.values())
    with model.off():
        assert torch.equal(attention(query, key, key)[0], expected)
    model.remove()
    zero = undrift.perturb(attention, init_fraction=0.0)
    assert torch.equal(zero(query, key, key)[0], expected)


def test_a_transformer_encoder_does_not_take_a_path_around_its_hooks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = layer(x)
        model = undrift.perturb(layer)
        assert not torch.equal(model(x), expected)
        with model.off():
            assert torch.equal(model(x), expected)
    assert {"self_attn/in_proj_weight", "self_attn/out_proj/weight", "linear1", "linear2"} == set(model.noise)


def test_a_subclass_with_its_own_forward_is_run_again_with_drawn_weights() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1)), weight, self.bias)

    net = nn.Sequential(Standardised(3, 4, 3))
    expected = net(images())
    model = undrift.perturb(net)
    y = model(images())
    assert y.shape == expected.shape
    assert not torch.equal(y, expected)
    y.square().sum().backward()
    assert model.noise["0"].log_var.grad.abs().sum() > 0
    assert "drawn (it has a forward of its own)" in repr(model)
    assert torch.equal(model.remove()(images()), expected)


class IntegerWeights(nn.Linear):
    """What eight-bit libraries make of a linear layer."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.int8), requires_grad=False)


def quantised() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.nn.quantized.Linear(3, 3)


@pytest.mark.parametrize("lazy", [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(3, 3)])
def test_lazy_layers_are_refused_by_name(lazy: type[nn.Module]) -> None:
    with pytest.raises(undrift.CannotPerturb, match=r"1 .*lazy.*Run one batch"):
        undrift.perturb(nn.Sequential(nn.Linear(3, 3), lazy()))


@pytest.mark.parametrize("bad", [IntegerWeights, quantised])
def test_what_cannot_be_perturbed_is_refused_by_name(bad: type[nn.Module]) -> None:
    net = nn.ModuleDict({"good": nn.Linear(3, 3), "bad": bad()})
    with pytest.raises(undrift.CannotPerturb, match="bad") as caught:
        undrift.perturb(net)
    assert "exclude='bad'" in str(caught.value)
    assert net["good"].weight.requires_grad
    assert not net["good"]._forward_hooks
    model = undrift.perturb(net, exclude="bad")
    assert list(model.noise) == ["good"]


def test_nothing_to_perturb_is_an_error() -> None:
    with pytest.raises(undrift.CannotPerturb, match="nothing to perturb"):
        undrift.perturb(nn.Sequential(nn.ReLU()))
    with pytest.raises(undrift.CannotPerturb, match="nothing to perturb"):
        undrift.perturb(convnet(), types=("attention",))
    with pytest.raises(undrift.CannotPerturb, match=r"needs a torch\.nn\.Module"):
        undrift.perturb("resnet50")  # type: ignore[arg-type]


def test_a_layer_that_is_never_called_is_named() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + nn.functional.linear(x, self.idle.weight)

    model = undrift.perturb(Idle())
    with pytest.warns(undrift.UndriftWarning, match="never called idle"):
        model(torch.ones(2, 3))
    model(torch.ones(2, 3))  # once is enough


def test_channels_last_is_kept() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=2)).to(
        memory_format=torch.channels_last
    )
    x = images().to(memory_format=torch.channels_last)
    for estimator in ("local", "drawn"):
        model = undrift.perturb(net, estimator=estimator, norm_statistics="source")
        model.reseed(1)
        y = model(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        model.reseed(1)
        torch.testing.assert_close(y, model(images()))
        model.remove()


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_autocast_keeps_its_type(estimator: str) -> None:
    seen = []
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model = undrift.perturb(net, estimator=estimator)
    noise = model.noise["0"]
    with torch.autocast("cpu", torch.bfloat16):
        hook = noise.local if estimator == "local" else noise.drawn
        y = hook(net[0], (torch.randn(3, 16),), {}, torch.zeros(3, 16, dtype=torch.bfloat16))
        seen.append(y.dtype)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [torch.bfloat16]


def test_other_modules_with_weights_are_named() -> None:
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 3), "words": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    lines = repr(undrift.perturb(net)).splitlines()
    assert sum("no: not a convolution, linear or attention layer" in line for line in lines) == 2


def test_layers_may_be_called_what_they_like() -> None:
    net = nn.Module()
    net.keys, net.values = nn.Linear(3, 3), nn.Linear(3, 3)
    model = undrift.perturb(net)
    assert set(model.noise) == {"keys", "values"}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 18


def test_an_encoder_takes_a_padding_mask() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False, False, True, True], [False] * 4])
    with torch.no_grad():
        expected = encoder(x[:, :2])
        model = undrift.perturb(encoder, init_fraction=1e-12)
        torch.testing.assert_close(model(x, src_key_padding_mask=padding)[0, :2], expected[0], rtol=1e-3, atol=1e-3)
    assert model.remove().use_nested_tensor


def test_a_module_that_runs_again_calls_the_users_hooks_once() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = nn.Sequential(Own(4, 4))
    net[0].register_forward_pre_hook(lambda _, a: (2 * a[0],))
    net[0].register_forward_hook(lambda _, __, y: y + 1)
    expected = net(torch.ones(2, 4))
    assert torch.equal(undrift.perturb(net, init_fraction=0.0)(torch.ones(2, 4)), expected)
