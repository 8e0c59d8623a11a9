"""Nothing of the user's is lost: inside `off()` and after `remove()` the source is back, bit for bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import undrift
from perturb_support import adapt_a_little
from support import convnet, images, learnables, same, snapshot
from undrift import remove


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


def load_others(net: nn.Module) -> None:
    net.load_state_dict(convnet().state_dict())


def assign_others(net: nn.Module) -> None:
    net.load_state_dict(convnet().state_dict(), assign=True)


def make_a_step(net: nn.Module) -> None:
    net(images()).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


@pytest.mark.parametrize("change", [load_others, assign_others, make_a_step])
def test_other_weights_inside_off_are_warned_of_once(change: Callable[[nn.Module], object]) -> None:
    net = convnet()
    model = undrift.perturb(net)
    asked = r"0\.weight.*inside.*needed.*model\.remove\(\), load"
    with pytest.warns(undrift.UndriftWarning, match=asked) as told, model.off():
        change(net)
    assert told[0].filename == __file__
    with model.off():  # an error, were it said again
        load_others(net)
    assert model.key.enabled  # and the perturbation is on again, all of it
    assert not torch.equal(model(images()), model(images()))
    # What the message says to do works.
    other = convnet()
    net = model.remove()
    net.load_state_dict(other.state_dict())
    model = undrift.perturb(net)
    with model.off():
        assert same(net.state_dict(), other.state_dict())


def test_a_layer_that_was_replaced_before_is_not_blamed_on_the_block() -> None:
    net = convnet()
    model = undrift.perturb(net)
    first = next(name for name, module in net.named_children() if isinstance(module, nn.Conv2d))
    setattr(net, first, copy.deepcopy(getattr(net, first)))
    with model.off():
        net(images())


def test_an_error_under_way_goes_before_that_of_other_weights() -> None:
    net = convnet()
    model = undrift.perturb(net)

    def load_and_fail() -> None:
        load_others(net)
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError), model.off():
        load_and_fail()
    assert model.key.enabled
    with model.off():
        model.remove()
        load_others(net)  # nobody's business any more


@pytest.mark.parametrize("train", [(), "*"])
def test_whatever_leaves_the_source_weights_alone_is_allowed_inside_off(train: str) -> None:
    with torch.inference_mode():
        made_there = nn.Linear(5, 5).requires_grad_(False)  # its tensors do not count what is written to them
    net = nn.Sequential(convnet(), made_there).train()
    model, head = undrift.perturb(net, train=train, layers="0.*"), nn.Linear(5, 2)
    optimiser = torch.optim.SGD(head.parameters(), lr=0.1)
    net[0].load_state_dict(net[0].state_dict())  # outside, the same weights may be written
    with model.off():
        with torch.no_grad():
            features = net(images())
            torch.func.functional_call(net, {"0.0.weight": net[0][0].weight * 2}, images())
        head(features).sum().backward()
        optimiser.step()
        copy.deepcopy(net)
        net.requires_grad_(False)
    assert model.key.enabled


@pytest.mark.parametrize("swaps", [False, True])
def test_a_move_inside_off_is_no_change_of_weights(swaps: bool) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        net = convnet()
        model = undrift.perturb(net)
        with model.off():
            net.double()
        assert model(images().double()).dtype == torch.float64
        with model.off():
            net.float().to(memory_format=torch.channels_last)
        assert model(images()).dtype == torch.float32
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


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


def test_the_source_state_follows_a_move() -> None:
    net = convnet().eval()
    model = undrift.perturb(net)
    adapt_a_little(model)
    model.double()
    with model.off():
        assert net(images().double()).dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in model.remove().parameters())


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
    model.remove_when_unused()
    held, model = model, None
    assert net[0]._forward_hooks
    del held
    assert not net[0]._forward_hooks
    assert same(net.state_dict(), before)
    undrift.perturb(net)
    assert net[0]._forward_hooks


def test_blocks_of_off_may_end_in_any_order() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.3)
    x = images(4)
    first, second = model.off(), model.off()
    net = first.__enter__()
    source = net(x)
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(net(x), source)
    second.__exit__(None, None, None)
    assert not torch.equal(model(x), source)
