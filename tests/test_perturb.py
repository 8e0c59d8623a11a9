"""Nothing of the user's is lost: what a perturbation changes, and that it all comes back."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import undrift
from support import convnet, images, learnables, same, snapshot
from undrift.perturb import remove


def adapt_a_little(model: undrift.Perturbed, steps: int = 3) -> None:
    optimiser = torch.optim.SGD(learnables(model).values(), lr=0.1)
    for step in range(steps):
        loss = model(images(seed=step)).square().mean() + undrift.kl(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def test_right_after_perturb_the_learnables_are_exactly_known() -> None:
    model = undrift.perturb(convnet())
    names = {"noise.0.log_var", "noise.3.log_var", "noise.8.log_var"}
    assert set(learnables(model)) == names | {"net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}
    fixed = undrift.perturb(convnet(), norm_affine=False)
    assert set(learnables(fixed)) == names


def test_weights_and_keys_never_change() -> None:
    net = convnet()
    before = snapshot(net)
    model = undrift.perturb(net)
    adapt_a_little(model)
    after = net.state_dict()
    assert list(after) == list(before)
    changed = {k for k in before if not torch.equal(before[k], after[k])}
    assert changed == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias"}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
def test_off_is_the_source_bit_for_bit(mode: str, statistics: str) -> None:
    net = convnet().train(mode == "train")
    twin = copy.deepcopy(net)
    state = snapshot(net)
    expected = copy.deepcopy(twin)(images())
    model = undrift.perturb(net, norm_statistics=statistics)
    adapt_a_little(model)
    adapted = snapshot(net)
    with model.off():
        assert same(net.state_dict(), state)
        assert torch.equal(net(images()), expected)
        with model.off():
            assert model(images()).shape == expected.shape
    assert same(
        {k: v for k, v in net.state_dict().items() if "num" not in k},
        {k: v for k, v in adapted.items() if "num" not in k},
    )
    assert not torch.equal(net(images()), expected)


def test_off_inside_a_step_leaves_its_backward_pass_alone() -> None:
    model = undrift.perturb(convnet())
    noisy = model(images())
    with model.off(), torch.no_grad():
        clean = model(images())
    (noisy - clean).square().sum().backward()
    assert all(p.grad is not None for p in learnables(model).values())


def test_off_comes_back_after_an_error() -> None:
    model = undrift.perturb(convnet())
    with pytest.raises(ZeroDivisionError), model.off():
        _ = 1 / 0
    assert model.key.enabled
    assert not torch.equal(model(images()), model(images()))


def traces(net: nn.Module) -> list[object]:
    """Everything but tensors that a perturbation could leave behind."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    found: list[object] = []
    for module in net.modules():
        found.append(
            {
                k: dict(v) if k in tables else v
                for k, v in vars(module).items()
                if k not in ("_parameters", "_buffers", "_modules")
            }
        )
        found.append(type(module))
    return found


@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
def test_remove_leaves_no_trace(statistics: str) -> None:
    net = convnet()
    net[3].weight.requires_grad_(False)
    net[1].eval()
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    flags = [p.requires_grad for p in net.parameters()]
    identities = [id(t) for t in (*net.parameters(), *net.buffers())]
    before, marks = snapshot(net), traces(net)
    model = undrift.perturb(net, norm_statistics=statistics)
    adapt_a_little(model)
    model.eval()
    assert model.remove() is net
    assert same(net.state_dict(), before)
    assert [id(t) for t in (*net.parameters(), *net.buffers())] == identities
    assert [p.requires_grad for p in net.parameters()] == flags
    assert traces(net) == marks
    assert model.remove() is net  # a second time changes nothing
    with pytest.raises(undrift.UndriftError, match="removed"):
        model(images())


def test_remove_inside_off() -> None:
    net = convnet()
    before = snapshot(net)
    model = undrift.perturb(net)
    adapt_a_little(model)
    with model.off():
        model.remove()
    assert same(net.state_dict(), before)


def test_copies_are_independent() -> None:
    model = undrift.perturb(convnet(), norm_statistics="source")
    twin = copy.deepcopy(model)
    twin(images()).square().sum().backward()
    assert all(p.grad is None for p in learnables(model).values())
    assert all(p.grad is not None for p in learnables(twin).values())
    for m in (model, twin):
        m.reseed(3)
    assert torch.equal(model(images()), twin(images()))
    before = snapshot(model.net)
    adapt_a_little(twin)
    assert same(model.net.state_dict(), before)
    twin.remove()
    assert not torch.equal(model(images()), model(images()))


def test_the_network_alone_can_be_copied_pickled_and_loaded() -> None:
    net = convnet()
    state = snapshot(net)
    model = undrift.perturb(net)
    assert same(copy.deepcopy(net).state_dict(), net.state_dict())
    assert same(pickle.loads(pickle.dumps(net)).state_dict(), net.state_dict())
    assert same(pickle.loads(pickle.dumps(model)).state_dict(), model.state_dict())
    assert net.load_state_dict(state, strict=True)
    assert convnet().load_state_dict(net.state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True), net.state_dict())


def test_state_dict_of_the_model_round_trips() -> None:
    model = undrift.perturb(convnet())
    adapt_a_little(model)
    other = undrift.perturb(convnet())
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(images()), model(images()))


def test_outputs_keep_their_shape_and_type() -> None:
    class Output(dict[str, Tensor]):
        pass

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = convnet()

        def forward(self, *, pixels: Tensor) -> Output:
            return Output(logits=self.body(pixels))

    model = undrift.perturb(Wrapped())
    assert type(model(pixels=images())) is Output


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


def test_a_second_perturbation_is_refused() -> None:
    net = convnet()
    model = undrift.perturb(net)
    for again in (net, model, nn.Sequential(net)):
        with pytest.raises(undrift.CannotPerturb, match=r"perturbed already.*remove"):
            undrift.perturb(again)
    model.remove()
    undrift.perturb(net)


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


def test_moving_the_inner_network_alone_is_named() -> None:
    model = undrift.perturb(convnet())
    model.noise.to("meta")
    with pytest.raises(undrift.UndriftError, match=r"model\.to"):
        model(images())


def test_the_source_state_follows_a_move() -> None:
    net = convnet().eval()
    model = undrift.perturb(net)
    adapt_a_little(model)
    model.double()
    with model.off():
        assert net(images().double()).dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in model.remove().parameters())


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


def test_the_mean_network_has_norm_policies_but_no_noise() -> None:
    model = undrift.perturb(convnet(), norm_statistics="moving")
    model(images())
    kept = model.net[1].running_mean.clone()
    with model.mean():
        a, b = model(images()), model(images())
    assert torch.equal(a, b)
    assert torch.equal(model.net[1].running_mean, kept)
    with model.off():
        assert not torch.equal(model(images()), a)
    with model.rest():
        assert not torch.equal(model(images()), a)
        assert torch.equal(model.net[1].running_mean, kept)
    model(images())
    assert not torch.equal(model.net[1].running_mean, kept)


def test_torchscript_is_refused() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(undrift.CannotPerturb, match="TorchScript"):
        undrift.perturb(scripted)


def test_other_modules_with_weights_are_named() -> None:
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 3), "words": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    lines = repr(undrift.perturb(net)).splitlines()
    assert sum("no: not a convolution, linear or attention layer" in line for line in lines) == 2


def test_train_mode_does_not_reach_the_source() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).eval()
    expected, before = net(images()), snapshot(net)
    model = undrift.perturb(net)
    model.train()
    model(images(seed=1))
    for _ in range(2):
        with model.off():
            assert torch.equal(net(images()), expected)
        assert net.training  # and the mode comes back
    assert torch.equal(model.remove()(images()), expected)
    assert same(net.state_dict(), before)


def test_a_source_in_train_mode_keeps_its_statistics() -> None:
    net = convnet().train()
    before = snapshot(net)
    model = undrift.perturb(net)
    with model.off():
        net(images())
    assert same(model.remove().state_dict(), before)


@pytest.mark.parametrize("old_style", [True, False])
def test_spectral_norm_in_train_mode_gets_its_vectors_back(old_style: bool) -> None:
    make = nn.utils.spectral_norm if old_style else parametrizations.spectral_norm
    net = nn.Sequential(make(nn.Linear(4, 3))).train()
    before = snapshot(net)
    model = undrift.perturb(net)
    model(torch.ones(2, 4))
    assert same(model.remove().state_dict(), before)


def test_a_second_perturbation_is_refused_in_every_form() -> None:
    net = convnet()
    model = undrift.perturb(net)
    with pytest.raises(undrift.CannotPerturb, match="already"):
        undrift.perturb(net[0])
    with model.off(), pytest.raises(undrift.CannotPerturb, match="already"):
        undrift.perturb(net)
    with pytest.raises(undrift.CannotPerturb, match="already"):
        undrift.perturb(copy.deepcopy(net))


def test_copies_inside_off_are_refused_and_inside_mean_are_noisy() -> None:
    model = undrift.perturb(convnet(), norm_statistics="source")
    with model.off(), pytest.raises(undrift.UndriftError, match="inside"):
        copy.deepcopy(model)
    with model.mean():
        twin = copy.deepcopy(model)
    assert not torch.equal(twin(images()), twin(images()))


def test_a_data_parallel_wrapper_is_refused() -> None:
    with pytest.raises(undrift.CannotPerturb, match="Perturb first, then wrap"):
        undrift.perturb(nn.DataParallel(convnet()))


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


def test_inference_between_forward_and_backward() -> None:
    model = undrift.perturb(convnet())
    loss = model(images()).sum()
    with torch.inference_mode():
        model(images(seed=1))
    loss.backward()
    model(images()).sum().backward()


def test_torch_func_is_refused() -> None:
    model = undrift.perturb(convnet())
    with pytest.raises(undrift.UndriftError, match="vmap"), torch.no_grad():
        torch.vmap(model, randomness="different")(images()[:, None])
    assert torch.isfinite(model(images())).all()


def test_a_network_gets_rid_of_a_perturbation_that_nobody_holds() -> None:
    net = convnet()
    before, marks = snapshot(net), traces(net)
    adapt_a_little(undrift.perturb(net, train="*"))
    with pytest.raises(undrift.CannotPerturb, match=r"undrift\.remove\(net\)"):
        undrift.perturb(net)
    carried = copy.deepcopy(net)
    for one in (net, carried):
        assert remove(one) is one
        assert same(one.state_dict(), before)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in one.modules())
        assert all(p.requires_grad for p in one.parameters())
    assert traces(net) == marks
    assert "_undrift" not in vars(net)
    for wrong in (net, "net"):
        with pytest.raises(undrift.UndriftError, match="no perturbation on it"):
            remove(wrong)  # type: ignore[arg-type]


def test_removing_from_the_network_ends_the_model_too() -> None:
    net = convnet()
    model = undrift.perturb(net)
    assert remove(net[0]) is net[0]  # a part: the perturbation is one
    with pytest.raises(undrift.UndriftError, match="removed"):
        model(images())
    model = undrift.perturb(net)
    with model.off():
        remove(net)
    assert not net[0]._forward_hooks
    assert remove(undrift.perturb(net)) is net


def test_a_perturbed_network_is_given_back_only_where_that_was_asked_and_nobody_holds_it() -> None:
    net = convnet()
    before = snapshot(net)
    model = undrift.perturb(net)
    adapt_a_little(model)
    model.give_back()
    held, model = model, None
    assert net[0]._forward_hooks
    del held
    assert not net[0]._forward_hooks
    assert same(net.state_dict(), before)
    undrift.perturb(net)
    assert net[0]._forward_hooks


def test_a_perturbation_made_in_inference_mode_can_be_trained() -> None:
    net = convnet()
    with torch.inference_mode():
        model = undrift.perturb(net)
    adapt_a_little(model)
    assert not any(p.is_inference() for p in model.parameters())
    with torch.inference_mode():
        model.remove()
