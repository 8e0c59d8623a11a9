"""A perturbed network is still the user's: keys, outputs, copies and modes stay; a second perturbation is refused."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from perturb_support import adapt_a_little
from support import convnet, images, learnables, same, snapshot


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


def test_a_second_perturbation_is_refused() -> None:
    net = convnet()
    model = undrift.perturb(net)
    for again in (net, model, nn.Sequential(net)):
        with pytest.raises(undrift.CannotPerturb, match=r"perturbed already.*remove"):
            undrift.perturb(again)
    model.remove()
    undrift.perturb(net)


def test_moving_the_inner_network_alone_is_named() -> None:
    model = undrift.perturb(convnet())
    model.noise.to("meta")
    with pytest.raises(undrift.UndriftError, match=r"model\.to"):
        model(images())


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
    with pytest.raises(undrift.CannotPerturb, match=r"Give that: net\.module.* perturb first, then wrap"):
        undrift.perturb(nn.DataParallel(convnet()))


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


def test_a_perturbation_made_in_inference_mode_can_be_trained() -> None:
    net = convnet()
    with torch.inference_mode():
        model = undrift.perturb(net)
    adapt_a_little(model)
    assert not any(p.is_inference() for p in model.parameters())
    with torch.inference_mode():
        model.remove()


def test_hooks_lie_in_the_order_in_which_they_run() -> None:
    """A compiler that counts a dictionary's entries has to find ours where it runs: before a user's."""
    net = convnet()
    net[0].register_forward_hook(lambda _layer, _args, y: y)
    net[0].register_forward_hook(lambda _layer, _args, y: y)
    model = undrift.perturb(net)
    with model.off():
        pass
    hooks = net[0]._forward_hooks
    assert list(dict.keys(hooks)) == list(hooks)
    assert next(iter(hooks.values())) == model.noise["0"].local
    assert len(model.remove()[0]._forward_hooks) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"classes": 3}, "classes=3 is not a list of names; needed: .*Give classes="),
        ({"classes": "abcde"}, "classes='abcde' is not a list"),
        ({"classes": [0, 1, 2, 3, 4]}, "is not a list of names"),
        ({"preprocess": "imagenet"}, "preprocess='imagenet' is a str; needed: .*IMAGENET.*Give that"),
    ],
)
@pytest.mark.parametrize("verb", ["perturb", "adapt", "stream"])
def test_what_travels_with_the_model_is_checked_before_the_network_is_touched(
    verb: str, given: dict[str, Any], said: str
) -> None:
    net = convnet()
    before = snapshot(net)
    calls: dict[str, Callable[..., Any]] = {
        "perturb": undrift.perturb,
        "adapt": lambda net, **given: undrift.adapt(net, images(), **given),
        "stream": lambda net, **given: undrift.stream(net, [images()], **given),
    }
    with pytest.raises(undrift.OptionError, match=said):
        calls[verb](net, **given)
    assert same(snapshot(net), before)
    undrift.perturb(net)  # nothing is on it
