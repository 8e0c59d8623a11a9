"""Entropy, information, consistency and users' own losses, computed by hand."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, learnables
from undrift import Step
from undrift.likelihood import Consistency, Information, as_likelihood, entropy, one_number

# softmax: (3/4, 1/4) and (1/2, 1/2)
Z = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
H1 = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
H2 = math.log(2)


def step_of(model: undrift.Perturbed, x: Tensor) -> Step:
    return Step(model, x, model)


def test_entropy_by_hand() -> None:
    assert float(entropy(Z)) == pytest.approx((H1 + H2) / 2)
    z = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    entropy(z).backward()
    assert torch.equal(z.grad, torch.zeros(1, 3))  # finite at certainty


def test_information_by_hand() -> None:
    mean = (0.625, 0.375)
    of_mean = -sum(p * math.log(p) for p in mean)
    assert float(Information(epsilon=0.0)(Z)) == pytest.approx((H1 + H2) / 2 - of_mean)
    # SHOT's ε stands in both terms.
    one = -(0.75 * math.log(0.75 + 0.1) + 0.25 * math.log(0.25 + 0.1))
    two = -math.log(0.5 + 0.1)
    all_of_them = -sum(p * math.log(p + 0.1) for p in mean)
    assert float(Information(epsilon=0.1)(Z)) == pytest.approx((one + two) / 2 - all_of_them)


def test_a_class_prior_may_be_changed() -> None:
    logits, other = torch.randn(6, 2), [0.9, 0.1]
    asked, fresh = undrift.Information([0.5, 0.5]), undrift.Information(other)
    asked(logits)
    asked.class_prior = torch.tensor(other)
    assert asked(logits) == fresh(logits)
    asked.class_prior.copy_(torch.tensor([0.5, 0.5]))
    assert asked(logits) == undrift.Information([0.5, 0.5])(logits)


def test_a_class_prior_makes_the_diversity_term_a_kl() -> None:
    kl = 0.625 * math.log(0.625 / 0.8) + 0.375 * math.log(0.375 / 0.2)
    for prior in ((0.8, 0.2), [80, 20], torch.tensor([4, 1])):
        assert float(Information(prior, epsilon=0.0)(Z)) == pytest.approx((H1 + H2) / 2 + kl)
    uniform, none = Information([1, 1], epsilon=0.0)(Z), Information(epsilon=0.0)(Z)
    assert float(uniform - none) == pytest.approx(math.log(2))
    # Unequal classes are not punished: the prior's own frequencies are the best mean prediction.
    skewed = torch.tensor([[50.0, 0.0]] * 4 + [[0.0, 50.0]])
    assert float(Information([0.8, 0.2])(skewed)) == pytest.approx(0, abs=1e-4)
    assert float(Information([0.5, 0.5])(skewed)) > 0.1
    # ε stands under the prior's logarithm too: a class that is not expected costs much, and not all there is.
    costs = float(Information([1, 0], epsilon=0.1)(Z) - Information(epsilon=0.1)(Z))
    assert costs == pytest.approx(-0.625 * math.log(1.1) - 0.375 * math.log(0.1))


@pytest.mark.parametrize("prior", [[1.0], [-1.0, 2.0], [0.0, 0.0], [[1.0, 2.0]], [float("nan"), 1.0]])
def test_a_prior_that_is_none_is_refused(prior: list[float]) -> None:
    with pytest.raises(undrift.OptionError, match="frequencies"):
        Information(prior)


def test_a_prior_of_other_classes_is_refused() -> None:
    with pytest.raises(undrift.OptionError, match="3 classes, the network 2"):
        Information([1, 1, 1])(Z)
    with pytest.raises(undrift.OptionError, match="epsilon"):
        Information(epsilon=-1)


def symmetric_cross_entropy(one: Tensor, other: Tensor) -> Tensor:
    p, q = one.softmax(1), other.softmax(1)
    return -0.5 * (p * q.log() + q * p.log()).sum(1).mean()


def test_consistency_by_hand() -> None:
    def consistency(one: Tensor, other: Tensor) -> float:
        return float(Consistency()(one, SimpleNamespace(mean_logits=lambda: other)))  # type: ignore[arg-type]

    p, q = (0.75, 0.25), (0.5, 0.5)
    one = -sum(a * math.log(b) for a, b in zip(p, q, strict=True))
    other = -sum(b * math.log(a) for a, b in zip(p, q, strict=True))
    assert consistency(Z[:1], Z[1:]) == pytest.approx((one + other) / 2)
    assert consistency(Z, Z) == pytest.approx((H1 + H2) / 2)  # with itself: the entropy


def test_consistency_asks_the_mean_network_and_adds_its_base() -> None:
    model, x = undrift.perturb(convnet(), norm_statistics="source"), images()
    draw = model(x)
    with model.mean():
        mean = model(x)
    expected = 2 * symmetric_cross_entropy(draw, mean) + entropy(draw)
    loss = Consistency(2.0, base=entropy)(draw, step_of(model, x))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(Consistency(1.0)(draw, step_of(model, x)), symmetric_cross_entropy(draw, mean))
    assert model.key.noisy
    by_hand = torch.autograd.grad(expected, [*learnables(model).values()], retain_graph=True)  # through draw and mean
    loss.backward()
    for p, wanted in zip(learnables(model).values(), by_hand, strict=True):
        torch.testing.assert_close(p.grad, wanted)
        assert wanted.abs().sum() > 0
    with pytest.raises(undrift.OptionError, match="weight=-1"):
        Consistency(-1)


def test_consistency_lets_its_base_look_at_the_domain() -> None:
    class Base:
        seen = 0

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            return logits.sum()

        def refresh(self, model: undrift.Perturbed, batches: object) -> None:
            self.seen += 1

    base = Base()
    both = Consistency(1.0, base)
    both.refresh(undrift.perturb(convnet()), lambda: iter(()))
    assert base.seen == 1
    Consistency().refresh(undrift.perturb(convnet()), lambda: iter(()))


def test_any_callable_is_a_likelihood() -> None:
    class Module(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.mean()

    def scaled(logits: Tensor, scale: float = 2.0) -> Tensor:
        return scale * logits.mean()

    def with_step(logits: Tensor, step: object = None) -> object:
        return step

    def needs(scale: float, logits: Tensor, step: object) -> object:
        return scale

    for one in (Module(), torch.mean, lambda z: z.mean(), lambda *z: z[0].mean()):
        assert float(as_likelihood(one)(Z, None)) == pytest.approx(float(Z.mean()))
    assert float(as_likelihood(scaled)(Z, None)) == pytest.approx(float(2 * Z.mean()))  # step is not its scale
    assert as_likelihood(with_step)(Z, "step") == "step"
    assert as_likelihood(functools.partial(needs, 3.0))(Z, None) == 3.0
    for mine in (entropy, Information(), Consistency()):
        assert as_likelihood(mine) is mine


@pytest.mark.parametrize(
    ("loss", "what"),
    [("entropy", "is a str.*undrift.entropy"), (Information, "is a class"), (lambda a, b, c: a, "needs 3 arguments")],
)
def test_what_is_no_likelihood_is_refused(loss: object, what: str) -> None:
    with pytest.raises(undrift.OptionError, match=what):
        as_likelihood(loss)  # type: ignore[arg-type]


def test_a_loss_is_one_number() -> None:
    assert one_number(torch.ones(1, 1, requires_grad=True)).shape == ()
    with torch.no_grad():
        assert one_number(torch.ones(())) == 1
    with pytest.raises(undrift.OptionError, match="no gradient"):
        one_number(torch.ones(()))
    for loss, what in ((torch.ones(3), r"shape \(3,\).*mean"), (0.5, "a float")):
        with pytest.raises(undrift.OptionError, match=what):
            one_number(loss)
