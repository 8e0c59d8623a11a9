"""The default recipe: one name for both loops, taken for a plain network, and left alone where something is chosen."""

import contextlib
import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images
from undrift import methods
from undrift.likelihood import Nrc, Teacher


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weights(model: undrift.Perturbed) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.net.parameters()])


def test_one_name_is_another_row_in_each_loop() -> None:
    online, offline = methods.get("undrift", "stream"), methods.get("undrift", "adapt")
    assert online.name == offline.name == "undrift"
    assert isinstance(online.build({}).likelihood, Teacher)
    assert online.options == methods.get("undrift").options
    parts = offline.build({"neighbours": 4})
    assert isinstance(parts.likelihood, Nrc)
    assert parts.likelihood.statistics_first
    assert parts.likelihood.neighbours == 4
    assert "neighbours" not in online.settings()
    assert offline.options.train == ("*",)
    assert offline.options.frozen == ("@classifier",)
    assert online.options.frozen == ()
    for loop in ("stream", "adapt", None):
        assert methods.names(loop).count("undrift") == 1


def test_over_epochs_it_is_safe_and_other_methods_keep_their_last_epoch() -> None:
    kept = {name: methods.get(name, "adapt").keep for name in methods.names("adapt")}
    assert {name for name, keep in kept.items() if keep == "safe"} == {"undrift", "undrift-light"}
    assert {keep for name, keep in kept.items() if not name.startswith("undrift")} == {"last"}


def test_a_loop_changes_a_row_as_a_variant_does_and_the_variant_comes_last() -> None:
    row = methods.Method(
        *("m", "", "", ("stream", "adapt"), undrift.Options(), lambda: undrift.entropy),
        variants={"small": {"epochs": 2, "momentum": 0.5, "neighbours": 5}},
        by_loop={"adapt": {"likelihood": Nrc, "epochs": 7, "momentum": 0.1, "nesterov": True, "neighbours": 2}},
    )
    assert row.in_loop("stream").options == row.options
    offline = row.in_loop("adapt")
    assert (offline.name, offline.epochs, offline.options.momentum) == ("m", 7, 0.1)
    assert offline.build({}).likelihood.neighbours == 2
    assert offline.build({"neighbours": 3}).likelihood.neighbours == 3
    both = offline.variant("small")
    assert (both.name, both.epochs, both.options.momentum, both.options.nesterov) == ("m:small", 2, 0.5, True)
    assert both.build({}).likelihood.neighbours == 5


def test_a_plain_network_gets_the_recipe() -> None:
    torch.manual_seed(0)
    net, found = convnet(), []
    for given in ({}, {"method": "undrift"}):
        history = undrift.adapt(
            copy.deepcopy(net), images(24), epochs=2, generator=seed(), batch_size=12, least_agreement=0.0, **given
        )
        assert history.model is not None
        stream = undrift.stream(copy.deepcopy(net), images(24).split(8), generator=seed(), seed=1, **given)
        found.append((weights(history.model), torch.cat([p.probs for p in stream])))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_settings_of_the_default_need_no_method() -> None:
    history = undrift.adapt(convnet(), images(24), epochs=1, neighbours=2, init_fraction=0)
    assert history.model is not None
    assert history.model.options.init_fraction == 0
    with pytest.raises(undrift.OptionError, match=r"undrift has no setting 'nieghbours' \(did you mean 'neighbours'"):
        undrift.adapt(convnet(), images(24), nieghbours=2)


def test_a_shallow_network_has_noise_in_its_first_layer() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    history = undrift.adapt(net, torch.rand(12, 3, 2, 2), epochs=1)
    assert history.model is not None
    assert [choice.name for choice in history.model.choices if choice.why_not is None] == ["1"]


def test_who_chooses_parts_is_asked_for_all_of_them() -> None:
    for call in (
        lambda: undrift.adapt(convnet(), images(12), undrift.Shot()),
        lambda: undrift.stream(convnet(), [images(12)], undrift.entropy),
    ):
        with pytest.raises(undrift.OptionError, match=r"undrift\.perturb\(net\).*leave likelihood and keepers out"):
            call()
    model = undrift.perturb(convnet())
    options = model.options
    assert undrift.adapt(model, images(12), epochs=1).model is model
    assert model.options == options  # the paper's


class Sided(nn.Module):
    """Answers by the brightness of the image, or with `sided` by which side is bright."""

    def __init__(self, sided: bool) -> None:
        super().__init__()
        self.sided, self.body, self.fc = sided, nn.Linear(2, 4), nn.Linear(4, 2)
        nn.init.eye_(self.fc.weight[:, :2].data.zero_())

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[..., : x.shape[-1] // 2].mean((1, 2, 3)), x[..., x.shape[-1] // 2 :].mean((1, 2, 3))
        seen = (left, right) if self.sided else (left + right, 2 - left - right)
        logits: Tensor = self.fc(self.body(torch.stack(seen, 1)))
        return logits


def halves(count: int = 96) -> Tensor:
    """Return images whose left or right half is bright, and so is all of some."""
    torch.manual_seed(0)
    levels = torch.randint(2, (count, 1, 1, 2)).float().repeat_interleave(4, 3)
    return (levels + torch.randint(2, (count, 1, 1, 1))).div(2).expand(-1, 1, 8, 8) + 0.05 * torch.rand(count, 1, 8, 8)


@pytest.mark.parametrize("sided", [False, True])
def test_answers_average_over_the_views_that_passed(sided: bool, tmp_path: Path) -> None:
    torch.manual_seed(2)
    net = Sided(sided)
    with torch.no_grad():
        net.body.weight.copy_(8 * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1, 0], [0, 1]]))
        net.body.bias.zero_()
    x = halves()
    history = undrift.adapt(net, x, epochs=1, adapt_lr=0.0)
    assert history.views is not None
    assert ("mirror" in history.views) is not sided
    assert "views found safe: " in str(history)
    model: Any = history.model
    assert model.options.answer_views == history.views
    given = undrift.predict(model, x, generator=1)
    assert torch.equal(given.probs, undrift.predict(model, x, generator=1, views=history.views).probs)
    history.save(tmp_path / "h.json")
    assert undrift.History.load(tmp_path / "h.json").views == history.views
    undrift.save(model, tmp_path / "domain.safetensors")
    loaded = undrift.load(model.remove(), tmp_path / "domain.safetensors")
    assert loaded.options.answer_views == history.views
    torch.testing.assert_close(undrift.predict(loaded, x, generator=1).probs, given.probs)


@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
def test_views_named_by_the_user_are_not_tested() -> None:
    history = undrift.adapt(convnet(), images(24), epochs=1, answer_views="mirror")
    assert history.views is None
    assert history.model is not None
    assert history.model.options.answer_views == ("mirror",)
    few = undrift.adapt(convnet(), images(24), epochs=1)  # too few to call any view safe
    assert few.views == ()


@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
def test_a_small_network_takes_larger_steps_over_epochs_unless_the_user_says_how_large() -> None:
    def rate(net: nn.Module, **given: Any) -> float:
        history = undrift.adapt(net, images(24), epochs=1, **given)
        assert history.model is not None
        return history.model.options.adapt_lr

    large = convnet()
    large.register_parameter("spare", nn.Parameter(torch.zeros(1_000_000), requires_grad=False))
    assert rate(convnet()) == rate(convnet(), method="undrift") == 1e-2
    assert rate(large) == methods.get("undrift", "adapt").options.adapt_lr == 1e-3
    assert rate(convnet(), adapt_lr=5e-3) == 5e-3
    assert rate(convnet(), method="shot") == 1e-3


class Recurrent(nn.Module):
    """A network whose layers take no noise, but its classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x)[0][:, -1])


def test_where_no_layer_takes_noise_weights_are_trained_without() -> None:
    torch.manual_seed(0)
    net, series = Recurrent(), torch.rand(32, 5, 4)
    model = undrift.adapt(net, series, epochs=2).model
    assert not model.noises()
    moved = {name.removeprefix("net.").partition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert moved == {"body"}
    assert not torch.equal(undrift.predict(model, series).probs, undrift.predict(model.remove(), series).probs)
    with pytest.raises(undrift.CannotPerturb, match=r"nothing to perturb in Sequential: 0: frozen"):
        undrift.adapt(nn.Sequential(nn.Linear(4, 3)), torch.rand(32, 4), epochs=1)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).detach()


def test_a_stream_that_is_stopped_in_a_step_gives_the_network_back_at_once() -> None:
    undrift.stream(Detached(), [])  # imports the compiler, which keeps frames
    net = Detached()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(undrift.OutputError):
            for _ in undrift.stream(net, images(64).split(64)):
                pass
        undrift.perturb(net)  # raises where something is left on it
    finally:
        gc.enable()


def test_a_network_without_a_gradient_is_named() -> None:
    with pytest.raises(undrift.OutputError, match=r"output has no gradient; .*Take no_grad\(\) and detach\(\) out"):
        undrift.adapt(Detached(), images(32), epochs=1, least_agreement=0.0)


def test_lazy_layers_are_named() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(undrift.CannotPerturb, match=r"is lazy: it has no weights yet\. Run one batch"):
        undrift.adapt(net, images())


@pytest.mark.parametrize("verb", ["adapt", "stream"])
def test_a_compiled_network_is_adapted_uncompiled(verb: str) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _example: list[Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    def run(net: nn.Module) -> Tensor:
        torch.manual_seed(0)
        if verb == "adapt":
            history = undrift.adapt(net, images(64), epochs=1, least_agreement=0.0)
            return undrift.predict(history.model, images(), generator=0).probs
        return undrift.Prediction.cat(undrift.stream(net, images(128).split(64))).probs

    plain = convnet()
    expected = run(copy.deepcopy(plain))
    assert torch.equal(run(torch.compile(plain, backend=backend)), expected)  # type: ignore[arg-type]
    assert not compiled
