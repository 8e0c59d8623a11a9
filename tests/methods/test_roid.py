"""ROID and VMP-ROID: weights, ratio and prior by hand, steps by hand, and what goes back to the source."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from online_support import batches, close, corrected_prior, entropies, network, trained, twin
from support import convnet, images, learnables, sources
from undrift import Step, methods
from undrift.likelihood import Augment, Roid


def corrected(logits: Tensor) -> Tensor:
    """Return the logits under the corrected prior, at their own scale; the labels are those of logits × prior."""
    prior = corrected_prior(logits)
    scaled = logits * prior / prior.mean()
    assert torch.equal(scaled.argmax(1), (logits * prior).argmax(1))
    return scaled


def weights_of(logits: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of each image, and whether it is kept."""
    p = logits.softmax(1)
    d = 1 - F.cosine_similarity(p, mean[None])
    c = -entropies(logits)
    d, c = ((v - v.min()) / (v.max() - v.min()).clamp_min(1e-30) for v in (d, c))
    return (3 * d * c).exp(), d >= d.mean()


def anywhere() -> Step:
    """Return a step that is not looked at: without consistency the logits are enough."""
    model = undrift.perturb(convnet())
    return Step(model, images(1), model)


def test_weights_by_hand() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    roid = Roid(0.0, batch=1)
    roid.mean = torch.tensor([0.7, 0.3])
    cos = [
        (0.63 + 0.03) / (0.58**0.5 * 0.82**0.5),
        (0.14 + 0.24) / (0.58**0.5 * 0.68**0.5),
        0.5 / (0.58**0.5 * 0.5**0.5),
    ]
    d = 1 - torch.tensor(cos)
    d = (d - d.min()) / (d.max() - d.min())
    c = (probs * probs.log()).sum(1)
    c = (c - c.min()) / (c.max() - c.min())
    weights, kept = weights_of(probs.log(), roid.mean)
    torch.testing.assert_close(weights, (3 * d * c).exp())
    assert kept.tolist() == [False, True, False]
    ratios = -(probs * (probs / (1 - probs) + 1e-5).log()).sum(1)
    torch.testing.assert_close(roid(probs.log(), anywhere()), weights[1] * ratios[1])
    # All alike: nothing to tell them apart by, and no 0 / 0.
    torch.testing.assert_close(roid(probs[[0, 0]].log(), anywhere()), 2 * ratios[0])


def test_the_ratio_and_the_prior_by_hand() -> None:
    p = torch.tensor([[0.7, 0.3], [0.999, 0.001]], dtype=torch.float64)
    first = -(0.7 * torch.tensor(0.7 / 0.3 + 1e-5).log() + 0.3 * torch.tensor(0.3 / 0.7 + 1e-5).log())
    second = -(0.99 * torch.tensor(99 + 1e-5).log() + 0.001 * torch.tensor(0.001 / 0.999 + 1e-5).log())
    for one, ratio in zip(p.split(1), (first, second), strict=True):  # one image has a weight of 1
        torch.testing.assert_close(Roid(0.0)(one.log(), anywhere()), ratio.double(), atol=1e-6, rtol=1e-6)
    mean = p.mean(0)
    smooth = 0.5 / mean.max()  # max(1/2 images, 1/2 classes)
    authors = Roid(correct_prior="authors")
    torch.testing.assert_close(authors.answer(p.log()), p.log() * (mean + smooth) / (1 + 2 * smooth))
    smooth = 1 / p[0].max()  # one image of two classes
    torch.testing.assert_close(authors.answer(p[:1].log()), p[:1].log() * (p[0] + smooth) / (1 + 2 * smooth))


def loss_of(logits: Tensor, x: Tensor, mean: Tensor, view: nn.Module, augment: Augment) -> tuple[Tensor, Tensor]:
    """Return ROID's loss, and the running mean after it."""
    w, kept = weights_of(logits.detach(), mean)
    w = w[kept]
    q = logits.softmax(1).clamp(max=0.99)
    ratio = -(q * (q / (1 - q) + 1e-5).log()).sum(1)[kept]
    z, other = logits[kept], view(augment(x[kept]))
    both = -0.5 * (z.softmax(1) * other.log_softmax(1) + other.softmax(1) * z.log_softmax(1)).sum(1)
    return ((w * ratio).sum() + (w * both).sum()) / len(x), 0.9 * mean + 0.1 * logits.detach().softmax(1).mean(0)


def test_roid_is_three_steps_by_hand() -> None:
    net = twin()
    source = [p.detach().clone() for p in trained(net)]
    augment = Augment(blur=False, noise=0.0, outside="reflection", seed=4)
    optimiser, mean, answers = torch.optim.Adam(trained(net), lr=1e-3), torch.full((5,), 0.2).double(), []
    for x in batches():
        logits = net(x)
        answers.append(corrected(logits).detach().softmax(1))
        loss, mean = loss_of(logits, x, mean, net, augment)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for p, s in zip(trained(net), source, strict=True):
                p.copy_(0.99 * p + 0.01 * s)
    going = undrift.stream(network(), batches(), method="roid", seed=4)
    for got, wanted in zip(going, answers, strict=True):
        torch.testing.assert_close(got.probs, wanted)
    torch.testing.assert_close(going.online.likelihood.mean, mean)  # type: ignore[attr-defined]
    close(going.model, net)


def step_on(model: undrift.Perturbed, x: Tensor) -> Step:
    return Step(model, x, model)


def test_the_mean_moves_after_the_step_and_not_without_one() -> None:
    model = undrift.perturb(network(), layers=(), norm_statistics="batch")
    likelihood = Roid(seed=0)
    (x,) = batches(1)
    likelihood(model(x), step_on(model, x))
    assert likelihood.mean is None
    likelihood.follow(model)
    wanted = 0.9 * 0.2 + 0.1 * model(x).softmax(1).mean(0)
    torch.testing.assert_close(likelihood.mean, wanted.detach())
    s = undrift.stream(undrift.perturb(convnet()), [images()], lambda z: Roid(0.0)(z, step_on(model, x)) * float("nan"))
    list(s)
    assert s.report.steps == 0


def test_settings_of_the_loss() -> None:
    model = undrift.perturb(
        network(), norm_statistics="batch", init_fraction=0.01, generator=torch.Generator().manual_seed(0)
    )
    (x,) = batches(1)
    with model.mean():
        logits = model(x)

    def loss(**settings: object) -> Tensor:
        return Roid(**settings, seed=0)(logits, step_on(model, x)).detach()  # type: ignore[arg-type]

    alone = loss(consistency=0.0)
    torch.testing.assert_close(loss(consistency=2.0) - alone, 2 * (loss() - alone))
    torch.testing.assert_close(loss(batch=24), loss() / 2)
    # Without augmentation and noise the other view is the image itself.
    weights, kept = weights_of(logits.detach(), torch.full((5,), 0.2).double())
    with model.mean():
        same = model(x[kept]).detach()
    z = logits.detach()[kept]
    both = -0.5 * (z.softmax(1) * same.log_softmax(1) + same.softmax(1) * z.log_softmax(1)).sum(1)
    torch.testing.assert_close(loss(augmented=False) - alone, (weights[kept] * both).sum() / 12)
    assert loss(augmented=False, noisy=True) != loss(augmented=False)
    with pytest.raises(undrift.OptionError, match="consistency=-1"):
        Roid(-1)


def test_vmp_roid_answers_with_the_mean_network_and_learns_from_a_draw() -> None:
    net = network()
    going = undrift.stream(net, batches(), method="vmp-roid", seed=0, generator=torch.Generator().manual_seed(0))
    model = going.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    logits = twin()(batches(1)[0]).detach()
    first = next(going)
    torch.testing.assert_close(first.probs, corrected(logits).softmax(1))
    assert (first.mutual_info == 0).all()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in model.named_parameters() if p.requires_grad}
    assert any(n.startswith("noise.") for n in changed)
    # Log-variances have no source to go back to; the others do, a little.
    free = undrift.stream(
        network(), batches(1), method="vmp-roid", seed=0, ensemble=1.0, generator=torch.Generator().manual_seed(0)
    )
    next(free)
    for name, p in model.named_parameters():
        other = dict(free.model.named_parameters())[name]
        if name.startswith("noise."):
            assert torch.equal(p, other)
        elif p.requires_grad:
            torch.testing.assert_close(p, 0.99 * other + 0.01 * sources(model)[name])
    assert {n for n in learnables(model) if not n.startswith("noise.")} == sources(model).keys()


def test_vmp_roid_learns_its_variances_from_the_data() -> None:
    assert methods.get("vmp-roid").build({}).likelihood.noisy
    settings = {"seed": 0, "generator": torch.Generator().manual_seed(0), "kl_weight": 0.0}  # no KL that moves them
    going = undrift.stream(network(), batches(1), method="vmp-roid", **settings)
    before = {n: p.detach().clone() for n, p in going.model.named_parameters() if n.startswith("noise.")}
    next(going)
    assert before
    assert not any(torch.equal(p, before[n]) for n, p in going.model.named_parameters() if n in before)


def test_vmp_roid_without_its_noise_is_roid() -> None:
    quiet = undrift.stream(network(), batches(), method="vmp-roid", seed=0, init_fraction=0.0)
    roid = undrift.stream(network(), batches(), method="roid", seed=0)
    for one, other in zip(quiet, roid, strict=True):
        torch.testing.assert_close(one.probs, other.probs)


def test_presets_and_values() -> None:
    paper, released = (methods.get(f"vmp-roid:{name}").options for name in ("paper", "released"))
    assert paper == methods.get("vmp-roid").options
    assert (paper.kl_reduction, released.kl_reduction, released.kl_weight) == ("bound", "mean", 1e-2)
    assert released.init_fraction == 1e-6
    for options in (paper, released):
        assert (options.norm_statistics, options.train_samples, options.answer) == ("batch", 0, "before")
        assert options.stream_lr == 1e-3
    imagenet = methods.get("roid:imagenet").options
    assert (imagenet.stream_optimiser, imagenet.stream_lr, imagenet.nesterov) == ("sgd", 2.5e-4, True)
    assert methods.get("vmp-roid").uncertainty


def test_the_corrected_answer_has_the_authors_scale_by_name_and_the_same_labels() -> None:
    logits = 4 * torch.randn(64, 10)
    prior = corrected_prior(logits)
    answers = {how: Roid(correct_prior=how).answer(logits) for how in ("scaled", "authors", True)}
    assert torch.equal(answers["authors"], logits * prior)
    assert torch.equal(answers["scaled"], answers[True])
    torch.testing.assert_close(answers["scaled"], answers["authors"] * 10)  # q sums to 1: its mean is a tenth
    assert torch.equal(answers["scaled"].argmax(1), answers["authors"].argmax(1))
    assert torch.equal(Roid(correct_prior=False).answer(logits), logits)
    with pytest.raises(undrift.OptionError, match=r"correct_prior='author'.*scaled, authors"):
        Roid(correct_prior="author")  # type: ignore[arg-type]
    theirs, ours = (
        torch.cat([p.probs for p in undrift.stream(network(), batches(), method="roid", seed=0, correct_prior=how)])
        for how in ("authors", "scaled")
    )
    assert torch.equal(theirs.argmax(1), ours.argmax(1))
    assert (theirs.amax(1) < ours.amax(1)).all()


class Pooled(nn.Module):
    """A network whose last norm layer sees one value a channel of each image."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 6, 3), nn.BatchNorm1d(6, **how), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x).mean((2, 3))))


@pytest.mark.parametrize("how", [{}, {"track_running_stats": False}])
@pytest.mark.parametrize("name", ["roid", "vmp-roid"])
def test_a_batch_of_which_one_image_is_kept_has_no_consistency_term(name: str, how: dict[str, bool]) -> None:
    alike = torch.cat([images(1).expand(15, -1, -1, -1), 1 - images(1, 1)])
    settings = {"seed": 0, "generator": torch.Generator().manual_seed(0)}
    going = undrift.stream(Pooled(**how), [alike, images(16, 2)], method=name, **settings)
    asked, kept = going.online.likelihood, []
    other = asked._other

    def noting(step: Step, chosen: Tensor) -> Tensor | None:
        found = other(step, chosen)
        kept.append((int(chosen.sum()), found is None))
        return found

    asked._other = noting  # type: ignore[method-assign]
    assert [len(p) for p in going] == [16, 16]
    assert going.report.steps == 2
    assert kept[0] == (1, True)
    assert kept[1][0] > 1
    assert not kept[1][1]


def test_one_image_alone_and_kept_statistics_keep_their_consistency_term() -> None:
    pair = torch.cat([images(1), 1 - images(1, 1)]).double()
    lone = int(network()(pair).softmax(1).square().sum(1).argmax())  # the surer one is farther from uniform
    for statistics, x in (("batch", pair[:1]), ("source", pair[[1 - lone] * 15 + [lone]])):
        model = undrift.perturb(network(), layers=(), norm_statistics=statistics)
        logits = model(x)
        kept = weights_of(logits.detach(), torch.full((5,), 0.2).double())[1]
        assert int(kept.sum()) == 1
        assert Roid(seed=0)(logits, step_on(model, x)) != Roid(0.0)(logits, step_on(model, x))
