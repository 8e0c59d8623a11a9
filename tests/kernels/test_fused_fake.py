"""Tensors with shapes and no values: a network of them cannot be perturbed, a perturbed one can be called with them."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import undrift
from support import convnet, images
from undrift.kernels import operators


def untouched(net: nn.Module) -> bool:
    return all(p.requires_grad for p in net.parameters()) and not any(
        m._forward_hooks or m._forward_pre_hooks for m in net.modules()
    )


def test_a_network_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        net = convnet()
    with pytest.raises(undrift.CannotPerturb, match=r"0\.weight is on the meta device.*prior needs them.*Load the wei"):
        undrift.perturb(net)
    assert untouched(net)


def test_a_network_of_fake_tensors_is_refused() -> None:
    with FakeTensorMode():
        net = convnet()
        with pytest.raises(
            undrift.CannotPerturb, match=r"0\.weight is a fake tensor.*no values.*FakeTensorMode\(allow"
        ):
            undrift.perturb(net)
    assert untouched(net)


def test_nothing_is_perturbed_under_fake_mode() -> None:
    net = convnet()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(undrift.CannotPerturb, match=r"under FakeTensorMode.*no values.*Perturb it before"),
    ):
        undrift.perturb(net)
    assert untouched(net)


def test_a_part_without_values_may_be_left_out() -> None:
    """Nobody asks for the weights of a head that gets no noise."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2, device="meta"))
    model = undrift.perturb(net, layers=("0",))
    assert [noise.log_var.numel() for noise in model.noises()] == [4]


@pytest.mark.parametrize("gradients", [False, True])
def test_a_perturbed_network_can_be_called_with_fake_tensors(gradients: bool) -> None:
    """As the message says; it is a step like any other, and leaves nothing fake behind."""
    model = undrift.perturb(convnet(), norm_statistics="source")
    model.reseed(3)
    wanted = [model(images()) for _ in range(2)]
    model.reseed(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(gradients):
        y = model(mode.from_tensor(images()))
        if gradients:
            y.sum().backward()
            assert all(isinstance(noise.log_var.grad, FakeTensor) for noise in model.noises())
    assert isinstance(y, FakeTensor)
    assert y.shape == wanted[0].shape
    model.zero_grad()
    assert torch.equal(model(images()), wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3)], ids=["NCHW", "NHWC", "NHCW"])
def test_the_operators_give_the_shapes_that_they_promise(order: tuple[int, ...], dtype: torch.dtype) -> None:
    """A fake output has the shape, dtype and strides of the real one, in whatever order memory is."""
    y = torch.randn(4, 6, 30, 40, dtype=dtype).permute(order).contiguous().permute([order.index(k) for k in range(4)])
    real = (y, operators.square_sum(y, 2, False), torch.zeros(6), torch.tensor(5))
    fake = tuple(map(FakeTensorMode().from_tensor, real))
    settings = (0, 2, False)
    for operator in (operators.add_noise, operators.noise_gradients):
        got, want = ((v,) if isinstance(v := operator(*given, *settings), Tensor) else v for given in (fake, real))
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
