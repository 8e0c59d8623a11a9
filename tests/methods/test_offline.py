"""The rivals over epochs: what each changes, and what stays bit for bit."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift
from offline_support import network
from support import images, same, snapshot
from undrift import methods
from undrift.keep import MaskedGradients
from undrift.likelihood import Gsfda
from undrift.recipes.perturb_plain import perturb_plain
from undrift_bench.zoo import masked, masks_of

# Untrained networks on random images may well end up with one answer for all; that is not the matter here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning"),
    pytest.mark.filterwarnings("ignore:.*has no feature masks:undrift.UndriftWarning"),
]

NAMES = ("nrc", "aad", "gsfda", "hcl", "vmp-nrc", "vmp-nrc:paper", "vmp-nrc:released")


def changed(model: undrift.Perturbed, before: dict[str, Tensor]) -> set[str]:
    """Return the names of the parameters that adaptation changed."""
    now = dict(model.net.named_parameters())
    return {name for name in now if not torch.equal(now[name], before[name])}


@pytest.mark.parametrize("name", [*NAMES, "nrc:office31", "nrc:visda", "aad:office31", "aad:visda", "gsfda:visda"])
def test_every_method_runs_in_one_line_and_gives_the_source_back(name: str) -> None:
    net = network()
    before, x = snapshot(net), images(24)
    answers = net(x)
    history = undrift.adapt(net, x, method=name, epochs=2, batch_size=12)
    model = history.model
    assert model is not None
    assert len(history.steps) == 4
    adapted = model.eval()(x)
    assert not torch.equal(adapted, answers)
    assert model.remove() is net
    assert same(net.state_dict(), before)
    assert torch.equal(net(x), answers)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("name", ["nrc", "aad", "hcl", "vmp-nrc", "gsfda"])
def test_any_network_will_do_with_its_features_named(name: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 3))
    history = undrift.adapt(net, images(16), method=name, features="2", epochs=1, batch_size=8)
    assert len(history.steps) == 2


@pytest.mark.parametrize("name", ["nrc", "aad", "hcl"])
def test_everything_is_trained_and_new_layers_ten_times_as_fast(name: str) -> None:
    net = network()
    before = snapshot(net)
    model = undrift.adapt(net, images(24), method=name, epochs=1, batch_size=12).model
    assert model is not None
    left = set(before) & {n for n, _ in net.named_parameters()} - changed(model, before)
    # What comes before a norm layer has a bias that the norm takes out again, up to rounding.
    assert all(n.endswith("bias") for n in left)
    method = methods.get(name)
    assert (method.options.adapt_lr, method.options.fast_lr_scale, method.options.weight_decay) == (1e-4, 10, 5e-4)
    assert model.options.fast == ("bottleneck", "classifier")
    assert model.options.nesterov


def test_protocols_as_their_authors_have_them() -> None:
    built = {name: methods.get(name).build({}) for name in ("nrc:office31", "nrc:visda", "aad:office31", "aad:visda")}
    epochs = {name: methods.get(name).epochs for name in ("nrc", "aad", "gsfda", *built)}
    assert list(epochs.values()) == [40, 40, 32, 50, 15, 50, 15]
    nrc, visda = built["nrc:office31"].likelihood, built["nrc:visda"].likelihood
    assert (nrc.neighbours, nrc.second_neighbours, nrc.late_neighbours) == (2, 3, None)
    assert (visda.neighbours, visda.second_neighbours, visda.late_second_neighbours) == (5, 5, None)
    assert [parts.options.adapt_schedule for parts in built.values()] == ["shot", "shot", "constant", "shot"]
    assert [parts.likelihood.alpha_decay for n, parts in built.items() if "aad" in n] == [1.0, 5.0]
    assert methods.get("gsfda:visda").build({}).keepers[0].train_masks
    assert not methods.get("gsfda").source_free
    assert "masks" in methods.get("gsfda").needs


@pytest.mark.parametrize("name", ["vmp-nrc:paper", "vmp-nrc:released", "vmp-shot:paper", "vmp-shot:released"])
def test_vmp_over_epochs_leaves_weights_and_classifier_alone(name: str) -> None:
    net = network()
    before = snapshot(net)
    model = undrift.adapt(net, images(24), method=name, epochs=1, batch_size=12).model
    assert model is not None
    norms = {"backbone.1", "backbone.3.bn1", "backbone.3.downsample.1", "bottleneck.1"}
    assert changed(model, before) <= {f"{n}.{which}" for n in norms for which in ("weight", "bias")}
    assert "bottleneck.1.weight" in changed(model, before)
    assert "classifier" not in model.noise
    assert "bottleneck/0" in model.noise
    assert model.options.init_fraction == (1e-6 if "released" in name else 0.01)


def test_gsfda_trains_bottleneck_classifier_and_the_norms_inside_blocks() -> None:
    net = masked(network())
    before = snapshot(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "COLLAPSED")
        model = undrift.adapt(net, images(24), method="gsfda", epochs=2, batch_size=12).model
    assert model is not None
    block = {"backbone.3.bn1.weight", "backbone.3.bn1.bias"}
    tail = {f"{n}.{w}" for n in ("bottleneck.0", "bottleneck.1", "classifier") for w in ("weight", "bias")}
    # The copy of e that adapts has its rows exchanged, and is not trained.
    now = dict(model.net.named_parameters())["bottleneck.masks.embedding"]
    assert torch.equal(now, before["bottleneck.masks.embedding"].flip(0))
    assert changed(model, before) - {"bottleneck.masks.embedding"} <= block | tail
    assert changed(model, before) >= block | {"bottleneck.1.weight", "classifier.weight"}


def test_gsfda_keeps_what_the_source_mask_uses() -> None:
    net = masked(network())
    masks = masks_of(net)
    assert masks is not None
    with torch.no_grad():
        # Rows 0–3 are the source's (mask 1), rows 4–7 nobody's there; the target uses all.
        masks.embedding.copy_(torch.stack([torch.tensor([1.0] * 4 + [-1.0] * 4), torch.ones(8)]))
    before = snapshot(net)
    model = undrift.adapt(net, images(24), method="gsfda", epochs=1, batch_size=12, weight_decay=0.0).model
    assert model is not None
    now = dict(model.net.named_parameters())
    for name, dim in (("bottleneck.0.weight", 0), ("bottleneck.1.weight", 0), ("classifier.weight", 1)):
        kept, free = now[name].split(4, dim), before[name].split(4, dim)
        assert torch.equal(kept[0], free[0]), name
        assert not torch.equal(kept[1], free[1]), name
    assert not torch.equal(now["classifier.bias"], before["classifier.bias"])


def test_gsfda_trains_the_masks_where_it_is_told_to() -> None:
    net = masked(network())
    with torch.no_grad():
        masks_of(net).embedding.mul_(1e-3)  # type: ignore[union-attr]  # steep masks have no gradient
    before = snapshot(net)
    model = undrift.adapt(net, images(24), method="gsfda", epochs=1, batch_size=12, train_masks=True).model
    assert model is not None
    now = dict(model.net.named_parameters())["bottleneck.masks.embedding"]
    assert not torch.equal(now[0], before["bottleneck.masks.embedding"][1])


def test_the_masked_gradient_by_hand() -> None:
    net = masked(network())
    model = undrift.perturb(net, methods.get("gsfda").options.replace(train=("bottleneck", "classifier"), fast=()))
    keeper, masks = MaskedGradients(), masks_of(model)
    assert masks is not None
    keeper.start(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    keeper.gradients(model)
    free = 1 - torch.sigmoid(100 * masks.embedding[1])  # row 1 is the source's while the network adapts
    assert torch.equal(net.bottleneck[0].weight.grad, free[:, None].expand(8, 54))
    assert torch.equal(net.bottleneck[1].bias.grad, free)
    assert torch.equal(net.classifier.weight.grad, free.expand(4, 8))
    assert torch.equal(net.classifier.bias.grad, torch.ones(4))
    assert torch.equal(net.backbone[3].bn1.weight.grad, torch.ones(6))
    for left in (net.backbone[1].weight, net.backbone[3].downsample[1].weight, masks.embedding):
        assert left.grad is None


def test_gsfda_says_that_untrained_masks_were_put_on() -> None:
    with pytest.warns(undrift.UndriftWarning, match=r"no feature masks.*Random ones.*masked_loss"):
        undrift.adapt(network(), images(24), method="gsfda", epochs=1, batch_size=12)
    with pytest.raises(undrift.OptionError, match="no submodule called bottleneck, and features= was not given"):
        undrift.adapt(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), images(24), method="gsfda", epochs=1)


def test_the_adapted_network_has_the_targets_mask_and_the_source_its_own(tmp_path: Path) -> None:
    net, x = masked(network()), images(6)
    plain, (source, target) = net(x), masks_of(net).masks().detach()  # type: ignore[union-attr]
    model = undrift.adapt(net, images(24), method="gsfda", epochs=1, batch_size=12).model
    assert model is not None

    def check(model: undrift.Perturbed) -> Tensor:
        net, masks = model.eval().net, masks_of(model)
        assert masks is not None
        with torch.no_grad(), model.mean():
            answers: Tensor = model(x)
            features = net.bottleneck[:2](net.backbone(x))
            torch.testing.assert_close(answers, net.classifier(features * target))
            with masks.using(1):  # G-SFDA's test on the source: adapted weights, the source's mask
                torch.testing.assert_close(model(x), net.classifier(features * source))
        return answers

    answers = check(model)
    # Once more: the masks are not exchanged again.
    undrift.adapt(model, images(24), Gsfda(), 1, batch_size=12, keepers=(MaskedGradients(),))
    check(model)
    undrift.save(model, tmp_path / "target.safetensors")
    with model.off():
        assert torch.equal(net(x), plain)
    assert torch.equal(copy.deepcopy(model).remove()(x), plain)
    loaded = undrift.load(model.remove(), tmp_path / "target.safetensors")
    assert not torch.equal(check(loaded), answers)  # one epoch further
    with pytest.raises(undrift.OptionError, match="masks, behind 'bottleneck', are not among what is trained"):
        undrift.adapt(loaded.remove(), images(24), method="gsfda", epochs=1, train="classifier")


def test_bayes_by_backprop_is_free_everywhere_and_with_shot_leaves_the_classifier() -> None:
    free = perturb_plain(network(), methods.get("bbb").options)
    assert {n for n, p in free.net.named_parameters() if not p.requires_grad} == set()
    assert {"classifier", "bottleneck/0", "backbone/0"} <= set(free.noise)
    assert all(n.log_var.numel() == n.weights for n in free.noises())  # a variance a weight

    going = undrift.stream(network(), [images(12)], method="bbb")
    before = snapshot(going.model)
    list(going)
    moved = {n for n, value in snapshot(going.model).items() if not torch.equal(value, before[n])}
    assert {"net.classifier.weight", "noise.classifier.log_var"} <= moved

    net = network()
    before = snapshot(net)
    model = undrift.adapt(net, images(24), method="bbb-shot", epochs=1, batch_size=12).model
    assert model is not None
    assert "classifier" not in model.noise
    assert not {n for n in changed(model, before) if n.startswith("classifier")}
    assert {"backbone.0.weight", "bottleneck.0.weight"} <= changed(model, before)
    shot, bayes, vmp = (methods.get(n).build({}) for n in ("shot", "bbb-shot", "vmp-shot"))
    assert repr(shot.likelihood) == repr(bayes.likelihood) == repr(vmp.likelihood)
    assert bayes.options.frozen == vmp.options.frozen
    assert methods.get("bbb-shot").loops == ("adapt",)


def test_the_papers_rates_of_vmp() -> None:
    rows = {name: methods.get(f"vmp:{name}") for name in ("paper", "cifar100", "imagenet", "released")}
    found = {n: (m.options.stream_optimiser, m.options.stream_lr, m.stream_batch) for n, m in rows.items()}
    assert found == {
        "paper": ("adam", 5e-4, 200),
        "cifar100": ("adam", 7e-5, 200),
        "imagenet": ("sgd", 1e-4, 64),
        "released": ("adam", 7e-5, 120),
    }
    assert rows["imagenet"].options.momentum == 0.9
