"""A stopped stream goes on exactly where it stood, and a state that does not fit changes nothing."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import NAN, batches, equal, model_of, state_of
from support import convnet, images, learnables, same
from undrift.likelihood import Information, entropy
from undrift.stream import stream


def test_an_interrupted_stream_goes_on_exactly_where_it_stood() -> None:
    x = batches(6)
    x[1] = x[1].clone()
    x[1][3] = NAN
    settings = {"lr": 0.02, "guard": True}
    whole = stream(model_of(), x, Information(), **settings)
    expected = list(whole)
    first = stream(model_of(), x[:3], Information(), **settings)
    got = list(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    list(stream(first.model, x[3:], lr=0.5))  # what happens afterwards does not reach the saved state
    file.seek(0)
    second = stream(model_of(), x[3:], Information(), guard=True)
    second.load_state_dict(torch.load(file, weights_only=True))
    got += list(second)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))
    assert same(state_of(second.model), state_of(whole.model))
    assert second.report == whole.report
    assert list(second.report.skipped_at) == [9]
    assert str(second.online.optimiser.state_dict()) == str(whole.online.optimiser.state_dict())


def test_a_state_is_not_changed_by_the_stream_that_gave_it() -> None:
    s = stream(model_of(), batches(4))
    next(s)
    state = s.state_dict()
    kept = copy.deepcopy(state)
    list(s)
    assert str(state) == str(kept)


def test_a_state_of_another_network_changes_nothing() -> None:
    s = stream(model_of(), batches(2))
    next(s)
    for model in (
        undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(192, 5))),
        model_of(exclude="8"),
        model_of(linear_sharing="kernel"),
    ):
        before = state_of(model)
        with pytest.raises(undrift.PerturbationMismatch, match=r"changed; .*same source network, options"):
            stream(model, []).load_state_dict(s.state_dict())
        assert same(state_of(model), before)
    with pytest.raises(undrift.PerturbationMismatch, match="no identity, model, start"):
        s.load_state_dict({})
    model, state = model_of(), s.state_dict()
    before = state_of(model)
    state["optimiser"]["param_groups"].pop()
    with pytest.raises(undrift.PerturbationMismatch, match="optimiser has other parameters"):
        stream(model, []).load_state_dict(state)
    assert same(state_of(model), before)


def test_an_interrupt_leaves_a_usable_network() -> None:
    class Camera:
        def __iter__(self) -> object:
            yield images()
            raise KeyboardInterrupt

    def interrupted(logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = model_of().train()
    flags = [m.training for m in model.modules()]
    s = stream(model, Camera())
    next(s)
    state = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        next(s)
    with pytest.raises(KeyboardInterrupt):
        next(stream(model, [images()], interrupted))
    assert [m.training for m in model.modules()] == flags
    assert same({**state_of(model), "key.step": state["key.step"]}, state)
    assert all(p.grad is None for p in learnables(model).values())
    assert len(next(stream(model, [images()]))) == 6
    for p in stream(model, batches(3)):
        assert len(p) == 6
        break
    model.remove()


def test_a_state_of_other_weights_or_options_is_refused() -> None:
    first = stream(undrift.perturb(convnet()), [images()])
    next(first)
    for model, what in (
        (undrift.perturb(convnet()), "network"),
        (undrift.perturb(convnet(), norm_statistics="batch"), "norm_statistics"),
    ):
        with pytest.raises(undrift.PerturbationMismatch, match=what):
            stream(model, []).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"method": "sar"}, "likelihood, keepers"),
        ({"method": "roid", "ensemble": 0.5}, "keepers"),
        ({"method": "roid", "sharpness": 1.0}, "likelihood"),
    ],
)
def test_a_state_of_another_method_or_setting_changes_nothing(other: dict[str, object], what: str) -> None:
    net, twin = convnet(), convnet()
    twin.load_state_dict(net.state_dict())
    first = stream(net, batches(2), method="roid")
    list(first)
    second = stream(twin, batches(2), **other)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(undrift.PerturbationMismatch, match=rf"another stream: .*{what} changed"):
        second.load_state_dict(first.state_dict())
    assert str(second.state_dict()) == str(before)
    again = stream(twin, batches(2), method="roid") if second.remove() is twin else None
    assert again is not None
    again.load_state_dict(first.state_dict())
    assert same(state_of(again.model), state_of(first.model))


def test_a_state_that_fails_half_way_is_taken_back() -> None:
    class Fragile(undrift.Shot):
        """Any likelihood with a state of its own."""

        def __call__(self, logits: Tensor, step: undrift.Step) -> Tensor:
            return entropy(logits)

        def load_state_dict(self, state: dict[str, object], model: object = None) -> None:
            if state:
                raise RuntimeError("no")

        def state_dict(self) -> dict[str, object]:
            return {}

    first, second = (stream(model_of(), batches(1), Fragile()) for _ in range(2))
    next(first)
    state, before = first.state_dict() | {"likelihood": {"x": 1}}, second.state_dict()
    with pytest.raises(RuntimeError, match="no"):
        second.load_state_dict(state)
    assert str(second.state_dict()) == str(before)


def test_a_stream_that_resumes_at_its_end_saves_the_same_pack() -> None:
    first = undrift.stream(model_of(), batches(3))
    list(first)
    again = undrift.stream(model_of(), [])
    again.load_state_dict(first.state_dict())
    assert list(again) == []
    assert again.model.facts == first.model.facts == {"images": 18}
