"""SHOT and NRC over epochs, by name: whose features they take before an epoch, and whose in a step with a draw."""

import copy

import pytest
import torch
from torch import Tensor, nn

import undrift
from offline_support import network
from support import images
from undrift import Step, methods
from undrift._types import Batches
from undrift.likelihood import Nrc, Shot
from undrift.likelihood import shot as shot_module
from undrift.likelihood.banks import Banks
from undrift.likelihood.shot import pseudo_labels
from undrift.loop.optimise import optimiser_over_epochs
from undrift.recipes.perturb_plain import perturb_plain

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")  # nobody trained this network
Looked = list[tuple[Tensor, Tensor]]
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
LOUD = {"init_fraction": 0.3}  # of the kernel's variance: a draw is no rounding error


def mean_answers(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and softmax by plain PyTorch, in eval mode."""
    with torch.no_grad():
        features = net.bottleneck(net.backbone(x))  # type: ignore[operator]
        return features, net.classifier(features).softmax(1)  # type: ignore[operator]


def with_own_statistics(net: nn.Module, parts: list[Tensor]) -> nn.Module:
    """Return a copy whose norm layers have the mean over these batches' statistics, seen without noise.

    Each batch is normalised by the mean over those up to it, so that deeper layers see what they will see.
    """
    net = copy.deepcopy(net).eval()
    past: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def average(layer: nn.Module, args: tuple[Tensor]) -> None:
        over = [dim for dim in range(args[0].ndim) if dim != 1]
        past.setdefault(layer, []).append(torch.var_mean(args[0], dim=over))
        layer.running_var, layer.running_mean = (torch.stack(of).mean(0) for of in zip(*past[layer], strict=True))

    hooks = [m.register_forward_pre_hook(average) for m in net.modules() if isinstance(m, NORMS)]
    with torch.no_grad():
        for x in parts:
            net(x)
    for hook in hooks:
        hook.remove()
    return net


@pytest.mark.parametrize("name", ["shot", "shot-bn", "vmp-shot", "bbb-shot"])
def test_labels_are_taken_anew_before_each_epoch_and_hold_for_all_its_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, used = [], []
    monkeypatch.setattr(
        shot_module,
        "pseudo_labels",
        lambda features, *_: taken.append(len(features)) or torch.full((len(features),), len(taken)),
    )
    asked = Shot.__call__

    def asking(self: Shot, logits: Tensor, step: Step) -> Tensor:
        assert self.labels is not None
        used.append(self.labels[step.indices].unique().tolist())
        return asked(self, logits, step)

    monkeypatch.setattr(Shot, "__call__", asking)
    undrift.adapt(network(), images(24), method=name, epochs=3, batch_size=12)
    assert taken == [24, 24, 24]
    assert used == [[1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize("name", ["shot", "vmp-shot"])
def test_pseudo_labels_are_the_present_mean_networks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = list(images(24).split(12))
    wanted: Looked = []
    found: Looked = []
    refresh = Shot.refresh

    def refreshing(self: Shot, model: undrift.Perturbed, batches: Batches) -> None:
        plain = network()
        now = model.net.state_dict()
        plain.load_state_dict({key: now[key] for key in plain.state_dict()})
        # Steps with a draw leave statistics of noisy activations; the mean network is looked at under its own.
        plain = with_own_statistics(plain, parts) if name == "vmp-shot" and wanted else plain.eval()
        wanted.append(mean_answers(plain, images(24)))
        refresh(self, model, batches)

    def labels(features: Tensor, probs: Tensor, *more: int) -> Tensor:
        found.append((features, probs))
        return pseudo_labels(features, probs, *more)

    monkeypatch.setattr(Shot, "refresh", refreshing)
    monkeypatch.setattr(shot_module, "pseudo_labels", labels)
    noise = LOUD if name == "vmp-shot" else {}
    undrift.adapt(network(), parts, method=name, epochs=3, adapt_lr=0.02, **noise)
    assert len(found) == len(wanted) == 3
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)
    first, *later = found
    assert all(not torch.allclose(features, first[0], atol=1e-3) for features, _ in later)


@pytest.mark.parametrize("draws", [1, 2])
def test_vmp_nrc_fills_its_banks_without_noise_and_writes_each_draw_into_them(
    draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = images(24)
    filled: Looked = []
    events: list[tuple[str, Tensor, Tensor]] = []
    fill, write, follow = Banks.fill, Banks.write, Nrc.follow

    def filling(self: Banks, indices: Tensor, features: Tensor, probs: Tensor, least: int) -> None:
        filled.append((features[indices.argsort()].clone(), probs[indices.argsort()].clone()))
        fill(self, indices, features, probs, least)

    def writing(self: Banks, places: Tensor, features: Tensor, probs: Tensor) -> None:
        events.append(("write", features, probs))
        write(self, places, features, probs)
        torch.testing.assert_close(self.features[places], features)  # type: ignore[index]

    def following(self: Nrc, model: undrift.Perturbed) -> None:
        follow(self, model)
        events.append(("kept", self.banks.features.clone(), self.banks.probs.clone()))  # type: ignore[union-attr]

    monkeypatch.setattr(Banks, "fill", filling)
    monkeypatch.setattr(Banks, "write", writing)
    monkeypatch.setattr(Nrc, "follow", following)
    net = network()
    passes: list[tuple[Tensor, Tensor]] = []
    plain = copy.deepcopy(net).train()

    def passing(_layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if torch.is_grad_enabled():  # a step
            passes.append((args[0].detach(), output.detach().softmax(1)))

    net.classifier.register_forward_hook(passing)
    undrift.adapt(net, [x], method="vmp-nrc", epochs=1, train_samples=draws, **LOUD)
    # Once, in eval mode, under the mean network: the source's.
    torch.testing.assert_close(filled, [mean_answers(network(), x)])
    # Then the features and answers of the very draw whose loss is asked for, not those of the mean network.
    assert [kind for kind, *_ in events] == ["write"] * draws + ["kept"]
    mean, _ = mean_answers(plain, x)
    for (features, probs), (_, bank, answers) in zip(passes, events[:draws], strict=True):
        torch.testing.assert_close(bank, nn.functional.normalize(features, dim=1))
        torch.testing.assert_close(answers, probs)
        assert not torch.allclose(features.sort(0).values, mean.sort(0).values, atol=0.1)
    # Of several draws the last one stays.
    *_, (_, bank, answers), (_, kept, kept_answers) = events
    torch.testing.assert_close(kept.sort(0).values, bank.sort(0).values)
    torch.testing.assert_close(kept_answers.sort(0).values, answers.sort(0).values)


@pytest.mark.parametrize(
    "name", ["vmp-shot", "vmp-shot:paper", "vmp-shot:released", "vmp-nrc", "vmp-nrc:released", "bbb-shot"]
)
def test_a_bottleneck_learns_ten_times_as_fast(name: str) -> None:
    parts = methods.get(name).build({})
    model = perturb_plain(network(), parts.options)
    groups = {g["name"]: g for g in optimiser_over_epochs(model, parts.likelihood).param_groups}
    trained = ("affine", "log_var", "weights") if name == "bbb-shot" else ("affine", "log_var")
    assert {n: g["lr"] for n, g in groups.items()} == {
        **dict.fromkeys(trained, 2e-3),
        **dict.fromkeys((f"{what}, fast" for what in trained), pytest.approx(2e-2)),
    }
    fast = {id(p) for n, g in groups.items() if n.endswith("fast") for p in g["params"]}
    of_bottleneck = {n for n, p in model.named_parameters() if id(p) in fast}
    assert all("bottleneck" in n for n in of_bottleneck)
    assert {"noise.bottleneck/0.log_var", "net.bottleneck.1.weight"} <= of_bottleneck


@pytest.mark.parametrize("name", ["bbb", "bbb-shot"])
def test_what_a_prior_holds_to_the_source_has_no_weight_decay(name: str) -> None:
    parts = methods.get(name).build({})
    model = perturb_plain(network(), parts.options)
    groups = optimiser_over_epochs(model, parts.likelihood).param_groups
    assert "weights" in {g["name"] for g in groups}
    assert {g["weight_decay"] for g in groups} == {0.0}
    # Nothing is asked, and nothing pulls: means stay where the source has them, and log-variances go to the prior's.
    model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    undrift.adapt(model, images(24), lambda logits: 0 * logits.sum(), 2, batch_size=12, progress=False)
    moved = {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.startswith("noise.")}
    assert all(torch.all(p >= before[n]) for n, p in model.named_parameters() if n in moved)
