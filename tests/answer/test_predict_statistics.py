"""Asked without noise under statistics of noisy passes, the network says once that these do not fit; else never."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from support import convnet, images, same, snapshot
from undrift import predict

KEPT = ("train", "moving", "domain")
FACTS = (
    r"kept from passes with noise \(σ up to 0\.1.*samples=0 asks.*needed: draws, or statistics of its own.*"
    r"samples=1 or more.*export\(model, path, images=…\)"
)


def moved(**options: Any) -> undrift.Perturbed:
    """Return a network whose kept statistics have seen a pass as its steps are."""
    model = undrift.perturb(convnet(), **options)
    model.key.noisy = bool(model.options.train_samples)
    with torch.no_grad():
        model(images(seed=3))
    model.key.noisy = True
    return model


@pytest.mark.parametrize("statistics", KEPT)
@pytest.mark.parametrize("samples", [0, None])
def test_it_is_said_once_a_model_to_whoever_asked(statistics: str, samples: int | None) -> None:
    model = moved(norm_statistics=statistics, test_samples=0)
    before = snapshot(model.net)
    with pytest.warns(undrift.UndriftWarning, match=FACTS) as heard:
        said = predict(model, images(), samples)
    assert [w.filename for w in heard] == [__file__]
    assert torch.equal(predict(model, images(), samples).probs, said.probs)  # a warning here would be an error
    model(images(seed=4))
    predict(model, images(), samples)  # statistics have moved on: it is the same model still
    with model.mean(), torch.no_grad():
        model.eval().net.load_state_dict(before)
        assert torch.equal(model(images()).softmax(1), said.probs)  # the answers are the mean network's, as ever
    with pytest.warns(undrift.UndriftWarning, match=FACTS):
        predict(moved(norm_statistics=statistics), images(), 0)  # another model has heard nothing yet


@pytest.mark.parametrize(
    "options",
    [
        {"norm_statistics": "batch"},
        {"norm_statistics": "source"},
        {"frozen": "1"},
        {"layers": ()},
        {"init_fraction": 0.0},
        {"init_fraction": 1e-6},
        {"train_samples": 0},
    ],
)
def test_statistics_that_fit_are_no_matter(options: dict[str, Any]) -> None:
    model = moved(**options)
    for _ in range(2):
        predict(model, images(), 0)  # a warning here would be an error


def test_draws_the_source_and_a_fresh_network_are_no_matter() -> None:
    model = moved()
    for samples in (1, 4):
        predict(model, images(), samples)
    predict(model, images(), 4, mode="fast")
    with model.off() as net:
        predict(model, images(), 0)  # the source's statistics are in their place
        predict(net, images())
    predict(undrift.perturb(convnet()), images(), 0)
    gone = moved()
    gone.remove()
    with pytest.raises(undrift.UndriftError, match="removed"):
        predict(gone, images(), 0)


def test_a_state_that_is_filled_in_is_looked_at_anew() -> None:
    noisy, fresh = moved(), undrift.perturb(convnet())
    predict(fresh, images(), 0)
    tensor = fresh.net[1].running_mean  # type: ignore[index, union-attr]
    fresh.load_state_dict(noisy.state_dict())
    assert fresh.net[1].running_mean is tensor  # type: ignore[index, union-attr]
    with pytest.warns(undrift.UndriftWarning, match=FACTS):
        predict(fresh, images(), 0)
    # A copy is a model of its own, and statistics that were made in inference mode have no version.
    with torch.inference_mode():
        twin = copy.deepcopy(noisy)
        with pytest.warns(undrift.UndriftWarning, match=FACTS):
            predict(twin, images(), 0)


@pytest.mark.slow
def test_a_file_and_a_compiled_step_are_found_out(tmp_path: Path) -> None:
    model = moved()
    undrift.save(model, tmp_path / "b.safetensors")
    loaded = undrift.load(model.remove(), tmp_path / "b.safetensors")
    assert not any(policy.noisy for policy in loaded.norms)
    with pytest.warns(undrift.UndriftWarning, match=FACTS):
        predict(loaded, images(), 0)
    compiled = undrift.perturb(convnet())
    predict(compiled, images(), 0)
    compiled.compile(backend="eager")
    compiled(images())
    with pytest.warns(undrift.UndriftWarning, match=FACTS):
        predict(compiled, images(), 0)


def test_evaluate_hears_it_once_for_all_its_batches() -> None:
    data = {name: [(images(6, seed), torch.zeros(6, dtype=torch.long)) for seed in (1, 2)] for name in ("a", "b")}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        undrift.evaluate(moved(), data, samples=0)
        undrift.evaluate(moved(), data, samples=2)
    assert [w.category for w in heard] == [undrift.UndriftWarning]


def test_asking_changes_nothing() -> None:
    model = moved()
    before, step = snapshot(model.net), model.key.step.clone()
    with pytest.warns(undrift.UndriftWarning, match=FACTS):
        predict(model, images(), 0)
    assert same(model.net.state_dict(), before)
    assert torch.equal(model.key.step, step)
