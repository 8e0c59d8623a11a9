"""Networks that answer each pixel, or any number of labels per image: the same verbs, one answer per position."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

import undrift
from undrift.likelihood import Teacher

CLASSES = 3


class Segmenter(nn.Module):
    """A small network with a class per pixel; `stride` makes its map smaller, `wrap` is how it returns it."""

    def __init__(
        self, stride: int = 1, wrap: Callable[[Tensor], Any] = lambda logits: logits, norm: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, stride, 1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)
        self.wrap = wrap

    def forward(self, images: Tensor) -> Any:
        return self.wrap(self.head(self.norm(self.stem(images)).relu()))


def images(count: int = 4, side: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"out": x, "aux": 2 * x}, lambda x: (x,)])
def test_each_pixel_has_an_answer(wrap: Callable[[Tensor], Any]) -> None:
    model = undrift.perturb(Segmenter(wrap=wrap), init_fraction=0.1)
    p = undrift.predict(model, images(), samples=4, generator=0)
    assert p.probs.shape == (4, CLASSES, 16, 16)
    assert p.label.shape == p.entropy.shape == p.mutual_info.shape == (4, 16, 16)
    assert torch.allclose(p.probs.sum(1), torch.ones(4, 16, 16))
    assert bool((p.mutual_info > 0).any())
    assert p.certain(0.5).shape == (4, 16, 16)
    assert len(p) == 4


def test_a_smaller_map_is_brought_to_the_images_size() -> None:
    net = Segmenter(stride=4).eval()
    p = undrift.predict(net, images())
    expected = nn.functional.interpolate(net(images()), (16, 16), mode="bilinear").softmax(1)
    assert torch.equal(p.probs, expected)


def test_an_image_with_nan_has_no_answer_and_the_others_theirs() -> None:
    net, bad = Segmenter().eval(), images()
    bad[1, 0, 3, 3] = math.nan
    p, whole = undrift.predict(net, bad), undrift.predict(net, images())
    assert bool((p.label[1] == -1).all())
    assert torch.allclose(p.probs[1], torch.full((CLASSES, 16, 16), 1 / CLASSES))
    assert torch.equal(p.probs[[0, 2, 3]], whole.probs[[0, 2, 3]])


def test_views_come_back_to_the_pixels_they_came_from() -> None:
    # A network that looks at one pixel at a time commutes with mirroring: the mean over both views is its own answer.
    net = nn.Sequential(nn.Conv2d(3, CLASSES, 1)).eval()
    assert torch.allclose(undrift.predict(net, images(), views="mirror").probs, undrift.predict(net, images()).probs)
    shifted = undrift.predict(net, images(), views="shift").probs
    assert torch.allclose(shifted[..., 1:-1, 1:-1], undrift.predict(net, images()).probs[..., 1:-1, 1:-1], atol=1e-6)


def test_tiles_answer_as_the_whole_image_does_where_the_network_is_local() -> None:
    net = nn.Sequential(nn.Conv2d(3, CLASSES, 1)).eval()
    big = images(side=37)
    p, whole = undrift.predict(net, big, tile=16), undrift.predict(net, big)
    assert torch.allclose(p.probs, whole.probs, atol=1e-6)
    assert torch.equal(p.label, whole.label)
    model = undrift.perturb(net, init_fraction=0.1)
    assert bool((undrift.predict(model, big, samples=3, tile=16).mutual_info > 0).any())


def test_tiles_bound_what_the_network_sees() -> None:
    seen = []
    net = nn.Sequential(nn.Conv2d(3, CLASSES, 3, padding=1)).eval()
    net.register_forward_hook(lambda module, given, out: seen.append(out.shape[-2:]))
    undrift.predict(net, images(side=40), tile=16)
    assert set(seen) == {(16, 16)}
    rows = []
    model = undrift.perturb(net, init_fraction=0.1)
    net.register_forward_hook(lambda module, given, out: rows.append(len(out)))
    undrift.predict(model, images(2, side=40), tile=16, samples=4)
    assert set(rows) == {2}  # one draw at a time


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("likelihood", [undrift.entropy, undrift.Information(), undrift.Consistency(1.0)])
def test_adapt_moves_a_network_with_a_class_per_pixel(likelihood: Any, norm: bool) -> None:
    model = undrift.perturb(Segmenter(norm=norm), init_fraction=0.1)
    before = model.net.norm.weight.detach().clone()  # type: ignore[union-attr]
    history = undrift.adapt(model, images(8), likelihood, epochs=2, batch_size=4)
    assert len(history.steps) == 4
    assert not torch.equal(before, model.net.norm.weight)  # type: ignore[arg-type, union-attr]
    assert history.verdict is not None


@pytest.mark.parametrize("how", [{"stride": 4}, {"outputs": "sigmoid"}])
def test_a_run_is_compared_with_the_source_position_by_position(how: Any) -> None:
    net = tagger() if "outputs" in how else Segmenter(**how)
    options = {"init_fraction": 0.0, "adapt_lr": 0.0, "norm_statistics": "source", **(how if "outputs" in how else {})}
    history = undrift.adapt(undrift.perturb(net, **options), images(8), undrift.entropy, epochs=1, batch_size=4)
    verdict = history.verdict
    assert verdict is not None
    assert verdict.agreement == 1
    assert verdict.after.entropy == pytest.approx(verdict.before.entropy, rel=1e-3)


def test_information_of_pixels_is_that_of_as_many_rows() -> None:
    logits = torch.randn(2, CLASSES, 4, 5, generator=torch.Generator().manual_seed(0))
    rows = logits.permute(0, 2, 3, 1).reshape(-1, CLASSES)
    for ask in (undrift.entropy, undrift.Information()):
        assert torch.allclose(ask(logits), ask(rows))  # type: ignore[operator]


def test_the_default_stream_answers_each_pixel() -> None:
    net = Segmenter(stride=2, wrap=lambda x: {"out": x})
    stream = undrift.stream(net, [images(seed=s) for s in range(3)], generator=torch.Generator().manual_seed(0))
    answers = [p.label.shape for p in stream]
    assert answers == [(4, 16, 16)] * 3
    assert stream.report.steps == 3
    assert 0 <= stream.latest["balance"] <= 1


@pytest.mark.parametrize("method", ["tent", "cotta", "vmp", "undrift-light", "norm-stats"])
def test_streams_of_named_methods_answer_each_pixel(method: str) -> None:
    stream = undrift.stream(Segmenter(stride=2), [images(seed=s) for s in range(2)], method=method)
    assert [p.label.shape for p in stream] == [(4, 16, 16)] * 2
    assert stream.report.steps == (0 if method == "norm-stats" else 2)


@pytest.mark.filterwarnings("ignore::undrift.UndriftWarning")  # of methods whose source has to be trained for them
@pytest.mark.parametrize("kind", ["pixels", "labels"])
@pytest.mark.parametrize("verb", ["adapt", "stream"])
def test_every_method_takes_part_or_says_why_not(verb: str, kind: str) -> None:
    taken = set()
    for name in undrift.methods.names(verb):
        net, settings = (Segmenter(), {}) if kind == "pixels" else (pooled_tagger(), {"outputs": "sigmoid"})
        try:
            if verb == "adapt":
                undrift.adapt(net, images(8), method=name, epochs=1, batch_size=4, **settings)
            else:
                assert len(list(undrift.stream(net, images(8).split(4), method=name, **settings))) == 2
        except undrift.OptionError:
            continue
        taken.add(name)
    simple = {"source", "norm-stats", "tent", "tent-ft", "bbb", "vmp", "undrift", "undrift-light"}
    assert taken == (simple if verb == "adapt" else {*simple, "cotta"})


@pytest.mark.parametrize("method", ["shot", "nrc"])
def test_methods_of_whole_images_refuse_pixels(method: str) -> None:
    with pytest.raises(undrift.OptionError, match="a class per pixel"):
        undrift.adapt(Segmenter(), images(8), method=method, features="stem", batch_size=4)
    with pytest.raises(undrift.OptionError, match="a class per pixel"):
        next(undrift.stream(Segmenter(), [images()], method="roid"))


# The default over epochs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: Segmenter(stride=2, wrap=lambda x: {"out": x}), {}),
        (lambda: pooled_tagger(), {"outputs": "sigmoid"}),
    ],
)
def test_the_default_adapts_and_comes_back_from_a_file(make: Any, given: Any, tmp_path: Any) -> None:
    net = make()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    history = undrift.adapt(net, images(72), epochs=1, generator=torch.Generator().manual_seed(0), **given)
    model = history.model
    assert model is not None
    assert any(not torch.equal(before[name], p) for name, p in model.net.named_parameters() if name in before)
    assert "lowered the entropy" in str(history)
    assert "lowered the entropy" in str(undrift.History.load(_saved(history, tmp_path)))
    assert history.verdict is not None
    told = undrift.predict(model, images(), generator=1)
    undrift.save(model, tmp_path / "b.safetensors")
    again = undrift.load(make(), tmp_path / "b.safetensors")
    torch.testing.assert_close(undrift.predict(again, images(), generator=1).probs, told.probs)
    with again.off() as source:
        expected = make().eval()(images())
        found = source.eval()(images())
    assert torch.equal(*(x["out"] if isinstance(x, dict) else x for x in (found, expected)))


def _saved(history: undrift.History, folder: Any) -> Any:
    history.save(folder / "history.json")
    return folder / "history.json"


@pytest.mark.parametrize("form", ["loader", "data set", "batches"])
def test_the_default_finds_pixels_in_whatever_gives_images(form: str) -> None:
    data = torch.utils.data.TensorDataset(images(12))
    given: Any = {
        "loader": torch.utils.data.DataLoader(data, 4),
        "data set": data,
        "batches": list(images(12).split(4)),
    }[form]
    history = undrift.adapt(Segmenter(), given, epochs=1)
    assert len(history.steps) == (1 if form == "data set" else 3)


@pytest.mark.parametrize("teacher", [False, True])
def test_a_run_over_epochs_goes_on_where_it_was_stopped(teacher: bool, tmp_path: Any) -> None:
    class Stop(Exception):
        pass

    class Breaking(torch.utils.data.Dataset[Tensor]):
        left = 10**9

        def __len__(self) -> int:
            return 12

        def __getitem__(self, place: int) -> Tensor:
            Breaking.left -= 1
            if Breaking.left < 0:
                raise Stop
            return images(12)[place]

    def run(left: int, path: Any) -> Any:
        Breaking.left = left
        torch.manual_seed(0)
        order = torch.Generator().manual_seed(0)
        settings: Any = {"epochs": 2, "batch_size": 4, "generator": order}
        settings |= {"checkpoint": path, "checkpoint_steps": 1}
        if teacher:  # whose state has dicts in it
            return undrift.adapt(undrift.perturb(Segmenter()), Breaking(), Teacher(seed=1), **settings)
        return undrift.adapt(Segmenter(), Breaking(), **settings)

    whole = run(10**9, tmp_path / "one")
    used = 10**9 - Breaking.left
    with pytest.raises(undrift.DataError, match="Stop"):
        run(used // 2, tmp_path / "two")
    resumed = run(10**9, tmp_path / "two")
    assert [row.loss for row in resumed.steps] == [row.loss for row in whole.steps]
    one, other = (undrift.predict(h.model, images(), generator=0).probs for h in (whole, resumed))
    assert torch.equal(one, other)


def test_settings_of_neighbours_are_refused_for_pixels() -> None:
    with pytest.raises(undrift.OptionError, match=r"undrift has no setting 'neighbours'"):
        undrift.adapt(Segmenter(), images(8), neighbours=3)


class Lamps(nn.Module):
    """Dark pixels are background, bright ones class 1; with `sided`, class 2 in the right half."""

    def __init__(self, sided: bool) -> None:
        super().__init__()
        self.sided = sided
        self.head = nn.Conv2d(2, CLASSES, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[-4.0, 0.0], [4.0, -4.0], [4.0, 4.0]])[..., None, None])
            self.head.bias.copy_(torch.tensor([2.0, -2.0, -2.0]))

    def forward(self, x: Tensor) -> Tensor:
        side = torch.linspace(-1, 1, x.shape[-1]).sign() if self.sided else -torch.ones(x.shape[-1])
        bright = x[:, :1]
        logits: Tensor = self.head(torch.cat([bright, side.expand_as(bright)], 1))
        return logits


@pytest.mark.parametrize("sided", [False, True])
def test_views_have_to_keep_the_labels_of_rare_classes_too(sided: bool) -> None:
    random = torch.Generator().manual_seed(0)
    dark = 0.02 * torch.rand(72, 1, 32, 32, generator=random)
    for image in dark:
        top, left = torch.randint(28, (2,), generator=random).tolist()
        image[0, top : top + 4, left : left + 4] += 0.9  # 2 % of the pixels
    history = undrift.adapt(Lamps(sided), dark, epochs=1, adapt_lr=0.0)
    assert history.views is not None
    assert ("mirror" in history.views) is not sided
    verdict = undrift.adapt(Lamps(sided), dark, method="source").verdict
    assert verdict is not None
    assert verdict.helping is not None
    assert verdict.helping.views == (2 if sided else 4)  # with the shift


def test_cotta_says_that_a_network_of_one_size_is_not_for_it() -> None:
    class Fixed(Segmenter):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x + torch.zeros(16, 16))  # as position embeddings are added

    for net, settings in ((Fixed(), {}), (tagger(), {"outputs": "sigmoid"})):
        with pytest.raises(undrift.OutputError, match=r"failed on images of 8×8 .*CoTTA looks at images at seven"):
            next(undrift.stream(net, [images()], method="cotta", **settings))


def test_fast_answers_and_temperature_are_of_whole_images() -> None:
    model = undrift.perturb(Segmenter())
    with pytest.raises(undrift.OutputError, match="each pixel"):
        undrift.predict(model, images(), mode="fast")
    with pytest.raises(undrift.OutputError, match="each pixel"):
        undrift.temperature(model, images())


def test_scores_count_pixels_and_leave_void_out() -> None:
    net = nn.Sequential(nn.Conv2d(3, CLASSES, 1)).eval()
    truth = undrift.predict(net, images()).label
    report = undrift.evaluate(net, [(images(), truth)])
    assert report.results[0].scores.accuracy == 1 == report.results[0].scores.miou
    assert "mIoU" in str(report)
    wrong = torch.where(truth == 0, 1, truth)
    wrong[0] = 255
    scores = undrift.evaluate(net, [(images(), wrong)]).results[0].scores
    told, known = truth[1:], wrong[1:]
    ious = [((told == c) & (known == c)).sum() / ((told == c) | (known == c)).sum() for c in told.unique().tolist()]
    assert scores.miou == pytest.approx(float(torch.stack(ious).mean()), abs=1e-6)
    assert scores.count == known.numel()
    assert scores.accuracy == pytest.approx(float((told == known).float().mean()))
    probs = undrift.predict(net, images()).probs[1:].movedim(1, -1).flatten(0, -2)
    ece = multiclass_calibration_error(probs, known.flatten(), CLASSES, n_bins=15)
    assert scores.ece == pytest.approx(float(ece), abs=1e-6)


def test_label_255_is_a_class_of_a_network_that_has_it() -> None:
    net = nn.Sequential(nn.Conv2d(3, 300, 1)).eval()
    truth = torch.full((4, 16, 16), 255)
    scores = undrift.evaluate(net, [(images(), truth)]).results[0].scores
    assert scores.count == truth.numel()
    with pytest.raises(undrift.DataError, match="no images were scored"):
        undrift.evaluate(Segmenter(), [(images(), truth)])


def test_a_sample_of_pixels_is_of_the_whole_map() -> None:
    # 128 × 128 are four times as many pixels as scores look at, and 4 divides 128: every fourth would be a few columns.
    logits = torch.zeros(64, 2, 128, 128)
    logits[:, 1, :, 1:] = 9.0
    logits[:, 1, :, ::4] = -9.0
    net = nn.Sequential(nn.Conv2d(2, 2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2)[..., None, None])
        net[0].bias.zero_()
    scores = undrift.evaluate(net, [(logits, torch.zeros(64, 128, 128, dtype=torch.long))]).results[0].scores
    assert scores.count <= 64 * 4096
    assert 0.4 < scores.error < 0.8  # of three quarters
    halves = logits[..., :64, :64].sort(-1).values  # 64 pixels of 64 × 64
    verdict = undrift.adapt(net, halves, method="source").verdict
    assert verdict is not None
    assert verdict.before.predicted == 2


def test_labels_of_another_size_are_named() -> None:
    with pytest.raises(undrift.DataError, match="one per position"):
        undrift.evaluate(Segmenter(), [(images(), torch.zeros(4, 8, 8, dtype=torch.long))])


# Any number of labels per image ---------------------------------------------------------------------------------


def tagger() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))


def pooled_tagger() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


def test_sigmoid_outputs_answer_each_label_with_no_and_yes() -> None:
    net = tagger().eval()
    model = undrift.perturb(net, outputs="sigmoid", init_fraction=0.1)
    with model.off():
        expected = net(images()).sigmoid()
    p = undrift.predict(model, images(), samples=0)
    assert p.probs.shape == (4, 2, 5)
    with model.mean():
        assert torch.allclose(undrift.predict(model, images(), samples=0).probs[:, 1], expected, atol=1e-5)
    assert torch.equal(p.label, (p.probs[:, 1] > 0.5).long())


def test_entropy_of_labels_is_the_mean_of_binary_entropies() -> None:
    z = torch.tensor([[0.0, 2.0]])
    p = z.sigmoid()
    expected = -(p * p.log() + (1 - p) * (1 - p).log()).mean()
    assert torch.allclose(undrift.entropy(torch.stack([torch.zeros_like(z), z], 1)), expected)


def test_sigmoid_networks_stream_and_adapt_and_keep_their_option(tmp_path: Any) -> None:
    stream = undrift.stream(tagger(), [images(seed=s) for s in range(2)], outputs="sigmoid")
    assert [p.label.shape for p in stream] == [(4, 5)] * 2
    undrift.save(stream.model, tmp_path / "tags.safetensors")
    again = undrift.load(tagger(), tmp_path / "tags.safetensors")
    assert undrift.predict(again, images()).probs.shape == (4, 2, 5)
    model = undrift.perturb(tagger(), outputs="sigmoid")
    undrift.adapt(model, images(8), undrift.entropy, epochs=1, batch_size=4)
    with pytest.raises(undrift.OptionError, match="any number of labels"):
        undrift.adapt(model, images(8), undrift.Shot(), epochs=1)


def test_class_names_are_those_of_the_labels() -> None:
    names = ("a", "b", "c", "d", "e")
    model = undrift.perturb(tagger(), outputs="sigmoid", classes=names)
    assert undrift.predict(model, images()).probs.shape == (4, 2, 5)
    wrong = undrift.perturb(tagger(), outputs="sigmoid", classes=names[:2])
    with pytest.raises(undrift.OutputError, match="2 class names"):
        undrift.predict(wrong, images())
