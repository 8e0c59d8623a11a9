"""The parts of source training: views, schedule, optimiser, evaluation, options, header, compilation."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import undrift
from undrift.images import SHOT, TensorDomain
from undrift_bench.train import TrainOptions, read_header, train_preset, train_source
from undrift_bench.train.epoch import Loop
from undrift_bench.train.frames import Normalise, Views, cut, draw, frames
from undrift_bench.train.options import PRESETS
from undrift_bench.train.schedule import factor, make_optimiser, set_rate

CPU = torch.device("cpu")


def test_a_cut_is_pad_crop_and_flip(domain: TensorDomain) -> None:
    source = frames(domain, CPU, pad=2)
    assert source.images.shape == (120, 16, 16, 1)
    views = Views(torch.tensor([5, 7]), torch.tensor([0, 4]), torch.tensor([2, 1]), torch.tensor([False, True]))
    batch = cut(source, views)
    padded = nn.functional.pad(domain.images, (2, 2, 2, 2))
    assert torch.equal(batch[0], padded[5, :, 0:12, 2:14])
    assert torch.equal(batch[1], padded[7, :, 4:16, 1:13].flip(-1))


def test_batches_are_channels_last_and_normalised_like_the_preprocessing() -> None:
    images = torch.randint(0, 256, (6, 3, 40, 30), dtype=torch.uint8)
    preprocess = dataclasses.replace(SHOT, resize=(20, 20), crop=16)
    source = frames(TensorDomain("a", images, torch.zeros(6, dtype=torch.long), ("x",), preprocess), CPU)
    centre = torch.full((6,), 2)
    batch = cut(source, Views(torch.arange(6), centre, centre, torch.zeros(6, dtype=torch.bool)))
    assert batch.is_contiguous(memory_format=torch.channels_last)
    normalised = Normalise(preprocess, CPU)(batch)
    torch.testing.assert_close(normalised, preprocess(images), rtol=1e-5, atol=1e-5)
    assert normalised.is_contiguous(memory_format=torch.channels_last)


def test_views_use_every_image_once_and_every_place(domain: TensorDomain) -> None:
    source = frames(domain, CPU, pad=1)
    views = draw(source, True, torch.Generator().manual_seed(0))
    assert sorted(views.order.tolist()) == list(range(120))
    assert set(views.top.tolist()) == set(views.left.tolist()) == {0, 1, 2}
    assert 30 < int(views.flip.sum()) < 90
    assert not draw(source, False, torch.Generator()).flip.any()
    sizes = [len(batch.order) for batch in views.batches(50)]
    assert sizes == [50, 50]


def test_schedules() -> None:
    assert factor("inverse", 0.5) == (1 + 5) ** -0.75
    assert factor("cosine", 0.5) == pytest.approx(0.5)
    assert factor("constant", 0.7) == 1
    rising = [factor("one_cycle", p / 100, warmup=0.3) for p in range(101)]
    assert rising[0] == 0
    assert rising[30] == max(rising) == 1
    assert rising[100] == pytest.approx(0)
    assert rising[:31] == sorted(rising[:31])
    assert rising[30:] == sorted(rising[30:], reverse=True)


def test_slow_layers_have_their_own_rate() -> None:
    network = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    options = train_preset("shot")
    optimiser = make_optimiser(network, options, fused=False)
    rate = set_rate(optimiser, options, step=9, steps=20)
    assert rate == pytest.approx(1e-2 * (1 + 10 * 9.5 / 20) ** -0.75)
    assert [group["lr"] for group in optimiser.param_groups] == pytest.approx([rate, 0.1 * rate])
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 2]
    assert all(group["nesterov"] and group["weight_decay"] == 1e-3 for group in optimiser.param_groups)


def test_evaluation_counts_every_image_once(domain: TensorDomain) -> None:
    class Brightest(nn.Module):
        """Right on these images, without training."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sides = (x[..., :3], x[..., -3:], x[..., :3, :], x[..., -3:, :])
            return self.scale * torch.stack([side.mean((1, 2, 3)) for side in sides], 1)

    source = frames(domain, CPU)
    loops = [Loop(Brightest(), source, source, train_preset("digits").replace(batch_size=n)) for n in (7, 60, 500)]
    assert [loop.evaluate(source) for loop in loops] == [1, 1, 1]
    source.labels[-1] = (source.labels[-1] + 1) % 4
    assert [loop.evaluate(source) for loop in loops] == pytest.approx([119 / 120] * 3)


@pytest.mark.slow
def test_compiled_training_never_compiles_twice_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, domain: TensorDomain, quick: TrainOptions, tmp_path: Path
) -> None:
    plain = train_source(domain, tmp_path / "a.safetensors", quick, progress=False)
    # No compiler is needed: the captured graph runs with PyTorch's own operators.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        options = quick.replace(compiled="on")
        compiled = train_source(domain, tmp_path / "b.safetensors", options, progress=False)
    torch._dynamo.reset()
    assert [row.loss for row in compiled.history] == pytest.approx([row.loss for row in plain.history], rel=1e-3)


def test_half_precision_learns_too(domain: TensorDomain, quick: TrainOptions, tmp_path: Path) -> None:
    options = quick.replace(precision="bfloat16", epochs=8)
    result = train_source(domain, tmp_path / "a.safetensors", options, progress=False)
    assert result.history[-1].loss < 0.5 * result.history[0].loss
    assert all(p.dtype == torch.float32 for p in result.network.parameters())


def test_presets_hold_the_published_recipes() -> None:
    shot, cifar = train_preset("shot"), train_preset("cifar")
    assert (shot.lr, shot.slow, shot.slow_lr_scale, shot.weight_decay) == (1e-2, ("backbone",), 0.1, 1e-3)
    assert (shot.batch_size, shot.label_smoothing, shot.schedule, shot.held_out) == (64, 0.1, "inverse", 0.1)
    assert (cifar.network, cifar.weight_decay, cifar.pad, cifar.flip) == ("wrn28_10", 5e-4, 4, True)


def test_options_explain_themselves_and_survive_json() -> None:
    assert all(f.metadata["help"] for f in dataclasses.fields(TrainOptions))
    for options in PRESETS.values():
        assert TrainOptions(**json.loads(json.dumps(options.as_dict()))) == options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"epochs": 0}, "epochs=0 is below 1"),
        ({"schedule": "step"}, "schedule='step' is not one of"),
        ({"held_out": 1.0}, "held_out=1.0 is not below 1"),
        ({"lr": 0}, "lr=0 is not above 0"),
        ({"lr": math.nan, "network": 3}, r"lr=nan is not finite; network=3 is not a name"),
        ({"flip": 1}, "neither True nor False"),
    ],
)
def test_wrong_options_get_their_facts(change: dict[str, object], message: str) -> None:
    with pytest.raises(undrift.OptionError, match=message):
        train_preset("cifar").replace(**change)


def test_options_of_another_kind() -> None:
    with pytest.raises(undrift.OptionError, match="options is a dict"):
        train_source(TensorDomain("a", torch.zeros(1)), "a.safetensors", {})  # type: ignore[arg-type]


def test_files_without_our_header_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    with pytest.raises(undrift.DataError, match="there is no file"):
        read_header(path)
    path.write_bytes(b"nothing")
    with pytest.raises(undrift.DataError, match="cannot be read"):
        read_header(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(undrift.DataError, match="none of undrift's"):
        read_header(path)
    save_file({"a": torch.zeros(1)}, path, {"undrift_source": "1", "network": "digits"})
    with pytest.raises(undrift.DataError, match="is damaged"):
        read_header(path)
