"""One exact pack, stored again in every way: what each costs, beside the pack itself."""

from pathlib import Path

import torch
from torch import nn

import undrift
from support import same, snapshot
from undrift_bench.bench.offline.storage import look_again, stored_ways


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.BatchNorm2d(24), nn.ReLU()
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(24 * 16, 4)).train()
    with torch.no_grad():
        for seed in range(20):
            net(images(seed))
    return net.eval()


def images(seed: int = 99) -> torch.Tensor:
    return torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_each_way_is_stored_answered_and_compared(tmp_path: Path) -> None:
    net, dark = network(), images() / 4
    source = snapshot(net)
    given = {"epochs": 2, "adapt_lr": 0.1, "least_agreement": 0.0}
    model = undrift.adapt(net, dark, method="undrift", progress=False, **given).model
    assert model is not None
    labels = undrift.predict(model, dark, generator=0).label
    undrift.save(model, tmp_path / "a.safetensors", mean="exact")
    model.remove()
    ways = "1-bit", "4-bit", "exact+statistics", "4-bit+statistics"
    found = stored_ways(net, tmp_path / "a.safetensors", dark, labels, ways, size=30)
    assert list(found) == ["exact", *ways]
    assert (found["exact"]["kl"], found["exact"]["shift error"]) == (0, 0)
    assert found["exact"]["accuracy"] == 1
    assert 0 < found["4-bit"]["kl"] < found["1-bit"]["kl"]
    assert found["1-bit"]["bytes"] < found["4-bit"]["bytes"] < found["exact"]["bytes"]
    assert found["4-bit+statistics"]["bytes"] == found["4-bit"]["bytes"]  # the weights stay what was looked at with
    assert same(net.state_dict(), source)
    fewer = stored_ways(net, tmp_path / "a.safetensors", dark, labels, ["1-bit"], size=30, samples=1, views=())
    assert fewer["1-bit"]["kl"] > 0


def test_statistics_are_taken_again_from_all_images_alike() -> None:
    model = undrift.perturb(network(), train="*", norm_statistics="train", test_samples=0)
    look_again(model, images(5), 30)
    first = model.net[1]
    inputs = nn.functional.conv2d(images(5), model.net[0].weight, model.net[0].bias)
    torch.testing.assert_close(first.running_mean, inputs.mean((0, 2, 3)))
    assert [policy.statistics for policy in model.norms] == ["train", "train"]
