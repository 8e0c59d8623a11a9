"""The KL's part about the mean in closed form: the implicit step by hand, and steady where its gradient diverges."""

import pytest
import torch
from torch import Tensor, nn

import undrift

IMAGES = torch.zeros(8, 4)  # whatever is asked of them, no likelihood below moves a weight


def nothing(logits: Tensor) -> Tensor:
    return 0 * logits.sum()


def shifted(**options: object) -> tuple[undrift.Perturbed, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3)).double()
    source = net[0].weight.detach().clone()
    model = undrift.perturb(net, train="*", linear_sharing="kernel", log_var_lr_scale=0.0, weight_decay=0.0, **options)
    shift = torch.randn_like(source)
    with torch.no_grad():
        model.net[0].weight += shift
    return model, source, shift


@pytest.mark.parametrize("reduction", ["bound", "mean"])
def test_a_step_is_the_implicit_one(reduction: str) -> None:
    model, source, shift = shifted(
        kl_mean="closed", kl_weight=0.5, kl_reduction=reduction, adapt_lr=0.01, adapt_schedule="constant", momentum=0.9
    )
    undrift.adapt(model, IMAGES.double(), nothing, epochs=1, batch_size=8)
    size = 8 if reduction == "bound" else source.numel()
    pulled = 1 + 0.01 / (1 - 0.9) * 0.5 / (source.var(1, keepdim=True) * size)
    assert torch.allclose(model.net[0].weight, source + shift / pulled)


def test_the_kl_says_the_same_and_its_mean_has_no_gradient() -> None:
    model, _, _ = shifted(kl_mean="closed")
    other, _, _ = shifted()
    assert torch.equal(undrift.kl(model).detach(), undrift.kl(other).detach())
    undrift.kl(model).backward()
    assert model.net[0].weight.grad is None
    undrift.kl(other).backward()
    assert other.net[0].weight.grad is not None


@pytest.mark.parametrize("how", ["closed", "gradient"])
def test_a_kernel_that_hardly_varies_stays_where_it_is(how: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        net[0].weight[0] = 1 + 1e-4 * torch.randn(4)
    model = undrift.perturb(net, train="*", kl_mean=how, linear_sharing="kernel", init_fraction=0.04, weight_decay=0.0)
    images = torch.randn(64, 4)

    def run() -> float:
        undrift.adapt(model, images, undrift.Information(), epochs=10, batch_size=8)
        return float((model.net[0].weight[0].detach() - 1).abs().max())

    if how == "closed":
        assert run() < 1e-2
    else:
        with pytest.raises(undrift.DataError, match="not finite"):
            run()
