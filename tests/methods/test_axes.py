"""The axes of every method: what may change, what is asked, when; and that nothing else does."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import images
from undrift import methods
from undrift._types import Keeper, Step, named_learnables, named_sources
from undrift.data import Preprocess
from undrift.optimise import make_optimiser
from undrift.perturb import remove
from undrift.scheme import perturb_plain


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.Linear(6, 4),
    )


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if torch.equal(one[name], other[name])]


def batches(count: int = 3) -> list[Tensor]:
    return [images(8) + 0.1 * number for number in range(count)]


@pytest.mark.parametrize("name", [n for n in methods.names("stream") if methods.get(n).source_free])
def test_every_streaming_method_runs_from_a_plain_network_and_gives_it_back(name: str) -> None:
    net = network()
    before = state(net)
    going = undrift.stream(net, batches(), method=name)
    answers = list(going)
    assert [len(p) for p in answers] == [8, 8, 8]
    assert all(torch.isfinite(p.probs).all() for p in answers)
    assert going.remove() is net
    assert len(list(undrift.stream(net, batches(), method=name))) == 3  # nobody holds this one
    assert len(same(before, net.state_dict())) == len(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def changed(name: str) -> set[str]:
    """Return which tensors of the network a method's stream changes."""
    net = network()
    before = state(net)
    going = undrift.stream(net, batches(), method=name)
    list(going)
    after = state(net)
    return set(before) - set(same(before, after))


def test_source_changes_nothing_and_answers_as_the_network_does() -> None:
    net = network().eval()
    wanted = net(batches()[0]).softmax(1)
    (answer,) = undrift.stream(net, batches(1), method="source")
    assert torch.equal(answer.probs, wanted)
    assert changed("source") == set()


def test_norm_stats_answers_with_the_batch_statistics_and_keeps_nothing() -> None:
    net = network().train()
    net[1].track_running_stats = False  # type: ignore[union-attr]
    wanted = net(batches()[0]).softmax(1)
    (answer,) = undrift.stream(network(), batches(1), method="norm-stats")
    torch.testing.assert_close(answer.probs, wanted)
    assert changed("norm-stats") == set()


def test_tent_changes_norm_affine_only_by_an_adam_step_and_answers_before_it() -> None:
    assert changed("tent") == {"1.weight", "1.bias"}
    net = network().train()
    net[1].track_running_stats = False  # type: ignore[union-attr]
    logits = net(batches()[0])
    wanted = logits.softmax(1)
    optimiser = torch.optim.Adam([net[1].weight, net[1].bias], lr=1e-3)  # type: ignore[list-item]
    (-(wanted * wanted.log()).sum(1).mean()).backward()
    optimiser.step()
    going = undrift.stream(network(), batches(1), method="tent")
    (answer,) = going
    torch.testing.assert_close(answer.probs, wanted.detach())
    torch.testing.assert_close(going.model.net[1].weight, net[1].weight)  # type: ignore[index]


def test_tent_ft_changes_every_parameter() -> None:
    assert changed("tent-ft") == {n for n, _ in network().named_parameters()}


def test_shot_trains_all_but_the_classifier_and_moves_statistics() -> None:
    net = network()
    before = state(net)
    history = undrift.adapt(net, images(16), method="shot", epochs=1)
    kept = same(before, net.state_dict())
    assert {"6.weight", "6.bias"} <= set(kept)
    assert not {"0.weight", "1.weight", "1.running_mean", "5.weight"} & set(kept)
    assert history.model is not None
    assert history.model.options.frozen == ("6",)


def test_shot_bn_trains_norm_layers_only() -> None:
    net = network()
    before = state(net)
    undrift.adapt(net, images(16), method="shot-bn", epochs=1)
    assert {n for n in before if n not in same(before, net.state_dict())} <= {
        "1.weight", "1.bias", "1.running_mean", "1.running_var"
    }  # fmt: skip


def test_domain_statistics_are_the_mean_over_the_domain() -> None:
    net = network()
    parts = batches()
    inputs = [net[0](x) for x in parts]
    wanted = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    history = undrift.adapt(net, parts, method="norm-stats:domain")
    assert history.model is not None
    torch.testing.assert_close(net[1].running_mean, wanted.detach())
    history.model.remove()


def test_a_trained_weight_adds_its_shift_to_the_kl() -> None:
    model = undrift.perturb(network(), train="*", init="prior")
    assert float(undrift.kl(model, "sum").detach()) == pytest.approx(0, abs=1e-4)
    weight = model.net[5].weight  # type: ignore[index]
    noise = model.noise["5"]
    with torch.no_grad():
        weight += 0.5
    wanted = (0.25 / (2 * noise.prior_var.expand_as(weight))).sum()
    torch.testing.assert_close(undrift.kl(model, "sum").detach(), wanted, rtol=1e-4, atol=1e-4)


def test_trained_weights_travel_in_the_domain_file(tmp_path: Path) -> None:
    net = network()
    history = undrift.adapt(net, images(16), method="shot", epochs=1)
    model = history.model
    assert model is not None
    path = f"{tmp_path}/shot.safetensors"
    undrift.save(model, path)
    wanted = undrift.predict(model, images(8), samples=0).probs
    model.remove()
    assert not torch.equal(undrift.predict(net.eval(), images(8)).probs, wanted)
    loaded = undrift.load(net, path)
    assert torch.equal(undrift.predict(loaded, images(8), samples=0).probs, wanted)


def test_off_is_the_source_while_weights_are_trained() -> None:
    net = network().eval()
    wanted = net(images(8))
    model = undrift.perturb(net, train="*", layers=())
    with torch.no_grad():
        for parameter in named_learnables(model).values():
            parameter += 1
    assert not torch.equal(model(images(8)), wanted)
    with model.off():
        assert torch.equal(net(images(8)), wanted)
    assert named_sources(model).keys() == named_learnables(model).keys()
    assert all(not torch.equal(p, named_sources(model)[n]) for n, p in named_learnables(model).items())


def test_a_likelihood_that_asks_nothing_makes_no_step() -> None:
    net = network()
    model = undrift.perturb(net)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def nothing(logits: Tensor, step: Step) -> Tensor | None:
        return None

    going = undrift.stream(model, batches(1), nothing)
    assert len(next(going)) == 8
    assert going.report.steps == 0
    assert "nothing asked" in str(going.report)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


class Recorder(Keeper):
    """Writes down what the loop asks of it, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, model: undrift.Perturbed) -> None:
        self.calls.append("start")

    def penalty(self, model: undrift.Perturbed) -> Tensor:
        self.calls.append("penalty")
        return sum(p.square().sum() for p in named_learnables(model).values())  # type: ignore[return-value]

    def gradients(self, model: undrift.Perturbed) -> None:
        self.calls.append("gradients")
        for p in named_learnables(model).values():
            p.grad = None

    def after(self, model: undrift.Perturbed, loss: float) -> str | None:
        self.calls.append("after")
        return None


class Follower:
    def __init__(self, keeper: Recorder) -> None:
        self.keeper = keeper

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        self.keeper.calls.append("loss")
        return undrift.entropy(logits)

    def follow(self, model: undrift.Perturbed) -> None:
        self.keeper.calls.append("follow")


def test_the_order_of_a_step_is_the_same_in_both_loops() -> None:
    wanted = ["start", "loss", "penalty", "gradients", "follow", "after"]
    keeper = Recorder()
    model = undrift.perturb(network())
    before = model.net[1].weight.detach().clone()  # type: ignore[index]
    next(undrift.stream(model, batches(1), Follower(keeper), keepers=[keeper]))
    assert keeper.calls == wanted
    assert torch.equal(model.net[1].weight, before)  # the keeper took its gradient away  # type: ignore[index]
    keeper = Recorder()
    undrift.adapt(undrift.perturb(network()), images(8), Follower(keeper), epochs=1, batch_size=8, keepers=[keeper])
    assert keeper.calls == wanted


def test_a_climb_takes_the_gradient_from_the_higher_place() -> None:
    """One step of plain SGD: w − lr · ∇L(w + ρ ∇L/‖∇L‖)."""
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))
    x = torch.rand(8, 3, 2, 2)
    weight = net[1].weight.detach().clone().requires_grad_()  # type: ignore[union-attr]

    def loss(w: Tensor) -> Tensor:
        z = net[2](nn.functional.layer_norm(x.flatten(1), (12,), w, net[1].bias))  # type: ignore[union-attr, arg-type]
        return undrift.entropy(z)

    bias = net[1].bias  # type: ignore[union-attr]
    first = torch.autograd.grad(loss(weight), [weight, bias])  # type: ignore[list-item]
    norm = torch.stack([g.norm() for g in first]).norm()
    with torch.no_grad():
        bias += 0.5 * first[1] / norm  # type: ignore[operator]
    high = (weight + 0.5 * first[0] / norm).detach().requires_grad_()
    (second,) = torch.autograd.grad(loss(high), [high])
    with torch.no_grad():
        bias -= 0.5 * first[1] / norm  # type: ignore[operator]
    options = {"layers": (), "climb": 0.5, "stream_optimiser": "sgd", "momentum": 0.0, "answer": "before"}
    model = undrift.perturb(net, **options)
    next(undrift.stream(model, [x], lr=0.1))
    torch.testing.assert_close(model.net[1].weight, (weight - 0.1 * second).detach())  # type: ignore[index]


def test_images_one_by_one_and_several_steps() -> None:
    sizes: list[int] = []

    def asked(logits: Tensor, step: Step) -> Tensor:
        sizes.append(len(logits))
        return undrift.entropy(logits)

    model = undrift.perturb(network(), stream_split=3, stream_steps=2, norm_statistics="source")
    (answer,) = undrift.stream(model, batches(1), asked)
    assert sizes == [3, 3, 3, 3, 2, 2]
    assert len(answer) == 8


def test_the_optimiser_names_its_groups() -> None:
    model = undrift.perturb(network(), train="5", fast="5")
    groups = {g["name"]: len(g["params"]) for g in make_optimiser(model, "sgd", 0.1).param_groups}
    assert groups == {"affine": 2, "log_var": 2, "log_var, fast": 1, "weights, fast": 2}


def test_names_variants_and_settings_are_checked() -> None:
    with pytest.raises(undrift.OptionError, match="did you mean 'tent'"):
        methods.get("tnet")
    with pytest.raises(undrift.OptionError, match="needs another loop"):
        undrift.stream(network(), batches(), method="shot")
    with pytest.raises(undrift.OptionError, match="no variant"):
        methods.get("source:paper")
    with pytest.raises(undrift.OptionError, match="no setting"):
        undrift.stream(network(), batches(), method="tent", strean_lr=1)
    with pytest.raises(undrift.OptionError, match="none was named"):
        undrift.stream(undrift.perturb(network()), batches(), stream_lr=1)
    with pytest.raises(undrift.UndriftError, match="perturbed already"):
        undrift.stream(undrift.perturb(network()), batches(), method="tent")
    with pytest.raises(undrift.OptionError, match="brings its own likelihood"):
        undrift.stream(network(), batches(), undrift.entropy, method="tent")
    assert methods.get("vmp:released").options == undrift.preset("released")


def test_the_table_names_every_method() -> None:
    text = methods.table()
    assert all(f"`{name}`" in text for name in methods.names())
    assert methods.get("vmp").changes == "norm statistics + norm affine + perturbation"
    assert methods.get("vmp").uncertainty
    assert not methods.get("tent").uncertainty


class Pressed(nn.Module):
    """A layer during whose tenth forward pass somebody presses Ctrl-C."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 10:
            raise KeyboardInterrupt
        return x


FAILING: dict[str, Callable[[nn.Module, Path], object]] = {
    "features": lambda net, _: undrift.adapt(net, images(16), method="shot", features="nope"),
    "epochs": lambda net, _: undrift.adapt(net, images(16), method="shot", epochs=0),
    "images": lambda net, _: undrift.adapt(net, "folder", method="shot"),
    "class names": lambda net, _: undrift.adapt(net, images(16), method="tent", classes=["a"]),
    "lr": lambda net, _: undrift.stream(net, batches(), method="tent", lr=-1.0),
    "answer": lambda net, _: undrift.stream(net, batches(), method="tent", answer="nope"),  # type: ignore[arg-type]
    "keeper": lambda net, _: undrift.stream(net, batches(), method="eata", source=[]),
    "likelihood": lambda net, _: undrift.stream(net, batches(), method="ttt", split="nope"),
    "warning": lambda net, _: undrift.stream(net, batches(), method="bacs"),  # no posterior: errors in these tests
    "Ctrl-C": lambda net, _: undrift.adapt(net.append(Pressed()), images(16), method="shot", batch_size=4),
    "Ctrl-C, checkpoint": lambda net, path: undrift.adapt(
        net.append(Pressed()), images(16), method="shot", batch_size=4, checkpoint=path / "run"
    ),
}


@pytest.mark.parametrize("why", FAILING)
def test_a_call_that_fails_gives_the_network_back(why: str, tmp_path: Path) -> None:
    net = network()
    before = state(net)
    flags = [(m.training, type(m)) for m in net.modules()]
    with pytest.raises((undrift.UndriftError, undrift.UndriftWarning, KeyboardInterrupt)) as caught:
        FAILING[why](net, tmp_path)
    if "Ctrl-C" in why:
        assert "The network is as it was before the call" in str(caught.value)
        assert isinstance(net.pop(len(net) - 1), Pressed)  # type: ignore[operator]
    if "checkpoint" in why:
        assert (tmp_path / "run").exists()
    assert len(same(before, net.state_dict())) == len(before)
    assert [(m.training, type(m)) for m in net.modules()] == flags
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.requires_grad for p in net.parameters())
    assert undrift.adapt(net, images(16), method="shot", epochs=1).model is not None


def test_an_interrupted_method_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(net: nn.Module, pressed: bool) -> undrift.History:
        calls: list[int] = []

        def press(*_: object) -> None:
            calls.append(1)
            if pressed and len(calls) == 9:
                raise KeyboardInterrupt

        handle = net[0].register_forward_hook(press)  # type: ignore[operator, index]
        try:
            order = torch.Generator().manual_seed(0)
            path = tmp_path / f"{id(net)}"
            given: dict[str, Any] = {"epochs": 2, "batch_size": 4, "generator": order, "checkpoint": path}
            return undrift.adapt(net, images(16), method="tent", **given)
        finally:
            handle.remove()

    whole = run(network(), pressed=False)
    net = network()
    with pytest.raises(KeyboardInterrupt):
        run(net, pressed=True)
    resumed = run(net, pressed=False)
    assert resumed == whole
    assert whole.model is not None
    assert resumed.model is not None
    assert len(same(state(whole.model), state(resumed.model))) == len(state(whole.model))


def test_a_stream_that_is_gone_gives_the_network_back_and_one_whose_model_is_held_does_not() -> None:
    net = network()
    before = state(net)
    for answer in undrift.stream(net, batches(), method="tent"):
        assert len(answer) == 8
    assert len(same(before, net.state_dict())) == len(before)
    going = undrift.stream(net, batches(), method="roid")
    assert len(list(going)) == 3
    model = going.model
    del going
    assert not torch.equal(net[1].weight, before["1.weight"])  # type: ignore[index]
    assert len(undrift.predict(model, images(8), samples=0)) == 8
    with pytest.raises(undrift.CannotPerturb, match=r"undrift\.remove"):
        undrift.stream(net, batches(), method="tent")
    del model
    assert len(same(before, net.state_dict())) == len(before)
    kept = undrift.perturb(net)
    list(undrift.stream(kept, batches()))  # the user's own model stays
    assert net[0]._forward_hooks  # type: ignore[index]


def test_a_network_adapted_in_place_can_be_had_back() -> None:
    net = network()
    before = state(net)
    undrift.adapt(net, images(16), method="shot", epochs=1)
    assert not torch.equal(net[0].weight, before["0.weight"])  # type: ignore[index]
    assert remove(net) is net
    assert len(same(before, net.state_dict())) == len(before)


class GroupNormed(nn.Module):
    """A network with other names than usual, and a head that is registered before its body."""

    def __init__(self, norm: nn.Module, head: str = "head") -> None:
        super().__init__()
        self.table = nn.Embedding(3, 5)
        self.add_module(head, nn.Linear(4, 4))
        self.body, self.norm, self.wide = nn.Conv2d(3, 8, 3, padding=1), norm, nn.Linear(8, 4)
        self._head = head

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(self.norm(self.body(x)).mean((2, 3)))
        answer: Tensor = getattr(self, self._head)(wide)
        return answer


@pytest.mark.parametrize(
    ("norm", "method", "says"),
    [
        (nn.Identity(), "tent", "no norm layer;"),
        (nn.Identity(), "roid", "no norm layer;"),
        (nn.GroupNorm(2, 8), "norm-stats", "no norm layer that has them;"),
        (nn.BatchNorm2d(8, affine=False), "norm-stats", None),
        (nn.GroupNorm(2, 8), "tent", None),
        (nn.Identity(), "tent-ft", None),
        (nn.Identity(), "vmp", None),
        (nn.Identity(), "source", None),
    ],
)
def test_a_method_that_can_change_nothing_says_so(norm: nn.Module, method: str, says: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(undrift.stream(GroupNormed(norm), batches(1), method=method))
    said = [str(w.message) for w in caught if says and says in str(w.message)]
    assert len(said) == len(caught) == (says is not None)
    assert all(w.filename == __file__ for w in caught)


@pytest.mark.parametrize(
    ("net", "name", "sure"),
    [
        (network(), "6", True),
        (GroupNormed(nn.Identity()), "head", True),
        (GroupNormed(nn.Identity(), "fc2"), "fc2", True),
        (GroupNormed(nn.Identity(), "answer"), "wide", False),
        (nn.Sequential(nn.Embedding(3, 5)), None, False),
        (nn.ModuleDict({"fc": nn.Linear(2, 2), "head": nn.Linear(2, 2)}), "head", False),
        (nn.ModuleDict({"classifier": network(), "blocks": nn.Linear(2, 2)}), "classifier.6", True),
        (nn.ModuleDict({"classifier": nn.Conv2d(3, 3, 1), "blocks": nn.Linear(2, 2)}), "classifier", True),
        (nn.ModuleDict({"a": nn.ModuleDict({"se": nn.ModuleDict({"fc": nn.Linear(2, 2)})})}), "a.se.fc", True),
        (nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), "1", True),
    ],
)
def test_the_classifier_is_found_by_name_or_guessed_aloud(net: nn.Module, name: str | None, sure: bool) -> None:
    options = undrift.Options(layers=(), train="*", frozen="@classifier")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = perturb_plain(net, options)
    assert model.options.frozen == (() if name is None else (name,))
    assert [repr(name) in str(w.message) or name is None for w in caught] == ([] if sure else [True])
    assert all("frozen=…" in str(w.message) for w in caught)
    model.remove()


@pytest.mark.parametrize(
    ("method", "setting", "what"),
    [
        ("cotta", {"views": 2.5}, "views=2.5 is not a whole number"),
        ("cotta", {"views": True}, "views=True is not a whole number"),
        ("eta", {"margin": "wide"}, "margin='wide' is not a number"),
        ("eta", {"redundancy": "x", "weighted": 1}, "redundancy='x' is not a number or None; weighted=1 is not True"),
        ("sar", {"recover_below": None}, "recover_below=None is not a number"),
    ],
)
def test_settings_of_the_wrong_type_are_named(method: str, setting: dict[str, Any], what: str) -> None:
    with pytest.raises(undrift.OptionError, match=what):
        undrift.stream(network(), batches(), method=method, **setting)
    with pytest.raises(undrift.OptionError, match="neighbours='abc' is not a whole number"):
        undrift.adapt(network(), images(16), method="nrc", neighbours="abc")
    with pytest.raises(undrift.OptionError, match="method is a int"):
        undrift.stream(network(), batches(), method=3)  # type: ignore[arg-type]
    assert methods.get("eta").build({"margin": 1, "redundancy": None}).likelihood.redundancy is None


def test_one_preprocess_serves_the_file_and_the_augmentations(tmp_path: Path) -> None:
    how, names = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)), list("abcd")
    seen = [(x.clamp(0, 1) - 0.5) / 0.25 for x in batches()]
    going = undrift.stream(network(), seen, method="roid", preprocess=how, classes=names)
    assert len(list(going)) == 3
    assert going.online.likelihood.augment.preprocess == how  # type: ignore[attr-defined]
    history = undrift.adapt(network(), images(16), method="tent", preprocess=how, classes=names)
    for number, model in enumerate((going.model, history.model)):
        assert model is not None
        undrift.save(model, tmp_path / f"{number}.safetensors")
        file = undrift.inspect(tmp_path / f"{number}.safetensors")
        assert (file.preprocess, file.classes) == (how, tuple(names))
    with pytest.raises(undrift.OptionError, match="preprocess: settings belong to a method"):
        undrift.stream(undrift.perturb(network()), batches(), preprocess=how)
