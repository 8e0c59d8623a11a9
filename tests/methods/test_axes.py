"""The axes of every method: what may change, and that nothing else does."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from axes_support import batches, network, same, state
from support import images, learnables, sources
from undrift import methods

# What a method cannot do without; what it had better have from source training it warns about, and runs.
NEEDED: dict[str, dict[str, Any]] = {"eata": {"source": images(16)}, "gsfda": {"features": "5"}}
unprepared = [
    pytest.mark.filterwarnings(f"ignore:.*{said}:undrift.UndriftWarning")
    for said in ("COLLAPSED", "no feature masks", "untrained rotation head", "no posterior")
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=unprepared) for n in methods.names("stream")])
def test_every_streaming_method_runs_from_a_plain_network_and_gives_it_back(name: str) -> None:
    net = network()
    before = state(net)
    needed = NEEDED.get(name, {})
    going = undrift.stream(net, batches(), method=name, **needed)
    answers = list(going)
    assert [len(p) for p in answers] == [8, 8, 8]
    assert all(torch.isfinite(p.probs).all() for p in answers)
    assert going.remove() is net
    assert len(list(undrift.stream(net, batches(), method=name, **needed))) == 3  # nobody holds this one
    assert len(same(before, net.state_dict())) == len(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("name", [pytest.param(n, marks=unprepared) for n in methods.names("adapt")])
def test_every_method_over_epochs_runs_from_a_plain_network_and_gives_it_back(name: str) -> None:
    net = network()
    before = state(net)
    history = undrift.adapt(net, images(16), method=name, epochs=2, batch_size=8, **NEEDED.get(name, {}))
    assert history.model is not None
    moved = len(same(before, net.state_dict())) < len(before)
    assert moved == (name != "source")  # batch statistics leave those of the whole domain, for single images later
    assert torch.isfinite(undrift.predict(history.model, images(8)).probs).all()
    assert history.model.remove() is net
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
    assert {n for n in before if n not in same(before, net.state_dict())} == {
        "1.weight", "1.bias", "1.running_mean", "1.running_var"
    }  # fmt: skip


def test_domain_statistics_are_the_mean_over_the_domain() -> None:
    net = network()
    before = state(net)
    parts = batches()
    inputs = [net[0](x) for x in parts]
    wanted = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    history = undrift.adapt(net, parts, method="norm-stats:domain")
    assert history.model is not None
    torch.testing.assert_close(net[1].running_mean, wanted.detach())
    moved = set(before) - set(same(before, net.state_dict()))
    assert moved <= {"1.running_mean", "1.running_var", "1.num_batches_tracked"}  # nothing is trained along
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
    wanted = undrift.predict(model, images(8)).probs
    model.remove()
    assert not torch.equal(undrift.predict(net.eval(), images(8)).probs, wanted)
    loaded = undrift.load(net, path)
    assert torch.equal(undrift.predict(loaded, images(8)).probs, wanted)


def test_off_is_the_source_while_weights_are_trained() -> None:
    net = network().eval()
    wanted = net(images(8))
    model = undrift.perturb(net, train="*", layers=())
    with torch.no_grad():
        for parameter in learnables(model).values():
            parameter += 1
    assert not torch.equal(model(images(8)), wanted)
    with model.off():
        assert torch.equal(net(images(8)), wanted)
    assert sources(model).keys() == learnables(model).keys()
    assert all(not torch.equal(p, sources(model)[n]) for n, p in learnables(model).items())


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
        (nn.ModuleDict({"fc": nn.Linear(2, 2), "head": nn.Linear(2, 2)}), "head", True),
        (nn.ModuleDict({"fc": nn.Linear(2, 2), "head": nn.Linear(2, 2), "more": nn.Linear(2, 2)}), "head", False),
        (nn.ModuleDict({"classifier": network(), "blocks": nn.Linear(2, 2)}), "classifier.6", True),
        (nn.ModuleDict({"classifier": nn.Conv2d(3, 3, 1), "blocks": nn.Linear(2, 2)}), "classifier", True),
        (nn.ModuleDict({"a": nn.ModuleDict({"se": nn.ModuleDict({"fc": nn.Linear(2, 2)})})}), "a.se.fc", True),
        (nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), "1", True),
    ],
)
def test_the_classifier_is_found_by_name_or_guessed_aloud(net: nn.Module, name: str | None, sure: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        going = undrift.stream(net, [], method="tent-ft", frozen="@classifier")
    assert going.model.options.frozen == (() if name is None else (name,))
    assert [repr(name) in str(w.message) or name is None for w in caught] == ([] if sure else [True])
    assert all("frozen=…" in str(w.message) for w in caught)
    going.remove()
