"""The mode "fast": few passes, and answers near those of many draws."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import undrift
from faults import bound_by_launches
from support import convnet, images
from undrift import predict
from waiting_support import reads


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    with bound_by_launches():
        yield


def classifier(classes: int = 6) -> tuple[nn.Module, Tensor]:
    """Return a random network that is sure of most images, with its images."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, classes))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5))
        net[3].weight.mul_(4)
    return net, torch.randn(400, 1, 4, 5, generator=generator)


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(1)


def sharpness(probs: Tensor) -> float:
    return float(probs.square().sum(1).mean())


def nll_of_draws(probs: Tensor, truth: Tensor) -> float:
    """Return the negative log-likelihood where labels are as likely as the true average of draws says."""
    return float(-(truth * probs.log()).sum(1).mean())


def test_two_draws_and_a_third_of_a_part_in_as_few_passes_as_they_allow() -> None:
    rows: list[int] = []
    net = convnet()
    net.register_forward_hook(lambda _m, args, _out: rows.append(len(args[0])))
    for changes, limit, expected in (
        ({"norm_statistics": "source"}, None, [17]),
        ({"norm_statistics": "source"}, 9, [7, 7, 3]),
        # A network that mixes the images of a pass is never shown a part of them.
        ({"norm_statistics": "source"}, 0, [7, 7, 7]),
        ({"norm_statistics": "batch"}, None, [7, 7, 7]),
        ({"estimator": "drawn"}, None, [7, 7, 7]),
    ):
        model = undrift.perturb(net, **changes)
        for samples in (4, 10):
            rows.clear()
            predict(model, images(7), samples, mode="fast", fold_limit=limit)
            assert rows == expected
        model.remove()


@pytest.mark.parametrize("samples", [0, 1])
def test_no_draw_and_one_draw_are_what_they_are_in_full(samples: int) -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    fast, full = (predict(model, x, samples, generator=3, mode=mode) for mode in ("fast", "full"))
    assert torch.equal(fast.probs, full.probs)
    assert torch.equal(fast.mutual_info, full.mutual_info)


def test_without_noise_it_is_the_mean_network() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.0)
    p = predict(model, x, mode="fast")
    mean = predict(model, x, 0)
    torch.testing.assert_close(p.probs, mean.probs)
    torch.testing.assert_close(p.mutual_info, torch.zeros(400), atol=1e-6, rtol=0)


def test_it_is_near_the_average_of_many_draws() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.04)
    truth, three, mean = (predict(model, x, n, generator=1) for n in (300, 3, 0))
    calls = [predict(model, x, 10, generator=seed, mode="fast") for seed in range(16)]

    def gap(p: undrift.Prediction) -> float:
        return nll_of_draws(p.probs, truth.probs) - nll_of_draws(truth.probs, truth.probs)

    # As unsure as ten draws are, and nearer to the truth than three.
    ten = sum(sharpness(predict(model, x, 10, generator=seed).probs) for seed in range(4)) / 4
    assert sum(sharpness(p.probs) for p in calls) / 16 == pytest.approx(ten, abs=0.02)
    assert sharpness(mean.probs) > sharpness(truth.probs) + 0.08
    assert sum(gap(p) for p in calls) / 16 < gap(three)
    assert all((p.label == truth.label).float().mean() > 0.8 for p in calls)
    # Mutual information still finds the images that draws disagree on.
    assert all(torch.corrcoef(torch.stack([p.mutual_info, truth.mutual_info]))[0, 1] > 0.5 for p in calls)
    assert all(bool((p.mutual_info >= 0).all()) for p in calls)


def test_seeds_repeat_it() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    a, b = (predict(model, x, generator=7, mode="fast", batch_size=90) for _ in range(2))
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.mutual_info, b.mutual_info)
    assert not torch.equal(a.probs, predict(model, x, generator=8, mode="fast").probs)


def test_one_temperature_serves_all_images_of_a_call() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    ten = sum(sharpness(predict(model, x, 10, generator=seed).probs) for seed in range(4)) / 4
    small = [sharpness(predict(model, x, mode="fast", batch_size=4, generator=seed).probs) for seed in range(12)]
    assert sum(small) / 12 == pytest.approx(ten, abs=0.015)  # one call scatters by 0.018


def test_more_samples_stand_for_a_less_sure_answer() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    found = [sharpness(predict(model, x, n, generator=1, mode="fast").probs) for n in (3, 5, 100)]
    assert found[0] > found[1] + 0.01 > found[2] + 0.02


def test_the_third_draw_of_a_part_changes_only_that_part() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    seen: list[tuple[Tensor, Tensor]] = []
    net.register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    p = predict(model, x, generator=1, mode="fast", fold_limit=2000)
    ((given, out),) = seen  # one pass
    assert torch.equal(given[:800], x.repeat(2, 1, 1, 1))
    logs = out.log_softmax(1)
    two, third = logs[:800].unflatten(0, (2, 400)), logs[800:]
    where = (x[:, None] == given[None, 800:]).flatten(2).all(2)
    chosen = where.any(1)
    assert int(chosen.sum()) == len(third) == 160
    # Each of these has its own third draw, and not its neighbour's; the others have two.
    three = torch.cat([two[:, chosen], third[where[chosen].float().argmax(1)][None]])
    logits, inner = two.mean(0), entropy(two.exp().flatten(0, 1)).view(2, -1).mean(0)
    logits[chosen], inner[chosen] = three.mean(0), entropy(three.exp().flatten(0, 1)).view(3, -1).mean(0)
    heat = (logits[0, 0] - logits[0, 1]) / (p.probs[0, 0] / p.probs[0, 1]).log()
    torch.testing.assert_close(p.probs, (logits / heat).softmax(1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(p.mutual_info, (entropy(p.probs) - inner).clamp_min(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("limit", [None, 250])
def test_a_small_batch_on_a_gpu_gets_all_its_draws(limit: int | None) -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    settings = {"generator": 5, "temperature": 1.3, "fold_limit": limit}
    full = predict(model, x[:25], 10, **settings)
    assert not torch.equal(predict(model, x[:25], 10, mode="fast", **settings).probs, full.probs)  # on a CPU
    with bound_by_launches():
        fast = predict(model, x[:25], 10, mode="fast", **settings)
    for name in ("probs", "label", "entropy", "mutual_info"):
        assert torch.equal(getattr(fast, name), getattr(full, name)), name
    # A call of small batches, and a bad image, which is left out in both.
    x = x.clone()
    x[3] = float("nan")
    with bound_by_launches():
        full, fast = (predict(model, x, 10, batch_size=20, mode=mode, **settings) for mode in ("full", "fast"))
    assert torch.equal(fast.probs, full.probs)
    assert fast.label[3] == -1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_batch_that_is_no_single_small_pass_gets_few_draws() -> None:
    rows: list[int] = []
    net = convnet()
    net.register_forward_hook(lambda _m, args, _out: rows.append(len(args[0])))
    for changes, count, limit, expected in (
        ({"norm_statistics": "source"}, 25, 1000, [250]),
        ({"norm_statistics": "source"}, 26, 1000, [62]),
        ({"norm_statistics": "source"}, 25, 249, [60]),
        ({"norm_statistics": "source"}, 7, 0, [7, 7, 7]),
        ({"norm_statistics": "batch"}, 7, None, [7, 7, 7]),
    ):
        model = undrift.perturb(net, **changes)
        rows.clear()
        predict(model, images(count), 10, mode="fast", fold_limit=limit)
        assert rows == expected
        model.remove()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_short_last_batch_of_a_loader_stands_beside_the_others() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:210], torch.zeros(210)), batch_size=100)
    p = predict(model, loader, 10, generator=1, mode="fast")
    first = predict(model, [x[:100], x[100:200]], 10, generator=1, mode="fast")
    assert torch.equal(p.probs[:200], first.probs)  # the last ten have no say in the temperature
    # They are the ten draws that the noise comes to after those of the others.
    assert len(p) == 210
    model.reseed(1)
    predict(model, [x[:100], x[100:200]], mode="fast")
    assert torch.equal(p.probs[200:], predict(model, x[200:210], 10).probs)


def test_mutual_information_is_that_of_the_draws_an_image_has() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    outputs: list[Tensor] = []
    net.register_forward_hook(lambda _m, args, out: outputs.append(out.softmax(1)))
    p = predict(model, x[:1], generator=1, mode="fast")
    inner = entropy(torch.cat(outputs)).mean()
    assert len(torch.cat(outputs)) == 3
    assert float(p.mutual_info) == pytest.approx(max(0.0, float(p.entropy - inner)), abs=1e-6)


def test_rows_without_an_answer_spoil_nothing() -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    x = x.clone()
    x[3] = float("nan")
    p = predict(model, x, generator=1, mode="fast", batch_size=100)
    assert p.label[3] == -1
    assert int((p.label < 0).sum()) == 1
    assert predict(model, x[3:4], mode="fast").label.tolist() == [-1]
    assert len(predict(model, x[:0], mode="fast")) == 0
    with pytest.raises(undrift.DataError, match="no prediction"):
        predict(model, [], mode="fast")


def test_the_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = classifier()
    model = undrift.perturb(net, init_fraction=0.2)
    counts = []
    for mode in ("fast", "full"):
        with reads(monkeypatch) as seen:
            predict(model, [x[:90], x[90:]], 10, mode=mode, fold_limit=1000)  # type: ignore[arg-type]
        counts.append(seen.total)
        assert not [what for what in seen.found if "fast_mode.py" in what]
    assert counts[0] <= counts[1]


def test_a_plain_network_gives_its_one_answer() -> None:
    net, x = classifier()
    assert torch.equal(predict(net, x, mode="fast").probs, predict(net, x).probs)
