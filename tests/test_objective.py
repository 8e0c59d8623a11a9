"""The objective: the KL against torch.distributions, and the paper's change of variables."""

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

import undrift
from support import convnet, images


def by_kernel(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return one value per output channel at the places of its weights."""
    if isinstance(layer, nn.ConvTranspose2d):  # inputs × outputs of one group; each group has inputs of its own
        inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        return values.view(layer.groups, 1, outputs).expand(-1, inputs, -1).reshape(-1, outputs, 1, 1)
    return values.view(-1, *[1] * (layer.weight.ndim - 1))


@pytest.mark.parametrize("sharing", ["kernel", "weight"])
@pytest.mark.parametrize("prior", ["adaptive", "isotropic"])
def test_kl_is_that_of_torch_distributions(sharing: str, prior: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3, groups=2), nn.Linear(6, 5))
    model = undrift.perturb(net, conv_sharing=sharing, linear_sharing=sharing, prior=prior, prior_scale=0.7)
    total, count = torch.zeros(()), 0
    for i, layer in enumerate(net):
        noise = model.noise[str(i)]
        with torch.no_grad():
            noise.log_var += torch.randn_like(noise.log_var)

        def full(values: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
            spread = values if values.ndim == layer.weight.ndim else by_kernel(layer, values)
            return spread.expand_as(layer.weight)

        q = D.Normal(0.0, full(noise.log_var).exp().sqrt())
        p = D.Normal(0.0, full(noise.prior_var).sqrt())
        total = total + D.kl_divergence(q, p).sum()
        count += layer.weight.numel()
    torch.testing.assert_close(undrift.kl(model, "sum"), total, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(undrift.kl(model), total / count, rtol=1e-4, atol=1e-6)


def test_kl_is_zero_at_the_prior_and_positive_elsewhere() -> None:
    assert abs(float(undrift.kl(undrift.perturb(convnet(), init="prior")).detach())) < 1e-6
    assert float(undrift.kl(undrift.perturb(convnet())).detach()) > 0.1


def test_kl_stays_finite_for_constant_and_single_weight_kernels() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1, groups=3), nn.Conv2d(3, 2, 3))
    with torch.no_grad():
        net[1].weight.fill_(0.5)
    for init in ("fraction", "prior"):
        model = undrift.perturb(net, init=init)
        value = undrift.kl(model)
        value.backward()
        assert torch.isfinite(value)
        assert all(torch.isfinite(n.log_var.grad).all() for n in model.noise.values())
        model.remove()


def test_the_kl_follows_a_network_that_moves() -> None:
    """Priors are kept as one row; where it no longer fits the log-variances, they are looked up again."""
    model = undrift.perturb(convnet(), init_fraction=0.3)
    want = undrift.kl(model)
    model.noises()[0].double()
    torch.testing.assert_close(undrift.kl(model).float(), want)
    torch.testing.assert_close(undrift.kl(model.double()).float(), want)


def test_kl_term_has_a_named_weight_and_reduction() -> None:
    model = undrift.perturb(convnet())
    torch.testing.assert_close(undrift.kl_term(model, size=50), undrift.kl(model, "sum") / 50)
    for size in (None, 0):
        with pytest.raises(undrift.OptionError, match="number of samples"):
            undrift.kl_term(model, size=size)
    with pytest.raises(undrift.OptionError, match=r"reduction='max' is not one of mean, sum\. Take mean"):
        undrift.kl(model, "max")  # type: ignore[arg-type]
    released = undrift.perturb(convnet(), "released")
    torch.testing.assert_close(undrift.kl_term(released), 0.01 * undrift.kl(released))


def test_perturbation_and_bayesian_network_have_one_objective() -> None:
    """The paper's change of variables: w_t = w_s + Δw, q(w_t | w_s, σ), prior N(w_s, λ·Var)."""
    net, x = convnet().eval(), images()
    twin = convnet().eval()
    twin.load_state_dict(net.state_dict())
    model = undrift.perturb(net, estimator="drawn", norm_statistics="source", norm_affine=False)
    model.reseed(4)
    logits = model(x)
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    perturbation = entropy + undrift.kl(model, "sum") / len(x)
    perturbation.backward()

    # The other side: a Bayesian network with mean w_s, its weights drawn by torch.distributions' own arithmetic.
    log_vars = {n: noise.log_var.detach().clone().requires_grad_() for n, noise in model.noise.items()}
    weights, divergence = {}, torch.zeros(())
    for name, log_var in log_vars.items():
        noise, mean = model.noise[name], twin.get_parameter(f"{name}.weight").detach()

        def spread(v: torch.Tensor, m: torch.Tensor = mean) -> torch.Tensor:
            return v if v.ndim == m.ndim else v.view(-1, *(1,) * (m.ndim - 1))

        scale = (spread(log_var) / 2).exp().expand_as(mean)
        q = D.Normal(mean, scale)
        p = D.Normal(mean, spread(noise.prior_var).sqrt().expand_as(mean))
        divergence = divergence + D.kl_divergence(q, p).sum()
        epsilon = noise.draw(model.net[int(name)], mean.shape).detach() / scale.detach()
        weights[f"{name}.weight"] = mean + scale * epsilon
    logits = functional_call(twin, weights, (x,))
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    bayesian = entropy + divergence / len(x)
    bayesian.backward()
    torch.testing.assert_close(perturbation, bayesian, rtol=1e-5, atol=1e-5)
    for name, log_var in log_vars.items():
        torch.testing.assert_close(model.noise[name].log_var.grad, log_var.grad, rtol=1e-4, atol=1e-5)


def test_the_control_without_noise_has_no_kl() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.0)
    value = undrift.kl_term(model, size=10)
    value.backward()
    assert value.detach() == 0
    assert all((n.log_var.grad == 0).all() for n in model.noises())


def test_the_kl_and_its_first_two_derivatives_are_those_of_the_formula() -> None:
    """A σ of 0 among them."""
    model = undrift.perturb(convnet(), init_fraction=0.3)
    noises = model.noises()
    with torch.no_grad():
        for noise in noises:
            noise.log_var += torch.randn_like(noise.log_var)
        noises[0].log_var[1] = -torch.inf
    own = [n.log_var for n in noises]
    log_prior = torch.cat([n.prior_var.expand_as(n.log_var).flatten() for n in noises]).log()
    share = torch.cat([n.log_var.new_full((n.log_var.numel(),), n.weights / n.log_var.numel() / 2) for n in noises])
    ratio = (torch.cat([v.flatten() for v in own]) - log_prior).clamp_min(-1e3)
    want = (torch.where(ratio > -1e3, ratio.exp() - 1 - ratio, 0) * share).sum()
    pulls = []
    for value in (undrift.kl(model, "sum"), want):
        first = torch.autograd.grad(value, own, create_graph=True)
        pulls.append((value.detach(), first, torch.autograd.grad(sum((v**2).sum() for v in first), own)))
    for got, known in zip(*pulls, strict=True):
        torch.testing.assert_close(got, known, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of forward AD
def test_compiled_and_forward_mode_kls_are_the_same() -> None:
    """What has no gradient of ours goes by the plain operators: the same value, and the same slope."""
    model = undrift.perturb(convnet(), init_fraction=0.3)
    with torch.no_grad():
        model.noises()[0].log_var[1] = -torch.inf
    want = undrift.kl(model, "sum")
    torch.testing.assert_close(torch.compile(lambda: undrift.kl(model, "sum"), backend="eager")(), want)
    noise = model.noises()[-1]
    (slope,) = torch.autograd.grad(want, noise.log_var)
    with torch.autograd.forward_ad.dual_level():
        own = noise._parameters.pop("log_var")
        noise.log_var = torch.autograd.forward_ad.make_dual(own.detach(), torch.ones_like(own))
        value, tangent = torch.autograd.forward_ad.unpack_dual(undrift.kl(model, "sum"))
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(tangent, slope.sum())


def test_a_kl_under_fake_tensors_leaves_nothing_behind() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        undrift.kl(model)
    assert type(undrift.kl(model)) is torch.Tensor
