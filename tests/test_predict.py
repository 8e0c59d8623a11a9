"""Predictions: the average of draws, how far they disagree, and nothing of the network's changed by it."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images, same, snapshot
from undrift import Prediction, predict, temperature


class Scripted(nn.Module):
    """Returns given logits, one after the other."""

    def __init__(self, *answers: Tensor) -> None:
        super().__init__()
        self.layer, self.answers, self.calls = nn.Linear(1, 1), answers, 0

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x[:, :1])
        self.calls += 1
        return self.answers[(self.calls - 1) % len(self.answers)].expand(len(x), -1)


def test_probabilities_entropy_and_mutual_information_by_hand() -> None:
    # Two draws, (3/4, 1/4) and (1/4, 3/4): their mean knows nothing, each of them something.
    net = Scripted(torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, math.log(3)]]))
    p = predict(undrift.perturb(net), torch.zeros(3, 1), samples=2, fold_limit=0)
    each = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(p.probs, torch.full((3, 2), 0.5))
    torch.testing.assert_close(p.entropy, torch.full((3,), math.log(2)))
    torch.testing.assert_close(p.mutual_info, torch.full((3,), math.log(2) - each))
    one = predict(undrift.perturb(Scripted(torch.tensor([[math.log(3), 0.0]]))), torch.zeros(3, 1), samples=1)
    assert torch.equal(one.mutual_info, torch.zeros(3))
    assert one.label.tolist() == [0, 0, 0]


def test_temperature_divides_the_logits_of_each_draw() -> None:
    net = Scripted(torch.tensor([[math.log(9), 0.0]]))
    p = predict(net, torch.zeros(1, 1), temperature=2.0)
    torch.testing.assert_close(p.probs, torch.tensor([[0.75, 0.25]]))


def test_ten_samples_by_default_and_as_many_as_the_options_say() -> None:
    for options, samples, calls in (({}, None, 10), ({"test_samples": 3}, None, 3), ({}, 4, 4), ({}, 0, 1)):
        net = Scripted(torch.zeros(1, 2))
        predict(undrift.perturb(net, **options), torch.zeros(2, 1), samples, fold_limit=0)
        assert net.calls == calls


def test_zero_samples_is_the_mean_network_and_a_plain_network_is_itself() -> None:
    net = convnet().eval()
    plain = predict(net, images(), samples=7)
    torch.testing.assert_close(plain.probs, net(images()).softmax(1), rtol=0, atol=0)
    model = undrift.perturb(net, norm_statistics="source")
    mean = predict(model, images(), samples=0)
    assert torch.equal(mean.probs, plain.probs)
    assert torch.equal(mean.mutual_info, torch.zeros(6))
    assert torch.equal(predict(model, images(), samples=0).probs, mean.probs)


def test_a_generator_repeats_the_noise_and_leaves_the_networks_own_alone() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.1, norm_statistics="source")
    model.reseed(5)
    model(images())
    before = (model.key.seed.clone(), model.key.step.clone())
    a = predict(model, images(), generator=torch.Generator().manual_seed(1))
    b = predict(model, images(), generator=torch.Generator().manual_seed(1))
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.mutual_info, b.mutual_info)
    assert not torch.equal(a.probs, predict(model, images(), generator=2).probs)
    predict(model, images(), samples=0)
    assert (model.key.seed, model.key.step) == before
    # The next draw is the one that would have come without these predictions.
    model.eval()
    following = model(images())
    twin_step = model.key.step.clone()
    model.key.step.copy_(before[1])
    assert torch.equal(following, model(images()))
    assert torch.equal(model.key.step, twin_step)
    assert not torch.equal(predict(model, images()).probs, predict(model, images()).probs)


@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
def test_nothing_of_the_networks_is_changed(statistics: str) -> None:
    net = convnet().train()
    net.append(nn.Dropout(0.5))
    net[1].eval()
    model = undrift.perturb(net, norm_statistics=statistics)
    flags = [m.training for m in model.modules()]
    before = snapshot(model.net)
    a = predict(model, images(), generator=3)
    assert not a.probs.requires_grad
    assert [m.training for m in model.modules()] == flags
    assert same(model.net.state_dict(), before)
    assert not model.key.replay.forwards
    assert torch.equal(a.probs, predict(model.eval(), images(), generator=3).probs)  # dropout took no part


def test_loaders_tensors_and_parts_of_tensors() -> None:
    model = undrift.perturb(convnet(), norm_statistics="source")
    x = images(7)
    loader = [(x[:4], "labels"), {"pixel_values": x[4:]}]
    a = predict(model, loader, 3, generator=0)
    b = predict(model, x, 3, generator=0, batch_size=4)
    assert len(a) == len(b) == 7
    assert torch.equal(a.probs, b.probs)
    # Noise belongs to a row of a pass, so one batch of seven is another draw, of the same distribution.
    torch.testing.assert_close(predict(model, x, 0).probs, predict(model, x, 0, batch_size=2).probs)
    assert len(predict(model, x[:0] + 1)) == 0


def test_only_one_draw_is_held_at_a_time() -> None:
    kept: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.alive = nn.Linear(1, 2), []

        def forward(self, x: Tensor) -> Tensor:
            import weakref

            kept.append(sum(ref() is not None for ref in self.alive))
            out = self.layer(x)
            out = out + 0
            self.alive.append(weakref.ref(out))
            return out

    predict(undrift.perturb(Watched()), torch.zeros(2, 1), samples=20, fold_limit=0)
    assert max(kept) <= 1


def test_images_that_are_not_finite_have_no_answer_and_do_no_harm() -> None:
    model = undrift.perturb(convnet(), norm_statistics="batch")
    x = images(6)
    x[1, 0, 0, 0], x[4] = float("nan"), float("inf")
    p = predict(model, x, 0)
    assert p.label[[1, 4]].tolist() == [-1, -1]
    torch.testing.assert_close(p.probs[[1, 4]], torch.full((2, 5), 0.2))
    torch.testing.assert_close(p.entropy[[1, 4]], torch.full((2,), math.log(5)))
    sound = [0, 2, 3, 5]
    assert torch.equal(p.probs[sound], predict(model, x[sound], 0).probs)  # the others' batch statistics are theirs
    nothing = predict(model, x[[1, 4]])
    assert nothing.label.tolist() == [-1, -1]
    assert nothing.probs.shape == (2, 5)
    unsound = Prediction.of(torch.tensor([[0.5, 0.5], [float("nan"), 0.5]]))
    assert unsound.label.tolist() == [0, -1]
    assert unsound.certain(0.5).tolist() == [True, False]


def test_a_prediction_can_be_joined_moved_and_abstained_on() -> None:
    parts = [Prediction.of(torch.tensor([[0.9, 0.1]])), Prediction.of(torch.tensor([[0.4, 0.6], [0.2, 0.8]]))]
    p = Prediction.cat(parts).cpu()
    assert len(p) == 3
    assert p.label.tolist() == [0, 1, 1]
    assert p.certain(0.8).tolist() == [True, False, True]
    with pytest.raises(AttributeError):
        p.label = p.label  # type: ignore[misc]
    with pytest.raises(undrift.DataError, match="no prediction"):
        predict(convnet(), [])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"samples": -1}, "samples=-1"),
        ({"samples": 2.5}, "samples=2.5"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"mode": "quick"}, "mode='quick'"),
        ({"fold_limit": -1}, "fold_limit=-1"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], what: str) -> None:
    with pytest.raises(undrift.OptionError, match=what):
        predict(undrift.perturb(convnet()), images(), **settings)  # type: ignore[arg-type]


def test_wrong_images_and_networks_are_named() -> None:
    with pytest.raises(undrift.OptionError, match="batch_size is for a tensor"):
        predict(convnet(), [images()], batch_size=2)
    with pytest.raises(undrift.DataError, match="images is a str"):
        predict(convnet(), "photos/")  # type: ignore[arg-type]
    with pytest.raises(undrift.OutputError, match="3 rows of logits for 6 images"):
        predict(nn.Sequential(convnet(), nn.Unflatten(0, (3, 2)), nn.Flatten(1)), images())
    with pytest.raises(undrift.OutputError, match="Pool tokens"):
        predict(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(2)), images())


def test_an_error_inside_a_norm_layer_leaves_no_flag_behind() -> None:
    net = convnet().eval()
    model = undrift.perturb(net, norm_statistics="batch")
    with model.off():
        expected = net(images())
    net[1]._check_input_dim = lambda x: 1 / 0  # type: ignore[method-assign]
    for call in (lambda: predict(model, images()), lambda: model(images())):
        with pytest.raises(ZeroDivisionError):
            call()
    del net[1]._check_input_dim
    with model.off():
        assert torch.equal(net(images()), expected)
    assert net[1].track_running_stats
    assert not net[1].training


def test_the_temperature_is_found_without_labels() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 5.0]])
    model = undrift.perturb(net)
    step = model.key.step.clone()
    # The augmentation flips the last image's class: agreement 3/4.
    t = temperature(model, x, augment=lambda v: torch.where(v[:, 1:] > 1, -v, v))
    assert t == pytest.approx(2 / math.log(3), rel=1e-4)
    assert torch.equal(model.key.step, step)
    with pytest.warns(undrift.UndriftWarning, match="100%"):
        assert temperature(model, [x[:2], x[2:]], augment=lambda v: v) == pytest.approx(0.05)
    with pytest.warns(undrift.UndriftWarning, match="nearest"):
        assert temperature(model, images(4, 1).mean(1, keepdim=True)[:, :, :1, :2]) > 0
    with pytest.raises(undrift.DataError, match="augment="):
        temperature(model, x)
    with pytest.raises(undrift.DataError, match=r"no finite image.*a few hundred are needed.*Check the loader"):
        temperature(model, x + float("nan"), augment=lambda v: v)


def test_an_image_without_finite_logits_has_no_say_in_the_temperature() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 5.0]])

    def overflows(where: float) -> nn.Module:
        hooked = copy.deepcopy(net)
        hooked.register_forward_hook(lambda _m, args, out: torch.where(args[0][:, 1:] == where, torch.nan, out))
        return hooked

    def change(v: Tensor) -> Tensor:
        return torch.where(v[:, 1:] == 5, -v, v)

    expected = temperature(net, x, augment=change)
    assert temperature(overflows(7.0), torch.cat([x, torch.tensor([[1.0, 7.0]])]), augment=change) == expected
    with pytest.raises(undrift.DataError, match="no finite image with finite logits"):
        temperature(overflows(7.0), torch.tensor([[1.0, 7.0]]), augment=change)
    with pytest.raises(undrift.DataError, match=r"made 3 images of 4; needed: a copy of each"):
        temperature(net, x, augment=lambda v: v[:3])
    with pytest.warns(undrift.UndriftWarning, match="100%") as found:
        temperature(net, x, augment=lambda v: v)
    assert found[0].filename == __file__


@pytest.mark.filterwarnings("ignore:.*temperature:undrift.UndriftWarning")
def test_the_default_augmentation_by_hand() -> None:
    seen: list[Tensor] = []
    small, large = (nn.Sequential(nn.Flatten(), nn.Linear(n, 2)) for n in (4, 3 * 32 * 48))
    for net in (small, large):
        net.register_forward_pre_hook(lambda _net, args: seen.append(args[0]))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    # Mirrored: (2 1; 4 3). Moved right and down by one, edges repeated: the first row and column twice.
    temperature(small, x)
    assert torch.equal(seen[1], torch.tensor([[2.0, 2.0], [2.0, 2.0]])[None, None])
    big = torch.rand(1, 3, 32, 48)
    temperature(large, big)
    assert seen[3].shape == big.shape
    assert torch.equal(seen[3][..., 2:, 3:], big.flip(3)[..., :-2, :-3])


def test_each_pass_of_a_temperature_has_noise_of_its_own() -> None:
    model = undrift.perturb(convnet().eval(), init_fraction=0.3)
    model(images(12))  # from here on kept statistics are those of a noisy pass
    before, steps = int(model.key.step), list[int]()
    model.net[0].register_forward_hook(lambda *_: steps.append(int(model.key.step)))
    temperature(model, [images(6), images(6, seed=1)], augment=lambda x: x)
    assert steps == [before + 1, before + 2, before + 3, before + 4]
    assert int(model.key.step) == before


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_a_compiled_or_parallel_network_has_its_draws(wrap: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.rand(6, 3, 8, 8)
    model = undrift.perturb(convnet(), init_fraction=0.3)
    wanted = predict(model, x, 5, generator=0)
    assert float(wanted.mutual_info.max()) > 0
    assert torch.equal(predict(wrap(model), x, 5, generator=0).probs, wanted.probs)
    labelled = [(x, torch.zeros(6, dtype=torch.long))]
    reports = [undrift.evaluate(m, labelled, samples=5, generator=0) for m in (model, wrap(model))]
    assert reports[0].results[0].scores == reports[1].results[0].scores
    assert reports[1].about["samples"] == 5
    with pytest.warns(undrift.UndriftWarning, match="nearest"):  # an untrained network always says the same
        assert temperature(wrap(model), x) == temperature(model, x)


def test_the_network_inside_and_what_holds_a_perturbed_one_are_refused() -> None:
    x, net = torch.rand(4, 3, 8, 8), convnet()
    model = undrift.perturb(net)
    for given in (net, nn.Sequential(model), torch.compile(net, backend="eager")):
        with pytest.raises(undrift.UndriftError, match=r"what undrift\.perturb returned"):
            predict(given, x)
        with pytest.raises(undrift.UndriftError, match=r"model\.off"):
            undrift.evaluate(given, [(x, torch.zeros(4, dtype=torch.long))])
        with pytest.raises(undrift.UndriftError, match=r"model\.off"):
            undrift.temperature(given, x)
    with model.off() as plain:
        source = predict(plain, x)
    model.remove()
    assert torch.equal(predict(net, x).probs, source.probs)
