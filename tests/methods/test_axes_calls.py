"""A method is called by name: wrong names and settings are refused, and the network is given back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from axes_support import batches, network, same, state
from support import images
from undrift import methods
from undrift.images import Preprocess
from undrift.perturb import remove


def test_names_variants_and_settings_are_checked() -> None:
    with pytest.raises(undrift.OptionError, match="did you mean 'tent'"):
        methods.get("tnet")
    with pytest.raises(undrift.OptionError, match="needs another loop"):
        undrift.stream(network(), batches(), method="shot")
    with pytest.raises(undrift.OptionError, match="no variant"):
        methods.get("source:paper")
    with pytest.raises(undrift.OptionError, match=r"no setting 'strean_lr' \(did you mean.*it takes none\. Correct"):
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
    assert all(f"| `{m.name}` | {m.reference} |" in text for m in methods.METHODS.values())
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
    with pytest.raises(undrift.OptionError, match="method is an int"):
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


def test_each_setting_is_listed_once() -> None:
    for method in methods.METHODS.values():
        assert len(set(method.settings())) == len(method.settings()), method.name
