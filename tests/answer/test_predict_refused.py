"""What `predict` and `stream` say to arguments that are not what they need: found, needed, what to do."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import undrift
from support import convnet, images, same, snapshot


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 2.5}, "batch_size=2.5 is not a whole number from 1 up. Leave"),
        ({"batch_size": True}, "batch_size=True is not"),
        ({"batch_size": 0}, "batch_size=0 is not"),
        ({"temperature": "auto"}, "temperature='auto' is not a number above 0. 1 leaves"),
        ({"temperature": [1.0]}, r"temperature=\[1.0\] is not"),
        ({"temperature": float("nan")}, "temperature=nan is not"),
        ({"generator": "a"}, "generator='a' is a str; needed: a torch.Generator, or a seed"),
        ({"generator": 0.5}, "generator=0.5 is a float; needed"),
        ({"views": "auto"}, '"auto" needs a stream or epochs .*needed: mirror, shift. Name'),
        ({"views": 5}, "views=5: 5 is not one of mirror, shift. Name"),
        ({"generator": 2**64}, "whole number of 64 bits. Give generator=0"),
    ],
)
def test_arguments_of_predict(arguments: dict[str, Any], said: str) -> None:
    model = undrift.perturb(convnet())
    before = snapshot(model)
    with pytest.raises(undrift.OptionError, match=said):
        undrift.predict(model, images(), **arguments)
    assert same(snapshot(model), before)


def test_numbers_of_numpy_and_of_tensors_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    model = undrift.perturb(convnet())
    expected = undrift.predict(model, images(), generator=3, batch_size=2, temperature=2.0).probs
    for heat in (np.float64(2), torch.tensor(2.0)):
        found = undrift.predict(model, images(), generator=np.int64(3), batch_size=np.int32(2), temperature=heat)
        assert torch.equal(found.probs, expected)
    seeds = [undrift.perturb(convnet(), generator=seed).key.seed for seed in (np.int64(3), 3)]  # type: ignore[arg-type]
    assert torch.equal(*seeds)


def test_other_places_that_take_a_generator() -> None:
    with pytest.raises(undrift.OptionError, match="generator='a' is a str"):
        undrift.perturb(convnet(), generator="a")  # type: ignore[arg-type]
    model = undrift.perturb(convnet())
    with pytest.raises(undrift.OptionError, match="generator='a' is a str"):
        model.reseed("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("perturbed", [True, False])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_a_single_image(perturbed: bool, samples: int) -> None:
    model = undrift.perturb(convnet()) if perturbed else convnet()
    image = images()[0]
    said = r"shape \(3, 8, 8\); .* N × channels × height × width. .* image\[None\]"
    with pytest.raises(undrift.DataError, match=said):
        undrift.predict(model, image, samples)
    with pytest.raises(undrift.DataError, match=r"shape \(8, 8\); .* image\[None, None\]"):
        undrift.predict(model, image[0], samples)
    assert len(undrift.predict(model, image[None], samples)) == 1


def test_a_stream_of_single_frames() -> None:
    model = undrift.perturb(convnet())
    stream = undrift.stream(model, [images()[0], images()])
    with pytest.raises(undrift.DataError, match=r"shape \(3, 8, 8\); .* image\[None\]"):
        next(stream)
    assert len(next(stream)) == 6


def test_a_network_that_brings_its_input_into_order_may_take_another_shape() -> None:
    net = nn.Sequential(nn.Unflatten(1, (3, 8)), convnet())
    assert len(undrift.predict(undrift.perturb(net), images().flatten(1, 2))) == 6


@pytest.mark.parametrize("lr", ["a", [1e-3], float("nan"), -1])
def test_learning_rates_of_a_stream(lr: Any) -> None:
    with pytest.raises(undrift.OptionError, match="is not a number from 0 up"):
        undrift.stream(undrift.perturb(convnet()), [images()], lr=lr)


def test_a_stream_names_the_network_inside_a_wrapper() -> None:
    model = undrift.perturb(convnet())
    with pytest.raises(undrift.OptionError, match=r"DataParallel; .* model\.module"):
        undrift.stream(nn.DataParallel(model), [images()])
    with pytest.raises(undrift.OptionError, match=r"OptimizedModule; .* model\._orig_mod"):
        undrift.stream(torch.compile(model), [images()])  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["predict", "evaluate", "temperature", "adapt", "stream"])
@pytest.mark.parametrize("model", [None, convnet, "resnet50"])
def test_what_is_no_network_is_named(verb: str, model: Any) -> None:
    data = [(images(), torch.zeros(6, dtype=torch.long))]
    with pytest.raises(undrift.OptionError, match=f"model is a {type(model).__name__}; .*torch.nn.Module. Give"):
        getattr(undrift, verb)(model, data)


def test_a_data_set_is_taken_as_adapt_takes_it() -> None:
    net, labels = convnet().eval(), torch.arange(6) % 5
    data = TensorDataset(images(), labels)
    assert torch.equal(undrift.predict(net, data).probs, undrift.predict(net, images()).probs)
    assert undrift.evaluate(net, data) == undrift.evaluate(net, [(images(), labels)])


def test_an_array_is_taken_as_a_tensor_is() -> None:
    net, array = convnet().eval(), images().numpy()
    array.flags.writeable = False  # as of np.load(…, mmap_mode="r")
    expected = undrift.predict(net, images()).probs
    for given in (array, [array]):
        assert torch.equal(undrift.predict(net, given).probs, expected)
    assert [len(p) for p in undrift.stream(net, [array])] == [6]
    with pytest.raises(undrift.DataError, match=r"batches is a ndarray; .*a stream needs an iterable"):
        undrift.stream(net, array)


def test_a_prediction_shows_counts_and_not_its_tensors() -> None:
    shown = repr(undrift.predict(convnet().eval(), images()))
    assert re.fullmatch(
        r"<Prediction: 6 images, 5 classes; confidence 0\.\d+, entropy [\d.]+, mutual_info 0 on average>", shown
    )
    assert "0 images, 5 classes>" in repr(undrift.predict(convnet().eval(), images()[:0]))
