"""G-SFDA's masks and the source training that makes them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift_bench.zoo import compensate, mask_scale, masked, masked_loss, masks_of


class Net(nn.Module):
    def __init__(self, bottleneck: nn.Module) -> None:
        super().__init__()
        self.bottleneck, self.fc = bottleneck, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.bottleneck(x))
        return logits


FORMS = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
    "single": lambda: nn.Linear(4, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_masked_network_is_the_network_under_the_sources_mask(form: str) -> None:
    net, x = Net(FORMS[form]()).eval(), torch.randn(5, 4)
    keys, features = set(net.state_dict()), net.bottleneck(x)
    assert masked(net) is net
    assert set(net.state_dict()) - keys == {"bottleneck.masks.embedding"}
    masks = masks_of(net)
    assert masks is not None
    mask = torch.sigmoid(100 * masks.embedding)
    torch.testing.assert_close(net(x), net.fc(features * mask[0]))
    with masks.using(1):
        torch.testing.assert_close(net(x), net.fc(features * mask[1]))
        torch.testing.assert_close(copy.deepcopy(net)(x), net(x))
    with pytest.raises(undrift.OptionError, match="has masks already"):
        masked(net)
    with pytest.raises(undrift.OptionError, match="no module 'neck'"):
        masked(Net(nn.Linear(4, 3)), features="neck")
    with pytest.raises(undrift.OptionError, match="width"):
        masked(Net(nn.Identity()))


def test_the_source_loss_by_hand_in_one_pass() -> None:
    net, x, y = Net(FORMS["sequential"]()), torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
    with pytest.raises(undrift.OptionError, match="no masks to train"):
        masked_loss(net, x, y)
    masks = masks_of(masked(net))
    assert masks is not None
    masks.scale = 0.5
    mean = net.bottleneck[1].running_mean.clone()
    loss = masked_loss(net, x, y, sparsity=0.75)
    assert net.bottleneck[1].num_batches_tracked == 1  # the trunk sees the batch once
    assert not torch.equal(net.bottleneck[1].running_mean, mean)
    mask = torch.sigmoid(0.5 * masks.embedding)
    features = net.bottleneck[:2](x)
    fits = [F.cross_entropy(net.fc(features * m), y, label_smoothing=0.1) for m in mask]
    torch.testing.assert_close(loss, fits[0] + fits[1] + 0.75 * mask.sum() / 6)


def test_the_compensated_gradient_by_hand() -> None:
    net = masked(Net(FORMS["single"]()))
    masks = masks_of(net)
    assert masks is not None
    masks.scale = 2.0
    with torch.no_grad():
        masks.embedding.copy_(torch.tensor([[0.1, -0.4, 9.0], [0.0, 1.0, 2.0]]))
    masks.embedding.grad = torch.ones(2, 3)
    compensate(masks)
    for e, g in zip(masks.embedding.flatten().tolist(), masks.embedding.grad.flatten().tolist(), strict=True):
        clipped = min(10.0, max(-10.0, 2 * e))
        assert g == pytest.approx(50 * (math.cosh(clipped) + 1) / (math.cosh(e) + 1), rel=1e-5)


def test_the_scale_rises_over_an_epoch_to_a_hundred() -> None:
    assert [mask_scale(n, 5) for n in (0, 2, 4)] == pytest.approx([0.01, 50.005, 100])
    assert mask_scale(9, 5) == mask_scale(4, 5)
    assert mask_scale(0, 1) == 0.01
